"""A remembered hash is that of the bytes that are there now."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from lin_attn.data import digests as module
from lin_attn.data.digests import digests


def test_a_touched_file_is_hashed_again_and_an_untouched_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    read: list[str] = []
    blake2b = hashlib.blake2b

    def counted(**options: int) -> "hashlib._Hash":
        read.append("hashed")
        return blake2b(**options)

    monkeypatch.setattr(module.hashlib, "blake2b", counted)
    large, small, memo = tmp_path / "large", tmp_path / "small", str(tmp_path / "cache" / "files.json")
    large.write_bytes(b"x" * (1 << 20))
    small.write_bytes(b"x")
    paths = [str(large), str(small)]
    time.sleep(0.02)
    first = digests(paths, memo)
    assert len(read) == 2
    assert digests(paths, memo) == first
    assert len(read) == 3, "the small one only"
    status = large.stat()
    large.write_bytes(b"y" * (1 << 20))
    os.utime(large, ns=(status.st_atime_ns, status.st_mtime_ns))  # the time of its bytes is set back
    assert digests(paths, memo)[0] != first[0]
    Path(memo).write_text("[broken")
    assert digests(paths, memo)[1] == first[1]


def test_a_file_written_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"x" * (1 << 20))
    memo = tmp_path / "files.json"
    assert digests([str(tmp_path / "new")], str(memo)) == digests([str(tmp_path / "new")])
    assert not memo.exists() or not json.loads(memo.read_text())
