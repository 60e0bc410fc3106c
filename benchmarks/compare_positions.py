"""Trains the stdlib twins with several seeds, prints the table of docs/positions.md and draws its picture.

    python benchmarks/compare_positions.py [--seeds 0 1 2] [--out docs] [--runs runs/compare] [-- OPTIONS OF FIT]

Runs that are finished are not run again, so that it can be stopped and called anew.
"""

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from models.report import plot_curves, read_curve

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "linear, RoPE after φ": "stdlib-linear-rope",
    "linear, sinusoidal": "stdlib-linear-sinusoidal",
    "linear, no positions": "stdlib-linear-none",
    "softmax, RoPE": "stdlib-softmax-rope",
}


def train(label: str, seed: int, folder: Path, options: list[str]) -> Path:
    """The metrics.csv of a run, made if it is not there."""
    done = folder / "done"
    metrics = folder / "version_0" / "metrics.csv"
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, ROOT / "train.py", "fit", "-c", ROOT / f"configs/lm/{RUNS[label]}.yaml"]
        command += ["--seed_everything", str(seed), "--data.seed", str(seed), "--trainer.default_root_dir", folder]
        command += ["--trainer.enable_progress_bar", "false", *options]
        folder.mkdir(parents=True)
        with (folder / "log.txt").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        done.touch()
    return metrics


def table(files: dict[str, list[Path]]) -> str:
    """Final validation bits per byte: mean and each seed's."""
    lines = ["| model | validation bits per byte | by seed |", "|---|---|---|"]
    for label, paths in files.items():
        last = [read_curve(path, "val/bits_per_byte")[1][-1] for path in paths]
        seeds = ", ".join(f"{value:.3f}" for value in last)
        lines.append(f"| {label} | {statistics.mean(last):.3f} | {seeds} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Trains what is missing, then draws OUT/learning-curves.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "compare")
    parser.add_argument("fit", nargs="*", help="options for lin-attn fit, after --")
    options = parser.parse_args()
    files: dict[str, list[Path]] = {label: [] for label in RUNS}
    for seed in options.seeds:  # seed by seed, so that a stop leaves whole comparisons
        for label in RUNS:
            folder = options.runs.resolve() / f"{label.replace(', ', '-').replace(' ', '-')}-{seed}"
            files[label].append(train(label, seed, folder, options.fit))
            print(f"seed {seed}, {label}: {read_curve(files[label][-1], 'val/bits_per_byte')[1][-1]:.4f}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    plot_curves(files, options.out / "learning-curves.png")
    print(table(files), f"\nCommand: {shlex.join(sys.argv)}; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
