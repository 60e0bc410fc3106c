"""Hashes of files, remembered for as long as the file system says that a file has not been touched."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lin_attn.data.documents import PIECE, reading

# Smaller files are hashed each time: reading them costs less than remembering them.
LARGE = 1 << 20
# A file that was written so shortly before it was hashed may be written again with the same time stamp.
SETTLED_NS = 2_000_000_000


def digests(paths: Sequence[str], memo: str | None = None) -> list[bytes]:
    """blake2b of each file's bytes.

    Args:
        paths: The files.
        memo: A JSON file that has the hashes of large files by path, size, inode and times of change (the system sets
            the latter whenever bytes are written, and no program can set it back); it is made, and brought up to date.

    Raises:
        ValueError: A file cannot be read.
    """
    known = _read(memo)
    now = time.time_ns()
    with ThreadPoolExecutor() as threads:  # hashing lets other threads run
        found = list(threads.map(lambda path: _digest(path, known.get(os.path.abspath(path))), paths))
    fresh = {
        os.path.abspath(path): [*stamp, digest.hex()]
        for path, (stamp, digest, was_known) in zip(paths, found, strict=True)
        if not was_known and stamp[0] >= LARGE and max(stamp[2:]) < now - SETTLED_NS
    }
    if memo is not None and fresh:
        _write(memo, {**known, **fresh})
    return [digest for _, digest, _ in found]


def _digest(path: str, known: object) -> tuple[list[int], bytes, bool]:
    with reading(path), open(path, "rb") as stream:
        status = os.fstat(stream.fileno())
        stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        if isinstance(known, list) and known[:-1] == stamp:
            return stamp, bytes.fromhex(known[-1]), True
        content = hashlib.blake2b(digest_size=16)
        while piece := stream.read(PIECE):
            content.update(piece)
    return stamp, content.digest(), False


def _read(memo: str | None) -> dict[str, object]:
    try:
        with open(memo or os.devnull, encoding="utf-8") as file:
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(memo: str, known: dict[str, object]) -> None:
    """Several processes may write at once: the last one wins, and what is lost is hashed again."""
    with contextlib.suppress(OSError):  # a cache that cannot be written is told of when the corpus is built
        os.makedirs(os.path.dirname(memo), exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=os.path.dirname(memo))
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({path: value for path, value in known.items() if os.path.exists(path)}, file)
        os.replace(new, memo)
