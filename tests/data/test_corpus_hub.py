"""Hub sets, by a folder that looks like one: nothing here needs the network."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lin_attn.data.corpus import TextCorpus

MakeCorpus = Callable[..., TextCorpus]

# Rows as wikitext has them: a heading or paragraph each, with its newline, and empty ones between.
ROWS = ["", " = Heading = \n", "", " A paragraph , with spaces . \n", " Another é \n"] * 20


def split_bytes(data: TextCorpus) -> dict[str, bytes]:
    return {split: data.tokenizer.decode(store.tokens(0, 10**9)) for split, store in data.stores.items()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with splits train, validation and test, and a datasets cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    root = tmp_path / "wiki"
    root.mkdir()
    for split, n in (("train", 100), ("validation", 10), ("test", 15)):
        table = pa.table({"text": ROWS[:n], "id": list(range(n))})
        pq.write_table(table, root / f"{split}-00000-of-00001.parquet")
    return root


def test_rows_joined_are_the_splits_of_the_set(corpus: MakeCorpus, hub: Path) -> None:
    data = corpus(f"hub:{hub}", row_separator="")
    sizes = {"train": 100, "validation": 10, "test": 15}
    assert split_bytes(data) == {split: "".join(ROWS[:n]).encode() for split, n in sizes.items()}
    assert data.document_names("validation", 1, 5) == ["validation"]


def test_rows_are_documents_by_default(corpus: MakeCorpus, hub: Path) -> None:
    store = corpus(f"hub:{hub}").stores["train"]
    assert store.names() == [f"train:{i}" for i, row in enumerate(ROWS) if row]


def test_train_is_split_where_the_set_has_no_other(corpus: MakeCorpus, hub: Path) -> None:
    for split in ("validation", "test"):
        next(hub.glob(f"{split}-*")).unlink()
    data = corpus(f"hub:{hub}", row_separator="")
    assert b"".join(split_bytes(data).values()) == "".join(ROWS).encode()
    assert all(len(store) > 1 for store in data.stores.values())


def test_a_slice_of_a_split_and_a_split_for_validation_alone(corpus: MakeCorpus, hub: Path) -> None:
    data = corpus(f"hub:{hub}", row_separator="", train_split="train[:50%]", test_split=None)
    found = split_bytes(data)
    assert found["train"] + found["test"] == "".join(ROWS[:50]).encode()
    assert found["validation"] == "".join(ROWS[:10]).encode()


def test_cache_follows_the_content(corpus: MakeCorpus, hub: Path) -> None:
    before = split_bytes(corpus(f"hub:{hub}", row_separator=""))
    assert split_bytes(corpus(f"hub:{hub}", row_separator="\n")) != before
    pq.write_table(pa.table({"text": ["changed " * 10]}), hub / "train-00000-of-00001.parquet")
    for split in ("validation", "test"):
        pq.write_table(pa.table({"text": ROWS[:10]}), hub / f"{split}-00000-of-00001.parquet")
    assert split_bytes(corpus(f"hub:{hub}", row_separator=""))["train"] == b"changed " * 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train_split": "nope"}, "no split 'nope'.*'train', 'validation', 'test'"),
        ({"validation_split": "dev"}, "no split 'dev'.*'train', 'validation', 'test'"),
        ({"text_column": "body"}, "no column 'body'.*'text', 'id'"),
        ({"text_column": "id"}, "'id' holds int64.*wanted text"),
        ({"config_name": "nope"}, "BuilderConfig 'nope' not found.*config_name"),
        ({"train_split": "train[a:b]"}, "cannot load"),
    ],
)
def test_what_the_set_does_not_have_is_named(corpus: MakeCorpus, hub: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        corpus(f"hub:{hub}", **options).setup()
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.usefixtures("hub")
def test_a_hub_out_of_reach_says_what_to_do(corpus: MakeCorpus, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hub:Nobody/nothing") as caught:
        corpus("hub:Nobody/nothing").setup()
    for word in (str(tmp_path / "datasets"), "HF_HOME", "HF_HUB_OFFLINE=1", "local files"):
        assert word in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
