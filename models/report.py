"""What a run ends with: its figures, learning curves, a sample, and where everything lies."""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from models.causal_lm import CausalLM

SAMPLE_TOKENS = 300


def report_run(trainer: Trainer, model: CausalLM) -> None:
    """Prints the last validation figure, draws the curves, names the files and continues the empty text."""
    log = Path(trainer.log_dir or trainer.default_root_dir)  # asks all processes
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    lines = [""]
    if "val/bits_per_byte" in trainer.callback_metrics:
        lines.append(f"validation bits per byte: {trainer.callback_metrics['val/bits_per_byte']:.4f}")
    if (log / "metrics.csv").is_file():
        plot_curves({log.parent.name: [log / "metrics.csv"]}, log / "curves.png")
        lines.append(f"curves:      {log / 'curves.png'}, {log / 'metrics.csv'}")
    saved = trainer.checkpoint_callback
    if isinstance(saved, ModelCheckpoint) and saved.last_model_path:
        best = f"{saved.best_model_path} (best), " if saved.best_model_path else ""
        lines.append(f"checkpoints: {best}{saved.last_model_path} (last)")
        command = sys.argv[0] if Path(sys.argv[0]).name == "lin-attn" else "lin-attn"
        lines.append(f"go on with:  {command} generate --checkpoint {saved.last_model_path} --prompt 'def '")
    print("\n".join(lines), flush=True)  # noqa: T201
    if model.tokenizer is not None:
        longest = (model.network_config.max_length or SAMPLE_TOKENS + 1) - 1  # the start takes a position
        start = torch.tensor([[model.tokenizer.end_id]], device=model.device)
        text = model.generate(start, min(SAMPLE_TOKENS, longest), temperature=0.8, seed=0)[0].tolist()
        sample = model.tokenizer.decode(text).decode("utf-8", "replace")
        print(f"sample (temperature 0.8):\n\n{sample}\n")  # noqa: T201


def read_curve(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a figure in a CSVLogger's file; none if it is not there."""
    with metrics.open(newline="") as file:
        points = [(int(row["step"]) + 1, float(row[name])) for row in csv.DictReader(file) if row.get(name)]
    return [step for step, _ in points], [value for _, value in points]


def plot_curves(runs: Mapping[str, list[Path]], path: Path) -> None:
    """Draws validation bits per byte against steps: a line a run, the mean and range of several seeds.

    Args:
        runs: label → metrics.csv of one run or of equal runs with different seeds.
        path: of the picture; its suffix names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # Colours of Okabe and Ito (2008), told apart by colour-blind readers, and line styles for print.
    colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
    for i, (label, files) in enumerate(runs.items()):
        curves = [read_curve(file, "val/bits_per_byte") for file in files]
        steps = curves[0][0]
        if not steps:
            continue
        columns = list(zip(*(values for _, values in curves), strict=False))
        mean = [sum(column) / len(column) for column in columns]
        style = ("-", "--", "-.", ":")[i % 4]
        axes.plot(steps[: len(mean)], mean, style, color=colours[i % 7], label=f"{label}: {mean[-1]:.3f}", marker=".")
        if len(files) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(steps[: len(mean)], low, high, color=colours[i % 7], alpha=0.15, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("validation bits per byte")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
