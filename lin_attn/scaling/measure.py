"""Measures one point in this process: time, peak memory, bytes saved for backward, bytes of state.

The order matters. A small call of the same kind comes first, so that thread pools and libraries are set up before the
baseline is taken. Then the inputs are made, the baseline is read, and the first call at full length gives the peak:
later calls reuse what the allocator has kept, and would hide it. Then what is saved is counted; last the time is taken.

`lin-attn scale` calls this in a fresh process for each point; in a notebook, peak_bytes is a lower bound, since memory
that earlier cells gave back to the allocator but not to the system is reused unseen.
"""

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lin_attn.scaling.plan import Point, Row, row_of
from lin_attn.scaling.subjects import build

SMALL = 256  # tokens of the call that sets libraries up: whole blocks for every kernel
LEAST = 3  # timings, however long they take: fewer have no quartiles
SHORTEST = 0.02  # seconds of one timing: calls that are faster are timed several at once


def measure(point: Point, *, repeats: int = 5, warmup: int = 1, budget: float = 5.0) -> Row:
    """Measures a point, in this process.

    Args:
        point: what to measure.
        repeats: timings, each of one call or of as many as last 20 ms.
        warmup: calls before them, beside the one that gives the peak; left out where that one took over a second.
        budget: seconds after which no further timing is begun, once there are three.

    Returns:
        A row of status "ok".

    Raises:
        ValueError: if the point cannot be measured as it stands.
        MemoryError, RuntimeError: what running out of memory raises.
    """
    if repeats < LEAST:
        raise ValueError(f"repeats is {repeats}; wanted at least {LEAST}, for quartiles")
    device = torch.device(point.device)
    torch.manual_seed(point.seed)
    with lean_heap():
        set_up(point)
        operation = build(point)
        first = time.perf_counter()
        peak = peak_bytes(operation.run, device)
        first = time.perf_counter() - first
    saved = None if operation.forward is None else saved_bytes(operation.forward)
    for _ in range(warmup if first < 1 else 0):
        operation.run()
    # Beside a call of many seconds, what the first one had to warm up is nothing: it is the first timing.
    seconds = times(operation.run, device, repeats, budget, [first] if first > budget else [])
    q1, median, q3 = statistics.quantiles(seconds, n=4, method="inclusive")
    return row_of(
        point,
        "ok",
        seconds_median=median,
        seconds_q1=q1,
        seconds_q3=q3,
        peak_bytes=peak,
        saved_bytes=saved,
        state_bytes=operation.state_bytes,
        repeats=len(seconds),
    )


def set_up(point: Point) -> None:
    """Makes a small call of the same kind, after which thread pools and libraries have what they keep."""
    build(replace(point, length=min(SMALL, point.length))).run()


@contextmanager
def lean_heap() -> Iterator[None]:
    """Within it, glibc takes blocks of over 64 KiB from the system one by one, and gives them back at once.

    Blocks that it kept for reuse would be held without being needed, or needed without being seen. That costs time:
    afterwards its thresholds are the highest of those that it comes to by itself.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    mallopt = getattr(libc, "mallopt", None) or (lambda *_: None)  # another C library has its own ways
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 64 * 2**10)
    mallopt(trim_threshold, 64 * 2**10)
    try:
        yield
    finally:
        mallopt(mmap_threshold, 32 * 2**20)
        mallopt(trim_threshold, 64 * 2**20)


def times(
    run: Callable[[], Any], device: torch.device, repeats: int, budget: float, known: Sequence[float] = ()
) -> list[float]:
    """Seconds a call, `repeats` times, known ones included; fewer, but three, once the budget in seconds is spent."""
    calls, seconds = 1, list(known)
    while not seconds:
        spent = _timed(run, device, calls)
        if spent < SHORTEST:  # timed alone, a call of microseconds would be lost in what else the machine does
            calls *= 2
        else:
            seconds = [spent / calls]
    while len(seconds) < repeats and (len(seconds) < LEAST or calls * sum(seconds) < budget):
        seconds.append(_timed(run, device, calls) / calls)
    return seconds


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most memory that one call holds beyond what was held before it.

    On CUDA as torch's allocator counts it; on the CPU as the system does: resident pages, which on Linux have a
    high-water mark that can be reset. Elsewhere the mark is that of the process's whole life: a lower bound.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        before = _lifetime_peak()
        run()
        return _lifetime_peak() - before
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_status("VmRSS")
    run()
    return max(0, memory_status("VmHWM") - before)


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Bytes that autograd keeps from forward to backward, each storage once and whole.

    Inputs and weights that are kept count as well: they have to stay. The same on every run.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def note(x: Tensor) -> None:
        # The storage is held until all are counted: freed, its address could be another's. The tensor is not: it may
        # be the output, and hold the graph that holds it.
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()

    def unpack(_: None) -> Tensor:
        raise AssertionError("only the forward pass is run under saved_bytes")

    with torch.autograd.graph.saved_tensors_hooks(note, unpack):
        forward()
    return sum(storage.nbytes() for storage in storages.values())


def memory_status(field: str) -> int:
    """A line of /proc/self/status, in bytes: VmRSS resident now, VmHWM at most, VmData private and writable."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def _timed(run: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Seconds of that many calls."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1000
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - begun


def _lifetime_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
