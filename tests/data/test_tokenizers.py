"""Every byte is accounted for by every tokenizer, and a tokenizer comes back from where it was saved."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from lin_attn.data.blocks import BlockDataset
from lin_attn.data.bpe import sample, train_bpe
from lin_attn.data.chunks import CHUNK, cut
from lin_attn.data.corpus import TextCorpus
from lin_attn.data.documents import Document
from lin_attn.data.files import find_files
from lin_attn.data.subword import SubwordTokenizer
from lin_attn.data.tokenizer import tokenizer_from_dict
from lin_attn.data.tokenizer_spec import TokenizerSpec

MakeCorpus = Callable[..., TextCorpus]

TEXT = b"".join(Path(file.path).read_bytes() for file in find_files("stdlib")[:40])
ODD = [
    random.Random(0).randbytes(100_000),
    "a <|endoftext|> b <|user|> [SEP] é 中文\u00a0 \U0001f600 ".encode() * 3,
    b" \n \n" + b" " * 150_000 + b"word" + b" " * 150_000,
    ("中文没有空格" * 20_000).encode(),
    b"x" * 200_000,
    b"\xff\xfe cut \xe4\xb8",
    TEXT[:300_000],
]


def in_pieces(data: bytes, seed: int) -> list[bytes]:
    """Data cut anywhere, into pieces of very different sizes."""
    draw, pieces, start = random.Random(seed), [], 0
    while start < len(data):
        size = draw.choice([1, 3, 1000, 100_000])
        pieces.append(data[start : start + size])
        start += size
    return pieces


@pytest.fixture(scope="module")
def bpe() -> SubwordTokenizer:
    return train_bpe([Document("text", [TEXT])], 2000, ["<|user|>"])


@cache
def text_tokenizers() -> dict[str, SubwordTokenizer]:
    """Tokenizers whose tokens do not tell their bytes."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[SEP]"]
    words.train_from_iterator(
        [TEXT.decode()[:200_000]], trainers.WordPieceTrainer(vocab_size=600, special_tokens=special)
    )
    pieces = Tokenizer(models.Unigram())
    pieces.normalizer = normalizers.NFKC()
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["[SEP]", "<unk>"]
    unigram = trainers.UnigramTrainer(vocab_size=600, special_tokens=special, unk_token="<unk>")
    pieces.train_from_iterator([TEXT.decode()[:50_000]], unigram)
    return {name: SubwordTokenizer(t.to_str(), "[SEP]") for name, t in (("words", words), ("pieces", pieces))}


@pytest.fixture(scope="module", params=["words", "pieces"])
def lossy(request: pytest.FixtureRequest) -> SubwordTokenizer:
    tokenizer = text_tokenizers()[request.param]
    assert tokenizer.token_bytes is None
    return tokenizer


@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
def test_any_bytes_round_trip_through_a_bpe_and_its_counts_are_theirs(bpe: SubwordTokenizer, data: bytes) -> None:
    tokens = bpe.encode(data)
    assert bpe.decode(tokens) == data
    assert bpe.token_bytes is not None
    assert bpe.token_bytes[tokens].sum() == len(data)
    assert bpe.end_id not in tokens
    decoder = bpe.stream_decoder()
    assert b"".join(decoder(int(token)) for token in tokens[:1000]) == bpe.decode(tokens[:1000])


@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
def test_counts_by_offset_sum_to_the_size_of_the_text(lossy: SubwordTokenizer, data: bytes) -> None:
    pieces = list(lossy.encode_pieces([data]))
    counts = np.concatenate([piece.n_bytes for piece in pieces])
    assert counts.min() >= 0
    assert counts.sum() == len(data)
    assert lossy.end_id not in np.concatenate([piece.tokens for piece in pieces])


def test_a_token_stands_for_the_bytes_up_to_its_end(lossy: SubwordTokenizer) -> None:
    text = "import  Ünknown 中 os"
    [piece] = lossy.encode_pieces([text.encode()])
    stops = [stop for _, stop in lossy._tokenizer.encode(text, add_special_tokens=False).offsets]
    wanted, before = [], 0
    for stop in stops[:-1]:
        wanted.append(len(text[before : max(stop, before)].encode()))
        before = max(stop, before)
    assert piece.n_bytes is not None
    assert piece.n_bytes.tolist() == [*wanted, len(text[before:].encode())]


@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
def test_tokens_do_not_depend_on_how_a_document_arrives(
    bpe: SubwordTokenizer, lossy: SubwordTokenizer, data: bytes
) -> None:
    for tokenizer in (bpe, lossy):
        found = [p.tokens for p in tokenizer.encode_pieces(in_pieces(data, 1))]
        np.testing.assert_array_equal(np.concatenate(found), tokenizer.encode(data))


