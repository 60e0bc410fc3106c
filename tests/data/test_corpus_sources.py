"""Bytes come through untouched, and what cannot be read is named."""

import gzip
import json
import os
import re
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lin_attn.data.corpus import TextCorpus
from lin_attn.data.documents import read_documents
from lin_attn.data.files import SourceFile, find_files
from lin_attn.data.store import write_store
from lin_attn.data.tokenizer import ByteTokenizer, tokenizer_from_dict

MakeCorpus = Callable[..., TextCorpus]


def texts(data: TextCorpus) -> dict[str, bytes]:
    """All documents of all splits by name."""
    found = {}
    for store in data.stores.values():
        for i, name in enumerate(store.names()):
            start, n = int(store.column("start")[i]), int(store.column("n_tokens")[i])
            found[name] = found.get(name, b"") + data.tokenizer.decode(store.tokens(start, start + n))
    return found


def write_parquet(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path)


def test_bytes_of_every_kind_come_through_untouched(
    corpus: MakeCorpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "odd"
    (root / "sub").mkdir(parents=True)
    wanted = {
        "latin1.txt": "é à ü".encode("latin-1"),
        "bom.md": b"\xef\xbb\xbfwith a mark",
        "sub/crlf.py": b"a = 1\r\nb = 2\r\n",
        "utf16-without-nul.txt": "\u4e2d\u6587".encode("utf-16"),
        "packed.txt.gz": b"packed text",
        "rows.jsonl:1": "é\ud800".encode("utf-8", "surrogatepass"),
        "rows.jsonl:3": b"three",
        "table.parquet:1": b"one",
    }
    for name in list(wanted)[:4]:
        (root / name).write_bytes(wanted[name])
    (root / "packed.txt.gz").write_bytes(gzip.compress(b"packed text"))
    (root / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\xc3\xa9\\ud800"}\n\n{"text": "three", "id": 1}\n')
    write_parquet(root / "table.parquet", text=["", "one", None])
    (root / "empty.txt").write_bytes(b"")
    (root / ".hidden").write_bytes(b"hidden")
    with caplog.at_level("INFO"):
        assert texts(corpus(root)) == wanted
    assert "3 empty documents left out" in caplog.text


def test_binary_files_are_left_out_of_folders_with_one_warning(corpus: MakeCorpus, folder: Path) -> None:
    for i in range(7):
        (folder / f"image{i}.png").write_bytes(b"PNG\0\1\2")
    data = corpus(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.prepare_data()
        data.setup()
    messages = [str(w.message) for w in caught if "binary" in str(w.message)]
    assert len(messages) == 1
    assert "left out 7 binary files" in messages[0]
    assert all(f"image{i}.png" in messages[0] for i in range(5))
    assert "and 2 more" in messages[0]
    assert not any("image" in name for name in texts(data))


def test_rows_are_documents_or_joined(corpus: MakeCorpus, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(20)))
    wanted = [f"row {i}".encode() for i in range(20)]
    assert sorted(texts(corpus(path, text_column="body")).values()) == sorted(wanted)
    assert texts(corpus(path, text_column="body", row_separator="\n")) == {"rows.jsonl": b"\n".join(wanted)}
    assert texts(corpus(path, text_column="body", row_separator="")) == {"rows.jsonl": b"".join(wanted)}


@pytest.mark.parametrize("packed", [False, True])
def test_one_long_line_takes_bounded_memory(tmp_path: Path, packed: bool) -> None:
    size = 50_000_000
    path = tmp_path / ("line.txt.gz" if packed else "line.txt")
    with gzip.open(path, "wb", compresslevel=1) if packed else open(path, "wb") as file:
        for _ in range(50):
            file.write(b"x" * (size // 50))
    tracemalloc.start()
    try:
        documents = read_documents(SourceFile(str(path), path.name, explicit=True), "text", None)
        assert write_store(str(tmp_path / "store"), documents, ByteTokenizer()) == (1, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "store" / "tokens.arrow").stat().st_size >= 2 * size
    assert peak < 40_000_000  # a million tokens at a time, several times over


def odd(tmp_path: Path, kind: str) -> str:
    """Writes a source that cannot be read, and gives its name."""
    path = tmp_path / f"{kind}.txt"
    if kind == "binary":
        path.write_bytes(b"text\0")
    elif kind == "packed_binary":
        path = tmp_path / "binary.gz"
        path.write_bytes(gzip.compress(b"\0" * 10))
    elif kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    elif kind == "dangling_in_folder":
        path = tmp_path / "links"
        path.mkdir()
        (path / "dangling.txt").symlink_to(tmp_path / "gone")
    elif kind == "no_glob":
        path = tmp_path / "*.nothing"
    elif kind == "empty_folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("cut_gz", "no_gz"):
        path = tmp_path / f"{kind}.gz"
        data = gzip.compress(os.urandom(30_000).replace(b"\0", b"x"))
        path.write_bytes(data[:-100] if kind == "cut_gz" else b"this is not packed")
    elif kind in ("bad_json", "json_list", "json_number", "no_column", "bad_utf8"):
        path = tmp_path / f"{kind}.jsonl"
        bad = {
            "bad_json": b'{"text": "cut',
            "json_list": b"[1]",
            "json_number": b'{"text": 3}',
            "no_column": b'{"other": "x", "title": "y"}',
            "bad_utf8": b'{"text": "\xff"}',
        }[kind]
        path.write_bytes(b'{"text": "good"}\n' + bad + b"\n")
    elif kind in ("no_parquet", "cut_parquet", "parquet_column", "parquet_numbers"):
        path = tmp_path / f"{kind}.parquet"
        write_parquet(path, **{"other" if kind == "parquet_column" else "text": [1, 2, 3]})
        if kind == "no_parquet":
            path.write_bytes(b"this is no parquet")
        if kind == "cut_parquet":
            path.write_bytes(path.read_bytes()[:-20])
    elif kind == "all_empty":
        path.write_bytes(b"")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("binary", "binary.txt.*binary.*wanted text"),
        ("packed_binary", "binary.gz.*binary.*wanted text"),
        ("missing", "missing.txt.*No such file.*hub:"),
        ("dangling", "dangling.txt.*link to .*gone"),
        ("dangling_in_folder", "links/dangling.txt.*link to .*gone"),
        ("no_glob", r"\*\.nothing.*found nothing.*glob"),
        ("empty_folder", "empty_folder.*found nothing"),
        ("pipe", "pipe.txt.*neither a file nor a folder"),
        ("cut_gz", "cut_gz.gz.*[Cc]ompressed file ended.*gzip"),
        ("no_gz", "no_gz.gz.*[Nn]ot a gzip.*gzip"),
        ("bad_json", r"bad_json\.jsonl:2.*JSON"),
        ("json_list", r"json_list\.jsonl:2.*list.*object"),
        ("json_number", r"json_number\.jsonl:2.*int.*text"),
        ("no_column", r"no_column\.jsonl:2.*'text'.*'other', 'title'.*text_column"),
        ("bad_utf8", r"bad_utf8\.jsonl:2.*utf-8"),
        ("no_parquet", "no_parquet.parquet.*Parquet"),
        ("cut_parquet", "cut_parquet.parquet.*Parquet"),
        ("parquet_column", "parquet_column.parquet.*'text'.*'other'.*text_column"),
        ("parquet_numbers", "parquet_numbers.parquet.*int64.*text"),
        ("all_empty", "all_empty.txt.*1 empty document"),
    ],
)
def test_what_cannot_be_read_is_named(corpus: MakeCorpus, tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        corpus(odd(tmp_path, kind)).setup()
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    corpora = tmp_path / "cache" / "corpora"
    assert not corpora.exists() or not list(corpora.iterdir()), "nothing half-written stays"


def test_links_between_folders_end(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    (tmp_path / "a" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert [file.name for file in find_files(str(tmp_path / "b"))] == ["x.txt"]


def test_the_standard_library_is_there_without_its_tests() -> None:
    names = [file.name for file in find_files("stdlib")]
    assert {"json/decoder.py", "os.py"} <= set(names)
    assert names == sorted(names)
    assert not [n for n in names if re.search(r"(^|/)(tests?|idlelib|site-packages|__pycache__)/", n)]


def test_too_little_text_says_how_much(corpus: MakeCorpus, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * 10)
    with pytest.raises(ValueError, match=r"9 tokens in train.*block_length=100 needs 101"):
        corpus(tmp_path / "short.txt", block_length=100).setup("fit")


@pytest.mark.parametrize(
    "bad",
    [
        {"block_length": 0},
        {"batch_size": True},
        {"eval_batch_size": 0},
        {"split": "random"},
        {"validation_fraction": 1.0},
        {"test_fraction": 0.95},
        {"validation_source": []},
        {"text_column": ""},
        {"row_separator": 3},
        {"seed": -1},
        {"cache_dir": ""},
    ],
)
def test_an_argument_that_cannot_be_meant_is_named(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"^{name} must be .*got {re.escape(repr(value))}"):
        TextCorpus(**bad)


def test_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    data = bytes(range(256))
    tokens = tokenizer.encode(data)
    assert tokenizer.decode([256, *tokens.tolist(), 256]) == data
    assert tokenizer.token_bytes[tokens].sum() == 256
    assert tokenizer.token_bytes[tokenizer.end_id] == 0
    assert tokenizer_from_dict(tokenizer.to_dict()).fingerprint == tokenizer.fingerprint
    for bad in ([257], [-1], [0.5]):
        with pytest.raises(ValueError, match="tokens must be integers"):
            tokenizer.decode(bad)
    with pytest.raises(ValueError, match="bpe"):
        tokenizer_from_dict({"name": "bpe"})
