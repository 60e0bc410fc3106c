"""Masked-LM loss against steps, with RoPE, sinusoidal and no positions, for softmax and linear attention.

    python benchmarks/pretraining_curves.py [--seeds 0 1 2] [--out docs] [--runs runs/pretraining] [--only-read]
                                            [-- OPTIONS OF FIT]

The twin of the pre-training figure of RoFormer (Su et al. 2021, arXiv 2104.09864, figure 3), on the small-mlm-*
configurations. Draws OUT/pretraining-curves.png and prints the table of docs/experiments.md. A run that is finished is
not run again, so that this can be stopped and called anew; with --only-read nothing is run, and what is there is drawn.
"""

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from models.report import draw_curves, read_curve

ROOT = Path(__file__).resolve().parent.parent
ATTENTIONS = ("softmax", "linear")
POSITIONS = {"rope": "RoPE", "sinusoidal": "sinusoidal", "none": "none"}
Runs = Mapping[tuple[str, str], list[Path]]


def train(attention: str, position: str, folder: Path, seed: int, options: list[str]) -> None:
    """Runs a configuration; a run that was cut off is begun anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = ROOT / f"configs/roformer/small-mlm-{attention}-{position}.yaml"
    command = [sys.executable, ROOT / "train.py", "fit", "-c", config, "--seed_everything", str(seed)]
    command += ["--data.seed", str(seed), "--trainer.default_root_dir", folder]
    command += ["--trainer.enable_progress_bar", "false", *options]
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    (folder / "done").touch()


def metrics_of(folder: Path) -> Path | None:
    """The metrics.csv of a run that is finished."""
    return folder / "version_0" / "metrics.csv" if (folder / "done").is_file() else None


def table(runs: Runs) -> str:
    """Final validation loss: mean and each seed's, and accuracy."""
    lines = [
        "| attention | positions | validation loss, nats a masked byte | by seed | accuracy |",
        "|---|---|---|---|---|",
    ]
    for (attention, position), paths in runs.items():
        if paths:
            loss = [read_curve(path, "val/loss")[1][-1] for path in paths]
            accuracy = statistics.mean(read_curve(path, "val/accuracy")[1][-1] for path in paths)
            mean, seeds = statistics.mean(loss), ", ".join(f"{value:.3f}" for value in loss)
            lines.append(f"| {attention} | {POSITIONS[position]} | {mean:.3f} | {seeds} | {accuracy:.3f} |")
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Validation loss against steps, one picture for each attention: means over seeds, and their range."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, attention in zip(figure.subplots(1, len(ATTENTIONS), sharey=True), ATTENTIONS, strict=True):
        files = {label: runs[attention, position] for position, label in POSITIONS.items()}
        draw_curves(axes, {label: paths for label, paths in files.items() if paths}, "val/loss")
        axes.set_ylabel(None)
        axes.set_title(f"{attention} attention")
    figure.axes[0].set_ylabel("validation loss, nats a masked byte")
    figure.savefig(path, dpi=160)


def main() -> None:
    """Trains what is missing, seed by seed, so that a stop leaves whole comparisons; draws after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--positions", nargs="+", choices=POSITIONS, default=list(POSITIONS))
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "pretraining")
    parser.add_argument("--only-read", action="store_true", help="run nothing, draw what is there")
    parser.add_argument("fit", nargs="*", help="options for lin-attn fit, after --")
    options = parser.parse_args()
    runs: dict[tuple[str, str], list[Path]] = {(a, p): [] for a in ATTENTIONS for p in POSITIONS}
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for position in options.positions:
            for attention in ATTENTIONS:
                folder = options.runs.resolve() / f"{attention}-{position}-{seed}"
                if metrics_of(folder) is None and not options.only_read:
                    train(attention, position, folder, seed, options.fit)
                if (metrics := metrics_of(folder)) is not None:
                    runs[attention, position].append(metrics)
                    loss = read_curve(metrics, "val/loss")[1][-1]
                    print(f"seed {seed}, {attention}, {position}: {loss:.4f}", flush=True)
                if not options.only_read:
                    draw(runs, options.out / "pretraining-curves.png")
    draw(runs, options.out / "pretraining-curves.png")
    print(table(runs), f"\nCommand: {shlex.join(sys.argv)}; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
