"""Memory for large results, kept when they are gone.

A C library gives a large block back to the system as soon as it is freed, one of 32 MiB or more always, and the system
hands the next one out page by page, zeroed: that can take longer than the attention that fills it, above all in a
virtual machine that reports free memory to its host. So large results lie in memory of their own, which the next result
of that size is given. What is kept is bounded, see `limit`; `release` gives it back. The storage of such a result
cannot be resized.
"""

import ctypes
import functools
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LARGE = 2**22  # bytes
_PAGE = 2**21  # a huge one's bytes

_kept: deque[mmap.mmap] = deque()  # the latest last; each operation on it is atomic, as finalisers run in any thread


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU without gaps, in kept memory if it is large and there is some."""
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // _PAGE) * _PAGE
    if count * dtype.itemsize < LARGE or size > limit():
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    try:
        memory = _take(size)
    except OSError:  # what is kept is not there for others to go without
        release()
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    loan = _loan(size).from_buffer(memory)
    loan.memory = memory
    result = torch.frombuffer(loan, dtype=dtype, count=count)
    return result.set_(result.untyped_storage(), 0, shape, strides)  # a tensor, not a view of one


@functools.lru_cache(maxsize=64)
def _loan(size: int) -> Any:
    """The type of a buffer that gives its memory back when the last tensor on it is gone."""

    def give_back(self: Any, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            _give_back(self.memory)

    return type("Loan", (ctypes.c_char * size,), {"__del__": give_back})


def limit() -> int:
    """Bytes that are kept at most: LIN_ATTN_KEPT_MIB, else an eighth of the memory that this process may use.

    Raises:
        ValueError: if LIN_ATTN_KEPT_MIB is not a whole number of 0 or more.
    """
    chosen = os.environ.get("LIN_ATTN_KEPT_MIB")
    if chosen is None:
        return _memory() // 8
    if not chosen.isdecimal():
        raise ValueError(f"LIN_ATTN_KEPT_MIB is {chosen!r}; wanted a whole number of MiB, 0 to keep nothing")
    return int(chosen) * 2**20


def release() -> None:
    """Gives all that is kept back to the system."""
    _kept.clear()


@functools.cache
def _memory() -> int:
    """Bytes of the machine, or of the container if that has fewer; 0 where the system does not say."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total


def _take(size: int) -> mmap.mmap:
    """Kept memory of that size, else new."""
    passed = 0
    try:
        for _ in range(len(_kept)):
            memory = _kept.pop()
            if len(memory) == size:
                return memory
            _kept.appendleft(memory)
            passed += 1
    except IndexError:  # another thread took the last one
        pass
    finally:
        _kept.rotate(-passed)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _give_back(memory: mmap.mmap) -> None:
    _kept.append(memory)
    while sum(map(len, list(_kept))) > limit():
        try:
            _kept.popleft()
        except IndexError:
            break


if hasattr(os, "register_at_fork"):  # a child would copy each page that its parent writes to next
    os.register_at_fork(after_in_child=release)
