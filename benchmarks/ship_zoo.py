"""From the runs of configs/zoo to the checkpoints that are shipped: models/zoo/NAME, and docs/zoo-curves.csv and .png.

    python benchmarks/ship_zoo.py [--runs runs/zoo] [--only linear-rope …] [--curves-only]

Takes each run's last checkpoint, evaluates it on the held-out files at three lengths, measures how fast it decodes, and
writes it in bfloat16 with these figures in its config.json and model card. Figures are those of the weights as they are
stored. Run it on a quiet machine.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from lin_attn.data import TextCorpus
from lin_attn.scaling.plots import COLOURS, LINES
from models import CausalLM
from models.checkpoint import load_checkpoint
from models.evaluation import Reading, evaluate
from models.hardware import default_precision
from models.pretrained.loading import ZOO
from models.training import TrainedModel

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (512, 2048, 8192)
LICENSE = "MIT"


def main() -> None:
    """Ships all runs that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "zoo", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", help="names of configurations of configs/zoo; all by default")
    parser.add_argument("--curves-only", action="store_true", help="draw the curves and ship nothing")
    options = parser.parse_args()
    names = sorted(path.stem for path in (ROOT / "configs" / "zoo").glob("*.yaml"))
    runs = {name: options.runs / name for name in names if (options.runs / name).is_dir()}
    write_curves({name: curve(run) for name, run in runs.items()})
    if not options.curves_only:
        for name, run in runs.items():
            if options.only is None or name in options.only:
                ship(name, run)


def ship(name: str, run: Path) -> None:
    """Writes one checkpoint, with what it reaches."""
    config = yaml.safe_load((ROOT / "configs" / "zoo" / f"{name}.yaml").read_text())
    checkpoint = max(run.glob("version_*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    model = load_checkpoint(checkpoint, kind=TrainedModel)
    stored = f"stdlib-{name}"
    with torch.no_grad():
        for parameter in model.parameters():  # the figures are to be those of what is stored
            parameter.copy_(parameter.bfloat16())
    steps, data = config["trainer"]["max_steps"], config["data"]["init_args"]
    context = data["block_length"]
    metrics: dict[str, float] = {"context": context}
    summary: dict[str, Any] = {
        "description": "One of the checkpoints that come with lin-attn; docs/zoo.md compares them.",
        "data": "source of the Python standard library, bytes as tokens",
        "steps": steps,
        "tokens": steps * context * data["batch_size"],
        "hardware": "2-core x86-64 processor with AVX-512 and AMX",
        "command": f"lin-attn fit -c configs/zoo/{name}.yaml",
        "license": LICENSE,
    }
    if isinstance(model, CausalLM):
        metrics |= bits_per_byte(model, TextCorpus("stdlib"))
        summary["bits_per_byte"] = metrics[f"bits_per_byte_at_{context}"]
        summary["decode_tokens_per_second"] = decode_rate(model)
    else:
        metrics |= {key.removeprefix("val/"): value for key, value in last_figures(run).items()}
    model.save_pretrained(ZOO / stored, dtype=torch.bfloat16, summary=summary | {"metrics": metrics}, overwrite=True)
    size = (ZOO / stored / "model.safetensors").stat().st_size
    print(f"{stored}: {size / 1e6:.2f} MB, {metrics}, {summary.get('decode_tokens_per_second', '')}")


def bits_per_byte(model: CausalLM, corpus: TextCorpus) -> dict[str, float]:
    """On all held-out files, in blocks of each length that begin anew."""
    corpus.prepare_data()
    store = corpus.stores["validation"]
    found = {}
    for length in LENGTHS:
        figures = evaluate(model, store, Reading(length), precision=default_precision())
        found[f"bits_per_byte_at_{length}"] = round(figures.bits_per_byte, 4)
    return found


def decode_rate(model: CausalLM, tokens: int = 200, rounds: int = 5) -> float:
    """Tokens a second at batch 1 in float32 after a prompt of 512, the median of rounds."""
    prompt = torch.randint(0, 256, (1, 512), generator=torch.Generator().manual_seed(0))
    rates = []
    for _ in range(rounds):
        stream = model.stream(prompt, tokens + 1, temperature=0)
        next(stream)
        begun = time.perf_counter()
        for _ in stream:
            pass
        rates.append(tokens / (time.perf_counter() - begun))
    return round(statistics.median(rates), 1)


def curve(run: Path) -> list[dict[str, str]]:
    """A run's log in the order of its steps; of a step that was logged twice, by a run that was resumed, the later."""
    rows: dict[tuple[int, bool], dict[str, str]] = {}
    for path in sorted(run.glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rows[int(row["step"]), bool(row.get("train/loss"))] = row
    return [rows[key] for key in sorted(rows)]


def last_figures(run: Path) -> dict[str, float]:
    """The last of each validation figure."""
    found = {}
    for row in curve(run):
        found |= {key: float(value) for key, value in row.items() if key.startswith("val/") and value}
    return found


def write_curves(curves: dict[str, list[dict[str, str]]]) -> None:
    """docs/zoo-curves.csv: validation bits per byte and training loss by step; docs/zoo-curves.png: the former."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="validation bits per byte")
    lines = ["model,step,train_loss,val_loss,val_bits_per_byte"]
    for i, (name, rows) in enumerate(curves.items()):
        for row in rows:
            values = [row.get(key) or "" for key in ("train/loss", "val/loss", "val/bits_per_byte")]
            rounded = [f"{float(value):.4f}" if value else "" for value in values]
            lines.append(f"{name},{int(row['step']) + 1},{','.join(rounded)}")
        points = [
            (int(row["step"]) + 1, float(row["val/bits_per_byte"])) for row in rows if row.get("val/bits_per_byte")
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, color=COLOURS[i], linestyle=LINES[i])
    axes.grid(alpha=0.3)
    axes.legend()
    (ROOT / "docs" / "zoo-curves.csv").write_text("\n".join(lines) + "\n")
    figure.savefig(ROOT / "docs" / "zoo-curves.png", dpi=150)


if __name__ == "__main__":
    main()
