"""Runs points one after the other, each in a fresh process, and keeps what is done.

Every row is in scaling.csv as soon as it is known. A run that was stopped goes on where it was: a point that has its
figures, or has run out of memory or time, is not measured again. Runs whose options differ are not mixed in a folder.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import lin_attn
from lin_attn.scaling.measure import LEAST
from lin_attn.scaling.plan import Point, Row, key_of, read_rows, row_of, write_rows
from lin_attn.scaling.worker import check_limit

KEPT = ("ok", "out of memory", "timeout")  # what is not measured again
FINAL = ("out of memory", "timeout")  # after which a mechanism's longer lengths are not tried
# What libraries say on standard error when they cannot get memory and end the process themselves.
LAST_WORDS = ("bad_alloc", "Thread creation failed", "Cannot allocate memory", "MemoryError")


@dataclass(frozen=True)
class Limits:
    """How a point is measured.

    Attributes:
        repeats: timings of each point.
        timeout: seconds after which a point's process is ended, its start included.
        memory: bytes that it may allocate; by default 80 % of what the machine has left.
    """

    repeats: int = 5
    timeout: float = 60.0
    memory: int | None = None


def check_limits(limits: Limits, device: str) -> None:
    """Refuses limits that cannot be kept, before anything runs.

    Raises:
        ValueError: naming the one.
    """
    if limits.repeats < LEAST:
        raise ValueError(f"repeats is {limits.repeats}; wanted at least {LEAST}, for quartiles")
    if not limits.timeout > 0:
        raise ValueError(f"point timeout is {limits.timeout:g} s; wanted a positive number")
    check_limit(limits.memory, device)


def describe(point: Point, limits: Limits, options: dict[str, Any], command: str) -> dict[str, Any]:
    """environment.json: what the figures depend on, and under "options" what must be the same to go on with a run.

    Mechanisms, phases, lengths and backends are not among the options: a later run may add to them.
    """
    if point.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        device, memory = properties.name, properties.total_memory
    else:
        device, memory = _cpu_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {"lin_attn": lin_attn.__version__, "torch": torch.__version__, "python": platform.python_version()}
    found = {"device": device, "threads": point.threads or torch.get_num_threads()}
    asked = {name: getattr(point, name) for name in ("level", "dtype", "heads", "head_dim", "seed")}
    return {
        **versions,
        "system": platform.platform(),
        **found,
        "cores": os.cpu_count(),
        "memory": f"{memory / 2**30:.1f} GiB",
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "command": command,
        "options": {**asked, **options, **asdict(limits), **versions, **found},
    }


def open_folder(folder: Path, environment: dict[str, Any], *, fresh: bool) -> list[Row]:
    """Makes a folder ready for a run: what it holds of an earlier one is taken up, or with `fresh` thrown away.

    Args:
        folder: for scaling.csv and environment.json.
        environment: what is told of the run; under "options" what has to be the same for two runs to be mixed.
        fresh: start over.

    Returns:
        The rows that are kept.

    Raises:
        ValueError: if the folder's rows were measured with other options.
    """
    table, described = folder / "scaling.csv", folder / "environment.json"
    rows: list[Row] = []
    if not fresh and table.exists():
        before = _options_of(described)
        after = json.loads(json.dumps(environment["options"]))
        differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if differing:
            changes = ", ".join(f"{name} was {before.get(name)!r} and is {after.get(name)!r}" for name in differing)
            raise ValueError(f"{folder} holds a run with other options: {changes}; wanted another --out, or --fresh")
        rows = [row for row in read_rows(table) if row.status in KEPT]
    folder.mkdir(parents=True, exist_ok=True)
    rewritten = folder / "scaling.csv.part"
    rewritten.unlink(missing_ok=True)
    write_rows(rewritten, rows)
    described.write_text(json.dumps(environment, indent=2, ensure_ascii=False) + "\n")
    os.replace(rewritten, table)
    return rows


def missing(points: list[Point], rows: list[Row]) -> list[Point]:
    """The points that no row answers yet."""
    done = {key_of(row) for row in rows}
    return [point for point in points if key_of(point) not in done]


def run_points(points: list[Point], rows: list[Row], table: Path, limits: Limits) -> Iterator[Row]:
    """Measures points in their order, which is that of growing length; adds each row to the table, then yields it.

    Args:
        points: what is missing.
        rows: what is there: a mechanism that ran out of memory or time in them is not tried at greater lengths.
        table: path of scaling.csv.
        limits: how each point is measured.
    """
    ended: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.length):
        if row.status in FINAL:
            ended.setdefault(_line_of(row), row)
    for point in points:
        before = ended.get(_line_of(point))
        if before is not None and before.length < point.length:
            row = row_of(point, "skipped", detail=f"{before.status} at length {before.length} already")
        else:
            row = run_point(point, limits)
        if row.status in FINAL:
            ended.setdefault(_line_of(row), row)
        write_rows(table, [row])
        yield row


def run_point(point: Point, limits: Limits) -> Row:
    """Measures a point in a process of its own. Whatever becomes of that process, there is a row."""
    request = {"point": asdict(point), "options": {"repeats": limits.repeats, "memory_limit": limits.memory}}
    process = subprocess.Popen(
        [sys.executable, "-m", "lin_attn.scaling.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own, to be ended whole; the terminal's Ctrl-C comes to this one only
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        printed, told = process.communicate(json.dumps(request), timeout=limits.timeout)
    except subprocess.TimeoutExpired:
        return row_of(point, "timeout", detail=f"was not done after {limits.timeout:g} s, its start included")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return _row_from(point, process.returncode, printed, told)


def _row_from(point: Point, code: int, printed: str, told: str) -> Row:
    """The row that a process left behind, by what it printed and how it ended."""
    lines = printed.strip().splitlines()
    if code == 0 and lines:
        return row_of(point, **json.loads(lines[-1]))
    last = next((line for line in reversed(told.strip().splitlines()) if line.strip()), "nothing on standard error")
    if code == -signal.SIGKILL:  # by no one here: the system's own answer to a lack of memory
        return row_of(point, "out of memory", detail="was killed by the system (SIGKILL)")
    if any(text in told for text in LAST_WORDS):
        return row_of(point, "out of memory", detail=f"ended for want of memory: {last}")
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    return row_of(point, "crash", detail=f"ended {how}: {last}")


def _line_of(item: Point | Row) -> tuple[str, ...]:
    """What is the same along one curve of the picture, of those that one run has."""
    return (item.mechanism, item.backend, item.phase)


def _cpu_name() -> str:
    """The processor's name, which Python tells on few systems."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _options_of(described: Path) -> dict[str, Any]:
    try:
        options = json.loads(described.read_text())["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{described} does not say with which options scaling.csv beside it was measured; wanted --fresh"
        ) from error
    assert isinstance(options, dict)
    return options
