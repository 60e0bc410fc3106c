"""The cache is found by content, checked, and survives several builders."""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lin_attn.data import cache
from lin_attn.data import corpus as corpus_module
from lin_attn.data.corpus import TextCorpus

MakeCorpus = Callable[..., TextCorpus]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were built."""
    built: list[str] = []

    def build(folder: str, *rest: Any) -> Any:
        built.append(folder)
        return cache.build_corpus(folder, *rest)

    monkeypatch.setattr(corpus_module, "build_corpus", build)
    return built


def test_same_content_is_built_once_and_changed_content_anew(
    corpus: MakeCorpus, folder: Path, builds: list[str]
) -> None:
    data = corpus(folder)
    data.prepare_data()
    data.setup("fit")
    corpus(folder, block_length=16, batch_size=2, seed=5).setup()
    for path in folder.rglob("*.txt"):
        os.utime(path, (1, 1))
    corpus(folder).setup()
    assert len(builds) == 1
    changed = folder / "part0" / "doc00.txt"
    changed.write_bytes(changed.read_bytes()[::-1])
    corpus(folder).setup()
    changed.rename(folder / "part0" / "renamed.txt")
    corpus(folder).setup()
    corpus(folder, split="tail").setup()
    corpus(folder, validation_fraction=0.3).setup()
    assert len(set(builds)) == len(builds) == 5


@pytest.mark.parametrize("damage", ["cut tokens", "cut documents", "no meta", "bad meta", "lost split", "a file"])
def test_damaged_cache_is_built_anew(corpus: MakeCorpus, folder: Path, builds: list[str], damage: str) -> None:
    data = corpus(folder)
    wanted = data.stores["train"].tokens(0, 10**9).copy()
    made = Path(builds[0])
    if damage.startswith("cut"):
        path = made / "train" / f"{damage.split()[1]}.arrow"
        os.truncate(path, path.stat().st_size - 40)
    elif damage == "no meta":
        (made / "corpus.json").unlink()
    elif damage == "bad meta":
        (made / "corpus.json").write_text("[]")
    else:
        made.joinpath("test").rename(made / "gone")
        if damage == "a file":
            made.rename(made.parent / "gone")
            made.write_text("no folder")
    again = corpus(folder)
    assert (again.stores["train"].tokens(0, 10**9) == wanted).all()
    assert len(builds) == 2
    corpus(folder).setup()
    assert len(builds) == 2


def test_damaged_tokens_of_the_same_length_on_disk_are_noticed(
    corpus: MakeCorpus, folder: Path, builds: list[str]
) -> None:
    corpus(folder).setup()
    path = Path(builds[0]) / "train" / "tokens.arrow"
    path.write_bytes(b"\0" * path.stat().st_size)
    corpus(folder).setup()
    assert len(builds) == 2


def _build(folder: str, cache_dir: str, barrier: Any, results: Any) -> None:
    data = TextCorpus(folder, block_length=8, cache_dir=cache_dir)
    barrier.wait(60)
    data.setup()
    results.put(data.stores["train"].tokens(0, 10**9).tolist())


def test_two_processes_at_once_both_get_the_corpus(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(3):
        barrier, results = context.Barrier(2), context.Queue()
        arguments = (str(folder), str(tmp_path / f"cache{attempt}"), barrier, results)
        processes = [context.Process(target=_build, args=arguments) for _ in range(2)]
        for process in processes:
            process.start()
        one, other = results.get(timeout=60), results.get(timeout=60)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert one == other
        assert len(list((tmp_path / f"cache{attempt}" / "corpora").iterdir())) == 1, "no scratch folder stays"


def test_a_cache_that_cannot_be_written_says_what_to_do(corpus: MakeCorpus, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"file/deeper/corpora.*cache_dir.*LIN_ATTN_CACHE"):
        corpus(folder, cache_dir=str(tmp_path / "file" / "deeper")).setup()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIN_ATTN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.default_cache_dir() == "/xdg/lin_attn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.default_cache_dir() == "/home/someone/.cache/lin_attn"
    monkeypatch.setenv("LIN_ATTN_CACHE", "/chosen")
    assert cache.default_cache_dir() == "/chosen"


def test_a_corpus_that_comes_up_just_before_ours_is_used(
    corpus: MakeCorpus, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def late_rename(old: str, new: str) -> None:
        if Path(old).name == "new":
            shutil.copytree(old, new)  # another process, between our last look and our renaming
        rename(old, new)

    monkeypatch.setattr(cache.os, "rename", late_rename)
    assert corpus(folder).stores["train"].n_documents == 33
