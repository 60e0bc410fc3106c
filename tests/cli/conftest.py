"""Runs of the command line in a folder of their own, on a small corpus, in this process."""

import os
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from models.cli import main

Run = Callable[..., int]


@pytest.fixture(scope="session")
def books(tmp_path_factory) -> Path:
    """Forty small documents of text."""
    folder = tmp_path_factory.mktemp("books")
    for i in range(40):
        text = f"Chapter {i}.\n" + f"The {i}th fox jumps over the lazy dog. " * (20 + i)
        (folder / f"book{i:02}.txt").write_text(text)
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    """Runs `lin-attn` in an empty folder, with an empty corpus cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIN_ATTN_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: main([str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def trained(books, tmp_path_factory) -> Path:
    """The folder of a short run of the debug configuration on the books, in float32."""
    folder = tmp_path_factory.mktemp("trained")
    here = Path.cwd()
    os.chdir(folder)
    try:
        arguments = [*DEBUG, "--data.source", str(books), "--data.cache_dir", str(folder / "cache")]
        with (folder / "printed.txt").open("w") as printed, redirect_stdout(printed):
            assert main([*arguments, "--trainer.precision", "32-true"]) == 0
    finally:
        os.chdir(here)
    return folder / "runs" / "debug" / "version_0"


DEBUG = ["fit", "-c", "configs/lm/debug.yaml", "--trainer.enable_progress_bar", "false"]
