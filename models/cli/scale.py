"""lin-attn scale: time and memory of attention, or of a whole model, against sequence length."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.cli.arguments import ArgumentParser

if TYPE_CHECKING:
    from lin_attn.scaling.cost import Cost
    from lin_attn.scaling.plan import Point, Row
    from lin_attn.scaling.runner import Limits

Costs = dict["Point", "Cost"]
SUBJECT = "models.scaling:language_model"


def parser() -> ArgumentParser:
    """The command's arguments."""
    parser = ArgumentParser(
        prog="lin-attn scale",
        description="Measure time and memory against sequence length: each point in a fresh process, after warm-up, as "
        "median and quartiles. Writes scaling.csv, environment.json, scaling.md, scaling.png and scaling.svg. Running "
        "out of memory or time is a row; Ctrl-C keeps what is done, and the same command goes on.",
        epilog="lin-attn scale --lengths 256:16384 --memory-limit 2G",
    )
    add = parser.add_argument
    add("--level", default="op", help="op: attention alone; model: a whole language model (default: %(default)s)")
    add("--model", help="with --level model: a configuration of lin-attn fit, or a .ckpt file")
    add(
        "--attention",
        default="linear,softmax-flash,softmax-math",
        help="mechanisms, with commas; softmax by torch's flash kernel or by plain products (default: %(default)s)",
    )
    add("--lengths", default="256:16384", help="FIRST:LAST, doubling, or a list with commas (default: %(default)s)")
    add("--phase", default="forward,train,decode", help="phases, with commas (default: %(default)s)")
    add("--backend", default="auto", help="of linear attention, see lin-attn env (default: %(default)s)")
    add("--device", default="auto", help="cpu or cuda (default: cuda where there is one)")
    add("--dtype", default="float32", help="float32, bfloat16, float16 or float64 (default: %(default)s)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--batch-size", type=int, help="sequences in a batch (default: 1)")
    size.add_argument("--tokens-per-batch", type=int, help="keep batch · length at this, in place of the batch size")
    add("--heads", type=int, help="with --level op: number of heads (default: 8)")
    add("--head-dim", type=int, help="with --level op: size of a head (default: 64)")
    add("--seed", type=int, default=0, help="of inputs and weights (default: %(default)s)")
    add("--repeats", type=int, default=5, help="timings a point, 3 at least (default: %(default)s)")
    add("--threads", type=int, help="of torch on the CPU (default: its own choice)")
    add("--point-timeout", type=float, default=60.0, help="seconds a point may take, start included (default: 60)")
    add("--memory-limit", help="a point may allocate, as in 2G (default: 80 %% of what the machine has left)")
    add("--out", type=Path, default=Path("runs/scaling"), help="folder for what comes out (default: %(default)s)")
    add("--fresh", action="store_true", help="start over, where the folder holds rows already")
    add("--dry-run", action="store_true", help="list the points and their cost by arithmetic, and measure nothing")
    add("--progress", action="store_true", help="show the progress bar also where standard error is no terminal")
    return parser


def main(command: str, arguments: list[str]) -> None:
    """Runs `lin-attn scale ARGUMENTS…`."""
    options = parser().parse_args(arguments)
    from lin_attn.scaling.plan import parse_bytes, read_rows
    from lin_attn.scaling.report import write_report
    from lin_attn.scaling.runner import Limits, check_limits, describe, missing, open_folder
    from models.config import as_plain

    points, network = planned(options)
    costs = {point: _cost(point, network) for point in points}
    limits = Limits(
        options.repeats, options.point_timeout, parse_bytes(options.memory_limit) if options.memory_limit else None
    )
    check_limits(limits, points[0].device)
    if options.dry_run:
        sys.stdout.write(_listed(costs))
        return
    same = {
        "batch_size": None if options.tokens_per_batch else points[0].batch,
        "tokens_per_batch": options.tokens_per_batch,
        "network": None if network is None else as_plain(network),
    }
    environment = describe(points[0], limits, same, shlex.join(["lin-attn", "scale", *arguments]))
    rows = open_folder(options.out, environment, fresh=options.fresh)
    todo = missing(points, rows)
    table = options.out / "scaling.csv"
    try:
        measure_all(todo, rows, costs, table, limits, force_bar=options.progress)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nlin-attn scale: stopped; {table} keeps what is done, and the same command goes on\n")
        sys.exit(130)
    told = {name: value for name, value in environment.items() if name != "options"}
    sys.stdout.write(write_report(read_rows(table), options.out, told).rstrip("\n") + "\n")
    sys.stdout.write(f"\n{table.parent}: scaling.csv, scaling.md, scaling.png, scaling.svg, environment.json\n")