def test_cutting_changes_no_token_of_ordinary_text(bpe: SubwordTokenizer) -> None:
    assert len(TEXT) > 8 * CHUNK
    whole = bpe._tokenizer.encode(TEXT.decode(), add_special_tokens=False).ids
    np.testing.assert_array_equal(bpe.encode(TEXT), whole)


@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
def test_chunks_joined_are_the_document_and_bounded(data: bytes) -> None:
    chunks = list(cut(in_pieces(data, 2)))
    assert b"".join(chunks) == data
    assert all(0 < len(chunk) <= CHUNK for chunk in chunks)
    if data[:3] in (b"\xe4\xb8\xad", TEXT[:3]):
        for chunk in chunks:
            chunk.decode()  # never within a character


def test_special_tokens_are_whole_and_what_reads_like_the_end_is_text(bpe: SubwordTokenizer) -> None:
    tokens = bpe.encode("hello <|user|> x <|endoftext|>")
    assert bpe.vocab_size == 2000
    assert (tokens == 1999).sum() == 1
    assert bpe.end_id == 0
    assert 0 not in tokens
    assert bpe.decode([0]) == b""


def test_an_end_token_that_merges_can_spell_is_not_found_in_text() -> None:
    tokenizer = train_bpe([Document("text", [b"the end of the end " * 100])], 300, end_token="the")
    tokens = tokenizer.encode("the end the other")
    assert tokenizer.end_id not in tokens
    assert tokenizer.decode(tokens) == b"the end the other"


def test_training_repeats_itself_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    code = (
        "import sys; from lin_attn.data.bpe import train_bpe; from lin_attn.data.documents import Document;"
        "print(train_bpe([Document('t', [open(sys.argv[1], 'rb').read()])], 1000).fingerprint)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "text")]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert found == train_bpe([Document("t", [TEXT])], 1000).fingerprint + "\n"


def test_a_sample_is_evenly_spaced_and_bounded() -> None:
    documents = [Document(str(i), [b"%05d" % i]) for i in range(1000)]
    assert sample(iter(documents), 5000) == [b"%05d" % i for i in range(1000)]
    kept = [int(chunk) for chunk in sample(iter(documents), 700)]
    assert kept == list(range(0, 1000, 8))


def test_a_tokenizer_comes_back_from_plain_values(
    bpe: SubwordTokenizer, lossy: SubwordTokenizer, tmp_path: Path
) -> None:
    for tokenizer in (bpe, lossy):
        torch.save({"tokenizer": tokenizer.to_dict()}, tmp_path / "saved.ckpt")
        again = tokenizer_from_dict(torch.load(tmp_path / "saved.ckpt", weights_only=True)["tokenizer"])
        by_name = TokenizerSpec(str(tmp_path / "saved.ckpt")).open()
        for other in (again, by_name):
            assert other.fingerprint == tokenizer.fingerprint
            np.testing.assert_array_equal(other.encode(ODD[1]), tokenizer.encode(ODD[1]))
    with pytest.raises(ValueError, match="fields"):
        tokenizer_from_dict({"name": "tokenizers", "json": "{}"})


@pytest.fixture
def novels(tmp_path: Path) -> Path:
    root = tmp_path / "novels"
    root.mkdir()
    for i in range(40):
        (root / f"{i:02}.txt").write_bytes(TEXT[i * 3000 : i * 3000 + 3000 + i])
    return root


@pytest.mark.parametrize("split", ["document", "tail"])
@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_every_tokenizer_has_the_same_bytes_in_each_split_and_blocks_count_them(
    corpus: MakeCorpus, novels: Path, tmp_path: Path, kind: str, split: str
) -> None:
    options: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 400}
    if kind == "words":
        (tmp_path / "tokenizer.json").write_text(text_tokenizers()["words"].to_dict()["json"])
        options = {"tokenizer": str(tmp_path / "tokenizer.json"), "end_token": "[SEP]"}
    by_bytes, data = corpus(novels, split=split), corpus(novels, split=split, **options)
    for name, store in data.stores.items():
        wanted = by_bytes.stores[name]
        assert store.names() == wanted.names()
        np.testing.assert_array_equal(store.column("n_bytes"), wanted.column("n_bytes"))
        blocks = BlockDataset(store, data.tokenizer, 8)
        n_bytes = sum(int(blocks[i]["n_bytes"]) for i in range(len(blocks)))
        assert n_bytes == int(wanted.column("n_bytes").sum())


