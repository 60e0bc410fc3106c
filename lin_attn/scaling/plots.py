"""The picture of a run: time and memory against length, log-log, a column a phase; and the curves that it draws.

Rows become curves, one a mechanism (and backend) and phase; curves of one setting (level, device, dtype, shape) are
compared with one another, and never with those of another setting.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lin_attn.scaling.plan import MECHANISMS, PHASES, Row

# Colours of Okabe and Ito (2008), told apart by colour-blind readers; markers and lines tell them apart in black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "*")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
PANELS = {
    "forward": ("forward", "time", "peak memory"),
    "train": ("train: forward and backward", "time", "peak memory"),
    "decode": ("decode: one token at position N", "time per token", "size of the state"),
}


@dataclass(frozen=True)
class Curve:
    """The rows of one mechanism in one phase and setting, one a length, from short to long."""

    label: str
    mechanism: str
    phase: str
    rows: tuple[Row, ...]

    def values(self, figure: str) -> dict[int, float]:
        """Length → a figure of Row, where there is one."""
        return {
            row.length: float(getattr(row, figure))
            for row in self.rows
            if row.status == "ok" and getattr(row, figure) is not None
        }

    @property
    def failure(self) -> Row | None:
        """The first row beyond the longest length that was measured."""
        longest = max((row.length for row in self.rows if row.status == "ok"), default=0)
        return next((row for row in self.rows if row.length > longest), None)


@dataclass(frozen=True)
class Setting:
    """Curves that can be compared."""

    title: str
    curves: tuple[Curve, ...]

    @property
    def phases(self) -> list[str]:
        """Those measured, in the order of PHASES."""
        return [phase for phase in PHASES if any(curve.phase == phase for curve in self.curves)]


def memory_figure(phase: str) -> str:
    """The memory that matters in a phase: the state when decoding, the peak otherwise."""
    return "state_bytes" if phase == "decode" else "peak_bytes"


def settings(rows: Iterable[Row]) -> list[Setting]:
    """Rows as curves, apart by level, device, dtype and shape; of rows of one point the last counts.

    A batch that varies with length alone (tokens a batch held constant) is one setting.
    """
    points: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[int, Row]]] = {}
    backends: dict[str, list[str]] = {}
    for row in rows:
        if row.backend not in backends.setdefault(row.mechanism, []):
            backends[row.mechanism].append(row.backend)
        curve = points.setdefault((row.level, row.device, row.dtype, row.heads, row.head_dim), {})
        curve.setdefault((row.phase, row.mechanism, row.backend, row.length), {})[row.batch] = row
    found = []
    for (level, device, dtype, heads, head_dim), point in points.items():
        batches = sorted({batch for by_batch in point.values() for batch in by_batch})
        apart = any(len(by_batch) > 1 for by_batch in point.values())
        for some in [[batch] for batch in batches] if apart else [batches]:
            kept = [row for by_batch in point.values() for batch, row in by_batch.items() if batch in some]
            batch_text = f"batch {some[0]}" if len(some) == 1 else f"batch {some[-1]} to {some[0]} as length grows"
            shape = f"{batch_text}, {heads} heads of {head_dim}"
            found.append(_setting(f"{level} level, {device}, {dtype}, {shape}", kept, backends))
    return found


def _setting(title: str, rows: Sequence[Row], backends: dict[str, list[str]]) -> Setting:
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.mechanism, row.backend, row.phase), []).append(row)
    curves = []
    for mechanism in sorted(backends, key=lambda name: (*MECHANISMS, name).index(name)):
        several = len(backends[mechanism]) > 1
        # "flash" is in the name of softmax-flash; "chunked" has to be said.
        if not several and not mechanism.endswith(backends[mechanism][0]):
            title += f", {mechanism} by {backends[mechanism][0]}"
        for backend in backends[mechanism]:
            label = f"{mechanism} ({backend})" if several else mechanism
            for phase in PHASES:
                if found := grouped.get((mechanism, backend, phase)):
                    curves.append(Curve(label, mechanism, phase, tuple(sorted(found, key=lambda row: row.length))))
    return Setting(title, tuple(curves))


def duration(seconds: float) -> str:
    """Seconds as `1.23 s`, `45.6 ms` or `789 µs`: three digits; more where there is no larger unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size or unit == "µs":
            return f"{_three_digits(seconds / size)} {unit}"
    raise AssertionError


