"""Measures what each position encoding costs in one layer's attention, beside none, and prints the table of the docs.

    python benchmarks/position_cost.py [--lengths 512 4096] [--heads 8] [--head-dim 64] [--out runs/position-cost]

Causal attention in float32, batch 1, forward and backward, and the gradients of the encoding's own parameters. Each
point in a fresh process, as `lin-attn scale` has it; points that are in OUT/scaling.csv already are not measured again.
"""

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lin_attn import Rotary, linear_attention, softmax_attention
from lin_attn.ops import xpos_linear_attention
from lin_attn.positions import (
    AlibiPositions,
    DebertaPositions,
    ScorePositions,
    ShawPositions,
    T5Positions,
    TransformerXLPositions,
    XPos,
)
from lin_attn.scaling.plan import Point, Row, read_rows
from lin_attn.scaling.plots import duration, size
from lin_attn.scaling.runner import Limits, missing, run_points
from lin_attn.scaling.subjects import Operation

SCORES = ("shaw", "transformer_xl", "t5", "deberta", "alibi")
NAMES = [f"softmax {name}" for name in ("none", "rope", "xpos", *SCORES)] + [
    f"linear {name}" for name in ("none", "rope", "xpos")
]


def build(name: str, heads: int, head_dim: int) -> tuple[Any, ScorePositions | None]:
    """Attention with an encoding as a function of q, k and v, and the module whose parameters it has, if any."""
    attention, _, position = name.partition(" ")
    d_model = heads * head_dim
    if attention == "linear":
        if position == "xpos":
            return partial(xpos_linear_attention, xpos=XPos(head_dim)), None
        return partial(linear_attention, rotary=Rotary(head_dim) if position == "rope" else None), None
    if position not in SCORES:
        rotary = {"none": None, "rope": Rotary(head_dim), "xpos": XPos(head_dim)}[position]
        return partial(softmax_attention, rotary=rotary), None
    module: ScorePositions = {
        "shaw": lambda: ShawPositions(head_dim, causal=True),
        "transformer_xl": lambda: TransformerXLPositions(d_model, heads, head_dim, causal=True),
        "t5": lambda: T5Positions(heads, causal=True),
        "deberta": lambda: DebertaPositions(d_model, heads, head_dim, causal=True),
        "alibi": lambda: AlibiPositions(heads),
    }[position]()
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=d_model**-0.5)
    return partial(softmax_attention, positions=module), module


def operation(point: Point) -> Operation:
    """What a point measures: see the head of this file."""
    attend, module = build(point.mechanism, point.heads, point.head_dim)
    shape = (point.batch, point.heads, point.length, point.head_dim)
    generator = torch.Generator().manual_seed(point.seed)
    q, k, v, cotangent = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_(point.phase == "train") for x in (q, k, v)]
    leaves += [] if module is None else list(module.parameters())
    if point.phase == "forward":
        return Operation(torch.no_grad()(lambda: attend(q, k, v)))
    return Operation(lambda: torch.autograd.grad(attend(q, k, v), leaves, cotangent), lambda: attend(q, k, v))


def table(rows: list[Row], lengths: list[int], heads: int, head_dim: int) -> str:
    """Parameters, then for each length time and memory, and how many times those of none."""
    found = {(row.mechanism, row.length): row for row in rows if row.status == "ok"}
    lines = [
        "| attention, position | parameters | " + " | ".join(f"time, peak memory at N = {n:,}" for n in lengths) + " |"
    ]
    lines.append("|---|" + "---:|" * (1 + len(lengths)))
    for name in NAMES:
        module = build(name, heads, head_dim)[1]
        cells = [f"{0 if module is None else sum(x.numel() for x in module.parameters()):,}"]
        for n in lengths:
            row, none = found.get((name, n)), found.get((f"{name.split()[0]} none", n))
            if row is None or none is None:
                cells.append("–")
                continue
            times = row.seconds_median / none.seconds_median
            cells.append(f"{duration(row.seconds_median)} ({times:.2g}×), {size(row.peak_bytes)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/position-cost"))
    options = parser.parse_args()
    points = [
        Point(
            name, "", "op", "train", "cpu", "float32", 1, options.heads, options.head_dim, length,
            subject="position_cost:operation",
        )
        for length in sorted(options.lengths)
        for name in NAMES
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    csv = options.out / "scaling.csv"
    rows = read_rows(csv) if csv.is_file() else []
    for row in run_points(missing(points, rows), rows, csv, Limits(timeout=300)):
        sys.stderr.write(f"{row.mechanism} at {row.length}: {row.status} {row.detail}\n")
    print(table(read_rows(csv), sorted(options.lengths), options.heads, options.head_dim))
    print(f"\nCommand: {shlex.join(sys.argv)}; {torch.get_num_threads()} threads of {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