def test_a_bpe_is_learned_from_the_training_text_alone_and_cached(corpus: MakeCorpus, novels: Path) -> None:
    data = corpus(novels, tokenizer="bpe", vocab_size=400)
    assert data.vocab_size == 400  # before any text is read
    text = []
    for i in range(data.stores["train"].n_documents):
        start, n = (int(data.stores["train"].column(c)[i]) for c in ("start", "n_tokens"))
        text.append(Document("", [data.tokenizer.decode(data.stores["train"].tokens(start, start + n))]))
    assert data.tokenizer.fingerprint == train_bpe(text, 400).fingerprint
    assert (
        data.tokenizer.fingerprint
        != train_bpe([Document("", [p.read_bytes()]) for p in novels.iterdir()], 400).fingerprint
    )
    again = corpus(novels, tokenizer="bpe", vocab_size=400)
    assert again.tokenizer.fingerprint == data.tokenizer.fingerprint
    assert again.stores["train"].folder == data.stores["train"].folder
    other = corpus(novels, tokenizer="bpe", vocab_size=400, special_tokens=["<|x|>"])
    assert other.stores["train"].folder != data.stores["train"].folder


def save_transformers(folder: Path) -> None:
    """A tokenizer of transformers as save_pretrained leaves it."""
    transformers = pytest.importorskip("transformers")
    inner = train_bpe([Document("", [TEXT])], 400, end_token="<|stop|>")._tokenizer
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|stop|>").save_pretrained(folder)


def test_a_folder_of_transformers_tells_its_end_token(tmp_path: Path) -> None:
    save_transformers(tmp_path)
    tokenizer = TokenizerSpec(str(tmp_path)).open()
    assert tokenizer.to_dict()["end_token"] == "<|stop|>"
    assert tokenizer.decode(tokenizer.encode(ODD[0])) == ODD[0]


def test_a_tokenizer_of_the_hub_is_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0" * 40
    save_transformers(tmp_path / "models--Some--tokenizer" / "snapshots" / commit)
    (tmp_path / "models--Some--tokenizer" / "refs").mkdir()
    (tmp_path / "models--Some--tokenizer" / "refs" / "main").write_text(commit)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert TokenizerSpec("hub:Some/tokenizer").open().vocab_size == 400
    with pytest.raises(ValueError, match="hub:Some/other") as caught:
        TokenizerSpec("hub:Some/other").open()
    for word in (str(tmp_path), "HF_HOME", "HF_HUB_OFFLINE=1", "tokenizer.json"):
        assert word in str(caught.value)


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ByT5Tokenizer.*bits per byte"):
        TokenizerSpec(str(tmp_path)).open()


def test_dropout_padding_and_truncation_are_switched_off(bpe: SubwordTokenizer) -> None:
    definition = json.loads(bpe.to_dict()["json"])
    definition["model"]["dropout"] = 0.5
    loose = Tokenizer.from_str(json.dumps(definition))
    loose.enable_padding(length=99)
    loose.enable_truncation(3)
    loose.add_special_tokens([AddedToken("<|pad|>")])
    np.testing.assert_array_equal(
        SubwordTokenizer(loose.to_str(), "<|endoftext|>").encode(TEXT[:999]), bpe.encode(TEXT[:999])
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokenizer": "no/such.json"}, "no/such.json.*No such file.*tokenizer.json"),
        ({"tokenizer": "no/such.ckpt"}, "no/such.ckpt.*no such file"),
        ({"tokenizer": __file__}, "test_tokenizers.py.*Extra data"),
        ({"vocab_size": 300}, "vocab_size is 300 with tokenizer 'bytes'"),
        ({"special_tokens": ["<a>"]}, "special_tokens is .* with tokenizer 'bytes'"),
        ({"end_token": "<a>"}, "end_token is '<a>' with tokenizer bytes"),
        ({"tokenizer": "bpe", "vocab_size": 256}, "vocab_size is 256; wanted at least 257"),
        ({"tokenizer": "bpe", "special_tokens": ["a b"]}, "'a b'; wanted one without white space"),
        ({"tokenizer": "bpe", "special_tokens": ["<a>", "<a>"]}, "each once"),
        ({"tokenizer": "bpe", "special_tokens": "<a>"}, "special_tokens must be a list"),
    ],
)
def test_a_tokenizer_that_cannot_be_meant_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TextCorpus(**options)


def test_an_end_token_that_is_not_there_lists_those_that_are(bpe: SubwordTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_dict()["json"])
    assert TokenizerSpec(str(path)).open().fingerprint == bpe.fingerprint
    with pytest.raises(ValueError, match=r"'</s>'.*<\|endoftext\|>"):
        TokenizerSpec(str(path), end_token="</s>").open()
