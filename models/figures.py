"""The figures of RoFormer that need no training: data as CSV, and pictures of it.

rope-decay   the relative upper bound of RoPE's inner product against distance (arXiv 2104.09864, §3.4.3, figure 2)
sinusoidal   the table of sinusoidal encodings (Vaswani et al. 2017, arXiv 1706.03762, §3.5)
"""

import csv
from pathlib import Path
from typing import Any

import torch

from lin_attn.positions import Rotary, sinusoidal
from lin_attn.positions.long_term_decay import relative_upper_bound


def rope_decay(folder: Path, *, head_dim: int, base: float, distances: int) -> list[Path]:
    """Writes rope-decay.csv (distance, relative_upper_bound) and rope-decay.png.

    Args:
        folder: that is there.
        head_dim: D, even.
        base: of the rotary wavelengths.
        distances: how many, from 0 on.

    Raises:
        ValueError: for a number that is out of range.
    """
    _at_least("distances", distances, 2)
    bound = relative_upper_bound(Rotary(head_dim, base), torch.arange(distances)).tolist()
    table = folder / "rope-decay.csv"
    _write(table, ["distance", "relative_upper_bound"], list(enumerate(bound)))
    axes, save = _canvas((5.5, 3.6))
    axes.plot(range(distances), bound, color="#0072B2", linewidth=1.4)
    axes.set_xlabel("relative distance m − n")
    axes.set_ylabel("relative upper bound")
    axes.set_title(f"D = {head_dim}, base {base:g}", fontsize=10)
    axes.set_xlim(0, distances - 1)
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    return [table, save(folder / "rope-decay.png")]


def sinusoidal_table(folder: Path, *, d_model: int, positions: int) -> list[Path]:
    """Writes sinusoidal.csv (position, then the d_model entries of its encoding) and sinusoidal.png.

    Args:
        folder: that is there.
        d_model: E, even.
        positions: how many, from 0 on.

    Raises:
        ValueError: for a number that is out of range.
    """
    _at_least("positions", positions, 1)
    values = sinusoidal(torch.arange(positions), d_model, dtype=torch.float64).tolist()
    table = folder / "sinusoidal.csv"
    _write(table, ["position", *map(str, range(d_model))], [[m, *row] for m, row in enumerate(values)])
    axes, save = _canvas((5.5, 3.6))
    image = axes.imshow(values, aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes)
    axes.set_xlabel("entry of the encoding (even: sine, odd: cosine)")
    axes.set_ylabel("position")
    return [table, save(folder / "sinusoidal.png")]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; wanted at least {least}")


def _write(path: Path, head: list[str], rows: list[Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)


def _canvas(size: tuple[float, float]) -> tuple[Any, Any]:
    """Axes, and a function that writes their picture and returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)

    def save(path: Path) -> Path:
        figure.savefig(path, dpi=160)
        return path

    return figure.subplots(), save
