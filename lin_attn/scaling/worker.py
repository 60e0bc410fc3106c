"""The process that measures one point and ends: `python -m lin_attn.scaling.worker`.

It reads a point and its options as JSON on standard input, and prints what came out as one line of JSON: a status and
the figures, or a status and a sentence. Memory is limited here, after the imports and a small call, so that the limit
is on the point alone: running out is an error that Python sees, and the machine neither swaps nor calls its killer.
"""

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from lin_attn.scaling.measure import lean_heap, measure, memory_status, set_up
from lin_attn.scaling.plan import Point

SHARE = 0.8  # of the memory that is available, where no limit is given
# What the allocators of torch say when they have nothing left; the C++ library's says std::bad_alloc.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "error return without exception set",  # of C code that could not even make its exception
)


def main() -> None:
    """Reads, measures, prints."""
    end_with_parent()
    request = json.load(sys.stdin)
    print(json.dumps(measured(Point(**request["point"]), **request["options"])), flush=True)  # noqa: T201


def measured(point: Point, memory_limit: int | None = None, **options: Any) -> dict[str, Any]:
    """Status and figures of a point, or status and detail."""
    if point.threads is not None:
        torch.set_num_threads(point.threads)
    device = torch.device(point.device)
    check_limit(memory_limit, device.type)
    limit = limit_memory(None, device)
    try:
        with lean_heap():
            set_up(point)  # threads that cannot be had, or a library without work space, would end the process
        limit = limit_memory(memory_limit, device)
        row = measure(point, **options).as_dict()
    except (MemoryError, RuntimeError, SystemError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in OUT_OF_MEMORY):
            return {"status": "error", "detail": _sentence(error)}
        within = "" if limit is None else f" within {limit / 2**20:,.0f} MiB"
        return {"status": "out of memory", "detail": f"ran out of memory{within}: {_sentence(error)}"}
    except Exception as error:  # a point's failure is a row, whatever it was
        return {"status": "error", "detail": _sentence(error)}
    return {name: row[name] for name in list(row)[list(row).index("status") :]}


def limit_memory(limit: int | None, device: torch.device) -> int | None:
    """Limits what this process may allocate from now on, in bytes; by default to 80 % of what the machine has left.

    On Linux's CPU the limit is on private writable memory (RLIMIT_DATA), beyond what the imports have; on CUDA it is on
    torch's allocator, whose default is the whole device.

    Returns:
        The limit, or None if there is none.

    Raises:
        ValueError: if a limit is given that this system cannot enforce.
    """
    check_limit(limit, device.type)
    if device.type == "cuda":
        if limit is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        return limit
    if not sys.platform.startswith("linux"):
        return None
    import resource

    limit = int(SHARE * available_memory()) if limit is None else limit
    most = memory_status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return limit


def check_limit(limit: int | None, device_type: str) -> None:
    """Refuses a limit that would be ignored.

    Raises:
        ValueError: for a limit on a CPU whose system is not Linux.
    """
    if limit is not None and device_type != "cuda" and not sys.platform.startswith("linux"):
        raise ValueError(f"memory limit is {limit} bytes, which {sys.platform} cannot enforce on the CPU; leave it out")


def available_memory() -> int:
    """Bytes that can be allocated on Linux without swapping, in this container's bounds."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [available] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    try:
        bound = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control groups, or "max"
        return available
    return max(0, min(available, bound))


def end_with_parent() -> None:
    """Asks Linux to end this process if the one that started it is killed, rather than to leave it computing."""
    if sys.platform.startswith("linux"):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _sentence(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


if __name__ == "__main__":
    main()
