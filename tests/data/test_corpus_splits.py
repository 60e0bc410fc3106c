"""Which text goes where."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lin_attn.data.corpus import TextCorpus
from lin_attn.data.splits import assign, name_hash

MakeCorpus = Callable[..., TextCorpus]


def split_names(data: TextCorpus) -> dict[str, list[str]]:
    return {split: store.names() for split, store in data.stores.items()}


def split_bytes(data: TextCorpus) -> dict[str, bytes]:
    return {split: data.tokenizer.decode(store.tokens(0, 10**9)) for split, store in data.stores.items()}


def test_split_keeps_every_document_whole_and_once(corpus: MakeCorpus, folder: Path) -> None:
    data = corpus(folder, validation_fraction=0.2, test_fraction=0.2)
    found = {}
    for store in data.stores.values():
        assert store.tokens(0, 1).tolist() == [256]
        for i, name in enumerate(store.names()):
            start, n = int(store.column("start")[i]), int(store.column("n_tokens")[i])
            assert store.column("n_bytes")[i] == n
            assert store.tokens(start + n, start + n + 1).tolist() == [256]
            assert name not in found
            found[name] = data.tokenizer.decode(store.tokens(start, start + n))
    assert found == {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.txt")}
    assert all(len(store) > 1 for store in data.stores.values())
    assert sum(len(store) - 1 for store in data.stores.values()) == sum(len(text) + 1 for text in found.values())


def test_adding_a_document_moves_no_other_and_moving_the_folder_changes_nothing(
    corpus: MakeCorpus, folder: Path, tmp_path: Path
) -> None:
    options = {"validation_fraction": 0.2, "test_fraction": 0.2}
    before = split_names(corpus(folder, **options))
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(folder, moved)
    assert split_names(corpus(moved, **options)) == before
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1, "a moved folder needs no new cache"
    (moved / "part0" / "new.txt").write_text("a new document")
    after = split_names(corpus(moved, **options))
    for split, names in before.items():
        assert [name for name in after[split] if name != "part0/new.txt"] == names


def test_document_names_are_those_a_range_touches(corpus: MakeCorpus, folder: Path) -> None:
    data = corpus(folder)
    store = data.stores["train"]
    owner = [""] * len(store)  # of each token, the document it belongs to
    for i, name in enumerate(store.names()):
        start, n = int(store.column("start")[i]), int(store.column("n_tokens")[i])
        owner[start : start + n + 1] = [name] * (n + 1)
    rng = np.random.default_rng(0)
    for start, n in rng.integers(0, [[len(store), 150]], (200, 2)).tolist():
        wanted = list(dict.fromkeys(name for name in owner[start : start + n] if name))
        assert data.document_names("train", start, n) == wanted


@pytest.mark.parametrize("n", [3, 4, 20, 1000])
@pytest.mark.parametrize("fractions", [(0.0, 0.0), (0.05, 0.05), (0.0, 0.3), (0.6, 0.39), (0.001, 0.998)])
def test_no_wanted_split_is_empty(n: int, fractions: tuple[float, float]) -> None:
    assigned = assign(np.array([name_hash(f"file{i}") for i in range(n)]), *fractions)
    sizes = np.bincount(assigned, minlength=3)
    assert sizes[0] > 0
    assert [size > 0 for size in sizes[1:]] == [fraction > 0 for fraction in fractions]
    if n == 1000:
        np.testing.assert_allclose(sizes[1:] / n, fractions, atol=0.05)  # three sigma are 0.047


@pytest.mark.parametrize("n_files", [1, 2, 5])
def test_tail_cuts_the_last_bytes(corpus: MakeCorpus, tmp_path: Path, n_files: int) -> None:
    root = tmp_path / "tail"
    root.mkdir()
    text = bytes(i % 251 for i in range(1, 1001)).replace(b"\0", b"x")
    for i in range(n_files):
        (root / f"{i}.txt").write_bytes(text[i * 1000 // n_files : (i + 1) * 1000 // n_files])
    data = corpus(root, split="tail")
    assert split_bytes(data) == {"train": text[:900], "validation": text[900:950], "test": text[950:]}
    if n_files < 3:
        assert split_bytes(corpus(root)) == split_bytes(data), "too few documents to hand out"
    for store in data.stores.values():
        assert int(store.column("n_bytes").sum()) == len(data.tokenizer.decode(store.tokens(0, 10**9)))


def test_a_file_for_validation_is_not_trained_on(corpus: MakeCorpus, folder: Path) -> None:
    data = corpus(folder, validation_source=str(folder / "part0" / "*.txt"), test_source=str(folder / "part1"))
    names = split_names(data)
    assert names["validation"] == sorted(p.name for p in (folder / "part0").iterdir())
    assert names["test"] == sorted(p.name for p in (folder / "part1").iterdir())
    assert names["train"] == sorted(f"part2/{p.name}" for p in (folder / "part2").iterdir())


def test_a_file_named_twice_is_read_once(corpus: MakeCorpus, folder: Path) -> None:
    data = corpus([folder, folder / "part0" / "doc00.txt", folder / "**" / "*.txt"])
    assert sum(store.n_documents for store in data.stores.values()) == 40


def test_without_fractions_all_text_is_for_training(corpus: MakeCorpus, folder: Path) -> None:
    data = corpus(folder, validation_fraction=0.0, test_fraction=0.0)
    assert data.stores["train"].n_documents == 40
    assert data.val_dataloader() == data.test_dataloader() == []


def test_tail_cut_between_documents_leaves_each_its_end(corpus: MakeCorpus, tmp_path: Path) -> None:
    root = tmp_path / "even"
    root.mkdir()
    for i in range(20):
        (root / f"{i:02}.txt").write_bytes(bytes([65 + i]) * 50)
    data = corpus(root, split="tail")
    assert [len(data.stores[split]) for split in ("train", "validation", "test")] == [1 + 18 * 51, 52, 52]
    assert data.stores["validation"].tokens(0, 52).tolist() == [256, *[65 + 18] * 50, 256]
    assert split_names(data)["test"] == ["19.txt"]
