"""What a scaling run ends with: its figures in tables, exponents, crossovers, longest lengths, and the pictures.

The report is made once, of headings, paragraphs and tables, and rendered twice: as Markdown and for a terminal.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from lin_attn.scaling.fit import Fit, crossover, fit
from lin_attn.scaling.plan import Row
from lin_attn.scaling.plots import PANELS, Curve, Setting, draw, duration, memory_figure, settings, size

WIDTH = 100
FIGURES = {
    "seconds_median": "time",
    "peak_bytes": "peak memory",
    "saved_bytes": "saved bytes",
    "state_bytes": "state bytes",
}
EXPONENTS = (
    "The exponent p of value ≈ c + a·N^p at the longest lengths, the intercept c fitted and removed: 0 is constant, "
    "1 linear, 2 quadratic. R² is of the logarithms."
)
ALIKE = 1.05  # what a quiet machine repeats, more or less
CROSSOVERS = (
    "The length from which one is lower and stays so, as far as both were measured; between measured lengths "
    "interpolated in log-log. Less than 5 % apart at the end is no difference."
)


@dataclass(frozen=True)
class Heading:
    text: str
    level: int


@dataclass(frozen=True)
class Table:
    """Cells of text under a header; columns with numbers are aligned to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: int = 1  # the leading columns that say what a row is about

    def markdown(self) -> str:
        rule = ["---:" if right else "---" for right in self._right()]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows))

    def text(self) -> str:
        """Aligned by spaces; columns that do not fit into a line follow below, beside the keys again."""
        keys = list(range(self.keys))
        room = WIDTH - sum(max(len(line[i]) for line in (self.header, *self.rows)) + 2 for i in keys)
        lines = [
            [cell if i in keys or len(cell) <= room else textwrap.shorten(cell, room) for i, cell in enumerate(line)]
            for line in (self.header, *self.rows)
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        blocks = [keys.copy()]
        for i in range(self.keys, len(widths)):
            if len(blocks[-1]) > self.keys and sum(widths[j] + 2 for j in [*blocks[-1], i]) - 2 > WIDTH:
                blocks.append(keys.copy())
            blocks[-1].append(i)
        right = self._right()
        rendered = []
        for block in blocks:
            for line in lines:
                cells = [line[i].rjust(widths[i]) if right[i] else line[i].ljust(widths[i]) for i in block]
                rendered.append("  ".join(cells).rstrip())
            rendered.append("")
        return "\n".join(rendered[:-1])

    def _right(self) -> list[bool]:
        return [any(row[i][:1].isdigit() for row in self.rows) for i in range(len(self.header))]


Block = Heading | Table | str


def write_report(rows: Sequence[Row], folder: Path, environment: Mapping[str, Any]) -> str:
    """Writes scaling.md, scaling.png and scaling.svg into a folder.

    Args:
        rows: of one run or of several; backends, dtypes, levels and shapes are kept apart.
        folder: where to, made if it is not there.
        environment: name → value of what the figures depend on, as in environment.json.

    Returns:
        the same tables, aligned, in lines of at most 100 characters.

    Raises:
        ValueError: if there are no rows.
    """
    if not rows:
        raise ValueError("there are no rows to report on; wanted one at least")
    found = settings(rows)
    folder.mkdir(parents=True, exist_ok=True)
    draw(found, [folder / "scaling.png", folder / "scaling.svg"])
    measured = "; ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in environment.items() if value not in (None, "")
    )
    blocks: list[Block] = [Heading("Time and memory against sequence length", 1)]
    blocks += [f"Measured with {measured}."] if measured else []
    for setting in found:
        blocks += [Heading(setting.title, 2), *_blocks(setting)]
    picture = "![Time and memory against sequence length, log-log](scaling.svg)"
    markdown = [blocks[0], *blocks[1:2], picture, *blocks[2:]] if measured else [blocks[0], picture, *blocks[1:]]
    (folder / "scaling.md").write_text(_markdown(markdown), encoding="utf-8")
    return _text(blocks)


def _blocks(setting: Setting) -> list[Block]:
    blocks: list[Block] = []
    for phase in setting.phases:
        blocks += [Heading(f"{PANELS[phase][0]}; {PANELS[phase][1]}, {PANELS[phase][2]}", 3), _measured(setting, phase)]
    blocks += [Heading("Exponents", 3), EXPONENTS, _exponents(setting)]
    crossovers = _crossovers(setting)
    if crossovers.rows:
        blocks += [Heading("Crossovers", 3), CROSSOVERS, crossovers]
    return [*blocks, Heading("Longest lengths", 3), _longest(setting)]