def size(count: float) -> str:
    """Bytes as `512 B`, `1.50 KiB`, `20.0 MiB` or `3.25 GiB`, in the same way."""
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if count >= 0.9995 * 1024**power:
            return f"{_three_digits(count / 1024**power)} {unit}"
    return f"{count:.0f} B"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def draw(found: Sequence[Setting], paths: Iterable[Path]) -> None:
    """Draws time over memory against length, a pair of rows a setting and a column a phase.

    Args:
        found: what `settings` returns.
        paths: of the pictures; their suffixes name the formats.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(curve.label for setting in found for curve in setting.curves))
    columns = max(len(setting.phases) for setting in found)
    # Text stays text in SVG, and equal figures give equal files.
    with rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "lin-attn", "axes.linewidth": 0.6}):
        drawing = Figure(figsize=(1 + 3 * max(columns, 2), 0.4 + 5 * len(found)), layout="constrained")
        FigureCanvasAgg(drawing)
        for part, setting in zip(drawing.subfigures(len(found), 1, squeeze=False)[:, 0], found, strict=True):
            part.suptitle(setting.title, fontsize=9)
            grid = part.subplots(2, columns, squeeze=False)
            for column, phase in enumerate(setting.phases):
                curves = [curve for curve in setting.curves if curve.phase == phase]
                top, bottom = grid[:, column]
                _panel(top, curves, labels, "seconds_median")
                _panel(bottom, curves, labels, memory_figure(phase))
                top.set_title(PANELS[phase][0], fontsize=10)
                top.set_ylabel(PANELS[phase][1])
                bottom.set_ylabel(PANELS[phase][2])
                bottom.set_xlabel("sequence length N (k = 1024)")
            for axes in grid[:, len(setting.phases) :].flat:
                axes.set_visible(False)
        legends = [axes.get_legend_handles_labels() for axes in drawing.axes]
        entries = {name: line for lines, names in legends for line, name in zip(lines, names, strict=True)}
        drawing.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
        for path in paths:
            drawing.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, curves: Sequence[Curve], labels: Sequence[str], figure: str) -> None:
    lengths = sorted({row.length for curve in curves for row in curve.rows})
    drawn: list[float] = []
    failures = 0
    for curve in curves:
        i = labels.index(curve.label)
        colour, marker, line = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], LINES[i % len(LINES)]
        # A logarithmic axis has no place for a zero.
        values = {length: value for length, value in curve.values(figure).items() if value > 0}
        bars = None
        if figure == "seconds_median":
            q1, q3 = curve.values("seconds_q1"), curve.values("seconds_q3")
            bars = [
                [max(0.0, value - q1.get(length, value)) for length, value in values.items()],
                [max(0.0, q3.get(length, value) - value) for length, value in values.items()],
            ]
        # Later curves have smaller markers, so that two that coincide are both seen.
        axes.errorbar(
            list(values), list(values.values()), bars, label=curve.label, color=colour, marker=marker, linestyle=line,
            linewidth=1.4, markersize=7 - 3 * i / len(labels), markerfacecolor="white", capsize=2.5, elinewidth=0.8,
        )  # fmt: skip
        drawn += values.values()
        if curve.failure is not None:
            # A cross at the top edge, one below the other: beyond this length there is nothing to draw.
            place, top = (curve.failure.length, 0.95 - 0.09 * failures), axes.get_xaxis_transform()
            axes.plot(*place, "X", color=colour, markersize=7, markeredgewidth=0, transform=top)
            axes.annotate(
                curve.failure.status, place, (-7, 0), color=colour, fontsize=8, xycoords=top,
                textcoords="offset points", ha="right", va="center",
            )  # fmt: skip
            failures += 1
    _scales(axes, lengths, drawn, failures, duration if figure == "seconds_median" else size)


def _scales(axes: Any, lengths: list[int], drawn: list[float], failures: int, unit: Callable[[float], str]) -> None:
    """Logarithmic axes with readable ticks, room on top for failures, and the slopes of N and N² in grey."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(drawn, default=1.0), max(drawn, default=1.0)
    decades = max(math.log10(high / low), 1.0)
    guides = low * 10**decades
    low, high = low / 10 ** (0.08 * decades), low * 10 ** (decades * (1.08 + 0.13 * failures))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(lengths[0] / 1.4, lengths[-1] * 1.4)
    axes.set_ylim(low, high)
    step = 1 + len(lengths) // 5
    axes.xaxis.set_major_locator(FixedLocator(lengths[::-step]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"))
    base = 10 if unit is duration else 2
    first, last = math.ceil(math.log(low, base)), math.floor(math.log(high, base))
    step = 1 + (last - first) // 6
    parts = (1, 2, 5) if base == 10 and last - first < 2 else (1,)
    ticks = [part * float(base) ** i for i in range(first - 1, last + 1, step) for part in parts]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"\.0+ ", " ", unit(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    for power, name in ((1, "N"), (2, "N²")):
        # From the lower left to the right edge, or to the height of the highest value.
        end = min(lengths[-1] * 1.3, lengths[0] * (guides / low) ** (1 / power))
        height = low * (end / lengths[0]) ** power
        axes.plot([lengths[0], end], [low, height], color="0.65", linewidth=0.9, zorder=0)
        axes.annotate(f"∝ {name}", (end, height), (2, -2), textcoords="offset points", color="0.45", fontsize=8)
