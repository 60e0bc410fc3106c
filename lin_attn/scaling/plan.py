"""What is measured, and what comes of it: points, rows, and the CSV file that keeps the rows.

A point is one mechanism in one phase at one length; a row is a point with its figures, or with the reason why it has
none. A figure that there is not is None, and an empty cell in the file.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = (
    "mechanism",
    "backend",
    "level",
    "phase",
    "device",
    "dtype",
    "batch",
    "heads",
    "head_dim",
    "length",
    "status",
    "seconds_median",
    "seconds_q1",
    "seconds_q3",
    "peak_bytes",
    "saved_bytes",
    "state_bytes",
    "repeats",
    "detail",
)
MECHANISMS = ("linear", "softmax-flash", "softmax-math")
PHASES = ("forward", "train", "decode")
LEVELS = ("op", "model")
DTYPES = ("float32", "bfloat16", "float16", "float64")
STATUSES = ("ok", "out of memory", "timeout", "crash", "skipped", "error")


@dataclass(frozen=True)
class Point:
    """One measurement to make.

    Args:
        mechanism: one of MECHANISMS.
        backend: of `lin_attn.linear_attention`; for softmax the name of torch's kernel, "flash" or "math".
        level: "op" for the attention alone, "model" for a whole language model.
        phase: "forward", "train" (forward and backward), or "decode" (one token at position `length`).
        device: "cpu" or "cuda".
        dtype: of the inputs, or of the model's weights: a name of torch's.
        batch: B.
        heads: H.
        head_dim: D.
        length: N.
        seed: of inputs and weights.
        threads: of torch on the CPU; its own choice by default.
        model: configuration or checkpoint for level "model".
        subject: who makes the operation, as "module:function" of a Point.
    """

    mechanism: str
    backend: str
    level: str
    phase: str
    device: str
    dtype: str
    batch: int
    heads: int
    head_dim: int
    length: int
    seed: int = 0
    threads: int | None = None
    model: str | None = None
    subject: str = "lin_attn.scaling.subjects:operation"


@dataclass(frozen=True)
class Row:
    """A point's figures; the columns of scaling.csv.

    Attributes:
        status: one of STATUSES.
        seconds_median: of one call, or of one token for decode; beside it the quartiles.
        peak_bytes: the most memory held during one call, beyond what the inputs held before it.
        saved_bytes: what autograd keeps for backward, train only.
        state_bytes: the state's size at position `length`, decode only.
        repeats: calls timed.
        detail: a sentence on why there are no figures.
    """

    mechanism: str
    backend: str
    level: str
    phase: str
    device: str
    dtype: str
    batch: int
    heads: int
    head_dim: int
    length: int
    status: str
    seconds_median: float | None = None
    seconds_q1: float | None = None
    seconds_q3: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    state_bytes: int | None = None
    repeats: int | None = None
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Column to value, in the order of COLUMNS."""
        return {name: getattr(self, name) for name in COLUMNS}


# The columns that say which point a row belongs to; the rest of a Point is the same for a whole run.
KEY = COLUMNS[: COLUMNS.index("status")]
INTEGERS = {"batch", "heads", "head_dim", "length", "peak_bytes", "saved_bytes", "state_bytes", "repeats"}
FLOATS = {"seconds_median", "seconds_q1", "seconds_q3"}


def key_of(item: Point | Row) -> tuple[Any, ...]:
    """What tells one point of a run from another."""
    return tuple(getattr(item, name) for name in KEY)


def row_of(point: Point, status: str, **figures: Any) -> Row:
    """The row of a point."""
    assert status in STATUSES, status
    return Row(**{name: getattr(point, name) for name in KEY}, status=status, **figures)


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a scaling.csv.

    Raises:
        ValueError: for a file with other columns, or a cell that is no number where one belongs.
    """
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(found := reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has the columns {', '.join(found)}; wanted {', '.join(COLUMNS)}")
        return [_parse(path, line, cells) for line, cells in enumerate(reader, start=2)]


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Appends rows to a scaling.csv, with the header if the file is new; they are on disk when this returns."""
    new = not Path(path).exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(row.as_dict() for row in rows)
        file.flush()


def points(
    *,
    mechanisms: Sequence[str],
    phases: Sequence[str],
    lengths: Sequence[int],
    backend: str = "auto",
    batch: int | None = None,
    tokens: int | None = None,
    **same: Any,
) -> list[Point]:
    """All points of a run, by growing length, so that a run that is stopped has all curves up to some length.

    Args:
        mechanisms: some of MECHANISMS.
        phases: some of PHASES.
        lengths: N, growing.
        backend: of linear attention.
        batch: B, 1 by default.
        tokens: B · N, in place of B.
        **same: the other fields of Point.

    Raises:
        ValueError: for a size below 1, a head that RoPE cannot rotate, or tokens that a length does not divide.
    """
    for name, value in {"batch": batch, "tokens": tokens, **same}.items():
        if name in ("batch", "tokens", "heads", "head_dim", "threads") and value is not None and value < 1:
            raise ValueError(f"{name} is {value}; wanted at least 1")
    if same["level"] == "op" and same["head_dim"] % 2:
        raise ValueError(f"head_dim is {same['head_dim']}; wanted an even number, for rotary pairs")
    for length in lengths:
        if tokens is not None and tokens % length:
            raise ValueError(f"tokens per batch are {tokens}; wanted a multiple of every length, and {length} is none")
    return [
        Point(
            mechanism=mechanism,
            backend=backend if mechanism == "linear" else mechanism.removeprefix("softmax-"),
            phase=phase,
            length=length,
            batch=(batch or 1) if tokens is None else tokens // length,
            **same,
        )
        for length in lengths
        for phase in phases
        for mechanism in mechanisms
    ]


def parse_lengths(text: str) -> list[int]:
    """`256:16384` as 256, 512, … doubling up to the end at most; `256,1000,4096` as it stands.

    Raises:
        ValueError: for anything else, and for lengths that do not grow.
    """
    wanted = "wanted FIRST:LAST, doubling, or lengths that grow, with commas, as in 256:16384 or 256,1000,4096"
    if doubling := re.fullmatch(r"(\d+):(\d+)", text):
        first, last = map(int, doubling.groups())
        if not 1 <= first <= last:
            raise ValueError(f"lengths are {text!r}; {wanted}, with 1 ≤ FIRST ≤ LAST")
        return [first << i for i in range((last // first).bit_length())]
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"lengths are {text!r}; {wanted}")
    lengths = [int(part) for part in text.split(",")]
    if lengths[0] < 1 or lengths != sorted(set(lengths)):
        raise ValueError(f"lengths are {text!r}; {wanted}, from 1 on")
    return lengths


def parse_bytes(text: str) -> int:
    """`2G`, `500M`, `1.5GiB` or `1000000` in bytes; K, M, G and T are powers of 1024.

    Raises:
        ValueError: for anything else, and for no bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size < 1:
        raise ValueError(f"the size is {text!r}; wanted a number of bytes, as in 2G, 500M or 1000000")
    return size


def _parse(path: str | Path, line: int, cells: dict[str, str]) -> Row:
    values: dict[str, Any] = {}
    for name in COLUMNS:
        cell = cells[name]
        try:
            kind = int if name in INTEGERS else float if name in FLOATS else str
            values[name] = kind(cell) if cell or kind is str else None
        except (ValueError, TypeError):
            raise ValueError(f"{path}, line {line}: {name} is {cell!r}; wanted a number") from None
    if values["status"] not in STATUSES:
        raise ValueError(f"{path}, line {line}: status is {values['status']!r}; wanted one of {', '.join(STATUSES)}")
    return Row(**values)