def _measured(setting: Setting, phase: str) -> Table:
    """Length × curve: time and memory, or in words why there are none."""
    curves = [curve for curve in setting.curves if curve.phase == phase]
    rows = {length: [f"{length:,}"] for length in sorted({row.length for curve in curves for row in curve.rows})}
    for curve in curves:
        by_length = {row.length: row for row in curve.rows}
        for length, cells in rows.items():
            cells.append(_cell(by_length.get(length)))
    return Table(("N", *(curve.label for curve in curves)), tuple(map(tuple, rows.values())))


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if row.status != "ok":
        return row.status
    memory = getattr(row, memory_figure(row.phase))
    parts = [duration(row.seconds_median)] if row.seconds_median is not None else []
    parts += [size(memory)] if memory is not None else []
    return ", ".join(parts) or "–"


def _exponents(setting: Setting) -> Table:
    rows = []
    for phase in setting.phases:
        for figure, name in FIGURES.items():
            for curve in setting.curves:
                values = curve.values(figure)
                if curve.phase == phase and values:
                    rows.append((phase, name, curve.label, *_fitted(fit(list(values), list(values.values())))))
    return Table(("phase", "figure", "mechanism", "exponent", "95 % interval", "R²", "points"), tuple(rows), keys=3)


def _fitted(found: Fit) -> tuple[str, str, str, str]:
    points = f"{found.n_points} from {found.first_length:,}" if found.first_length else "0"
    if found.exponent is None or found.low is None or found.high is None:
        return "–", "–", "–", f"{points}: too few"
    # Adding 0 turns −0 into 0.
    low, exponent, high = (f"{round(p, 2) + 0.0:.2f}" for p in (found.low, found.exponent, found.high))
    return exponent, f"{low} to {high.replace('inf', '∞')}", f"{found.r_squared:.4f}", points


def _crossovers(setting: Setting) -> Table:
    """Which of two mechanisms is lower at their longest common length, and from where on."""
    rows = []
    for phase in setting.phases:
        curves = [curve for curve in setting.curves if curve.phase == phase]
        for figure in ("seconds_median", memory_figure(phase)):
            for one, other in combinations(curves, 2):
                if one.mechanism != other.mechanism and (cells := _lower(one, other, figure)):
                    rows.append((phase, FIGURES[figure], *cells))
    return Table(("phase", "figure", "lower", "than", "from N", "by"), tuple(rows), keys=4)


def _lower(one: Curve, other: Curve, figure: str) -> tuple[str, ...] | None:
    first, second = ({n: value for n, value in curve.values(figure).items() if value > 0} for curve in (one, other))
    common = sorted(set(first) & set(second))
    if not common:
        return None
    longest = common[-1]
    if max(first[longest] / second[longest], second[longest] / first[longest]) < ALIKE:
        return f"{one.label} ≈", other.label, "–", f"alike at {longest:,}"
    if first[longest] > second[longest]:
        one, other, first, second = other, one, second, first
    start = crossover(first, second)
    assert start is not None
    # Two digits: more would pretend to know what lies between two lengths.
    at = f"the shortest, {common[0]:,}" if start == common[0] else f"about {float(f'{start:.2g}'):,.0f}"
    ratio = second[longest] / first[longest]
    return one.label, other.label, at, f"{ratio:,.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f}× at {longest:,}"


def _longest(setting: Setting) -> Table:
    rows = []
    for phase in setting.phases:
        for curve in setting.curves:
            if curve.phase != phase:
                continue
            longest = max((row.length for row in curve.rows if row.status == "ok"), default=None)
            after = "nothing longer was tried"
            if curve.failure is not None:
                why = f" ({textwrap.shorten(curve.failure.detail, 200)})" if curve.failure.detail else ""
                after = f"{curve.failure.status} at {curve.failure.length:,}{why.replace('|', '/')}"
            rows.append((phase, curve.label, "none" if longest is None else f"{longest:,}", after))
    return Table(("phase", "mechanism", "longest N", "then"), tuple(rows), keys=3)


def _markdown(blocks: Sequence[Block]) -> str:
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append("#" * block.level + " " + block.text)
        else:
            parts.append(block.markdown() if isinstance(block, Table) else block)
    return "\n\n".join(parts) + "\n"


def _text(blocks: Sequence[Block]) -> str:
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            lines = textwrap.wrap(block.text, WIDTH)
            parts.append("\n".join(lines) + ("\n" + "=-"[block.level - 1] * len(lines[-1]) if block.level < 3 else ""))
        else:
            parts.append(block.text() if isinstance(block, Table) else textwrap.fill(block, WIDTH))
    return "\n\n".join(parts) + "\n"