def planned(options: argparse.Namespace) -> tuple[list["Point"], Any]:
    """The points that the arguments ask for, by growing length, and the network's configuration at level model.

    Raises:
        ValueError: naming the argument that does not fit, what came and what was wanted.
    """
    from lin_attn.ops.backends import BACKENDS
    from lin_attn.scaling import plan

    _one_of("--level", options.level, plan.LEVELS)
    _one_of("--dtype", options.dtype, plan.DTYPES)
    _one_of("--backend", options.backend, BACKENDS)
    network = None
    heads, head_dim = options.heads, options.head_dim
    if options.level == "model":
        from models.scaling import network_config

        if options.model is None:
            raise ValueError("--model is missing; --level model wants a configuration or a .ckpt file")
        if heads is not None or head_dim is not None:
            raise ValueError("--heads and --head-dim are the network's own with --level model; leave them out")
        network = network_config(options.model)
        heads, head_dim = network.n_heads, network.d_model // network.n_heads
    elif options.model is not None:
        raise ValueError(f"--model is {options.model} with --level op, which has none; wanted --level model")
    return plan.points(
        mechanisms=_some_of("--attention", options.attention, plan.MECHANISMS),
        phases=_some_of("--phase", options.phase, plan.PHASES),
        lengths=plan.parse_lengths(options.lengths),
        batch=options.batch_size,
        tokens=options.tokens_per_batch,
        backend=options.backend,
        level=options.level,
        device=_device(options.device),
        dtype=options.dtype,
        heads=8 if heads is None else heads,
        head_dim=64 if head_dim is None else head_dim,
        seed=options.seed,
        threads=options.threads,
        model=options.model,
        **({} if network is None else {"subject": SUBJECT}),
    ), network


def measure_all(
    points: list["Point"], rows: list["Row"], costs: Costs, table: Path, limits: "Limits", *, force_bar: bool
) -> None:
    """Measures the points, with an estimate before and a progress bar during, both on standard error."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from lin_attn.scaling.cost import expected_seconds, matmul_rate
    from lin_attn.scaling.runner import run_points

    if not points:
        return
    rate = matmul_rate(points[0])
    seconds = [expected_seconds(costs[point].flops, rate, limits.repeats, limits.timeout) for point in points]
    kept = f", {len(rows)} are there already" if rows else ""
    sys.stderr.write(f"{len(points)} points to measure{kept}: about {_minutes(sum(seconds))}\n")
    form = "{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left, {desc}"
    with tqdm(total=sum(seconds), bar_format=form, disable=None if not force_bar else False, smoothing=0) as bar:
        for point, expected, row in zip(points, seconds, run_points(points, rows, table, limits), strict=True):
            bar.set_description_str(f"{point.mechanism} {point.phase} at {point.length}: {row.status}")
            bar.update(expected)


def _cost(point: "Point", network: Any) -> "Cost":
    if network is None:
        from lin_attn.scaling.cost import cost

        return cost(point)
    from models.scaling import network_cost

    return network_cost(point, network)


def _listed(costs: Costs) -> str:
    """A line a point, for --dry-run."""
    names = ("mechanism", "phase", "batch", "length", "GFLOP", "MB saved", "MB state", "MB peak")
    lines = ["  ".join(f"{name:>{13 if i < 2 else 9}}" for i, name in enumerate(names))]
    for point, cost in costs.items():
        sizes = (cost.saved_bytes, cost.state_bytes, cost.peak_bytes)
        cells = (f"{cost.flops / 1e9:.3f}", *("" if size is None else f"{size / 1e6:,.2f}" for size in sizes))
        lines.append(
            f"{point.mechanism:>13}  {point.phase:>13}"
            + "".join(f"  {cell:>9}" for cell in (point.batch, point.length, *cells))
        )
    return "\n".join(lines) + f"\n{len(costs)} points, none measured; sizes by arithmetic, empty where not derived\n"


def _one_of(argument: str, value: str, known: tuple[str, ...]) -> str:
    """The value, if it is known; a ValueError that names the argument if not."""
    if value not in known:
        raise ValueError(f"{argument} is {value!r}; wanted one of {', '.join(known)}")
    return value


def _some_of(argument: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Names with commas between them, each once; a ValueError if one is not known."""
    return list(dict.fromkeys(_one_of(argument, name.strip(), known) for name in text.split(",")))


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}; wanted auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, which is not available to this torch; wanted cpu")
    return name


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
