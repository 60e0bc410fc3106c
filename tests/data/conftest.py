"""A cache of its own for each test, and no hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lin_attn.data import TextCorpus

MakeCorpus = Callable[..., TextCorpus]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCorpus:
    """Makes a TextCorpus of short blocks whose cache is the test's own."""
    monkeypatch.setenv("LIN_ATTN_CACHE", str(tmp_path / "cache"))

    def make(source: Any, **options: Any) -> TextCorpus:
        source = [str(one) for one in source] if isinstance(source, list) else str(source)
        return TextCorpus(source, **{"block_length": 8, "batch_size": 4, **options})

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty documents of 30 to 69 bytes, each unlike the others."""
    root = tmp_path / "text"
    for i in range(40):
        path = root / f"part{i % 3}" / f"doc{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes((i * 7 + j * 11) % 255 + 1 for j in range(30 + i)))
    return root
