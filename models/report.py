"""What a run ends with: its figures, learning curves, a sample, and where everything lies."""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from models.causal_lm import CausalLM
from models.training import TrainedModel

SAMPLE_TOKENS = 300
BITS_PER_BYTE = "val/bits_per_byte"  # what a language model is judged by; other models by val/loss


def report_run(trainer: Trainer, model: TrainedModel) -> None:
    """Prints the last validation figures, draws the curve, names the files and continues the empty text."""
    log = Path(trainer.log_dir or trainer.default_root_dir)  # asks all processes
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    if trainer.is_global_zero:
        print("\n".join(["", *_lines(trainer, model, log)]), flush=True)  # noqa: T201
    if not isinstance(model, CausalLM) or model.tokenizer is None:
        return
    if trainer.is_global_zero or model.device_mesh is not None:
        longest = (model.network_config.max_length or SAMPLE_TOKENS + 1) - 1  # the start takes a position
        start = torch.tensor([[model.tokenizer.end_id]], device=model.device)
        # Shapes change from token to token: compiling for each would take longer than computing.
        with torch.compiler.set_stance("force_eager"):
            text = model.generate(start, min(SAMPLE_TOKENS, longest), temperature=0.8, seed=0)[0].tolist()
        if trainer.is_global_zero:
            sample = model.tokenizer.decode(text).decode("utf-8", "replace")
            print(f"sample (temperature 0.8):\n\n{sample}\n")  # noqa: T201


def _lines(trainer: Trainer, model: TrainedModel, log: Path) -> list[str]:
    lines = []
    judged_by = BITS_PER_BYTE if isinstance(model, CausalLM) else "val/loss"
    figures = [name for name in trainer.callback_metrics if name.startswith("val/")]
    for name in [judged_by] * (judged_by in figures) if isinstance(model, CausalLM) else sorted(figures):
        words = name.removeprefix("val/").replace("_", " ")
        lines.append(f"validation {words}: {trainer.callback_metrics[name]:.4f}")
    if (log / "metrics.csv").is_file():
        plot_curves({log.parent.name: [log / "metrics.csv"]}, log / "curves.png", judged_by)
        lines.append(f"curves:      {log / 'curves.png'}, {log / 'metrics.csv'}")
    saved = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    best = next((one.best_model_path for one in saved if one.best_model_path), None)
    last = next((one.last_model_path for one in saved if one.last_model_path), None)
    if best or last:
        named = [f"{path} ({name})" for path, name in ((best, "best"), (last, "last")) if path]
        lines.append(f"checkpoints: {', '.join(named)}")
        if isinstance(model, CausalLM):
            command = sys.argv[0] if Path(sys.argv[0]).name == "lin-attn" else "lin-attn"
            lines.append(f"go on with:  {command} generate --checkpoint {last or best} --prompt 'def '")
    return lines


def read_curve(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a figure in a CSVLogger's file; none if it is not there."""
    with metrics.open(newline="") as file:
        points = [(int(row["step"]) + 1, float(row[name])) for row in csv.DictReader(file) if row.get(name)]
    return [step for step, _ in points], [value for _, value in points]


def plot_curves(runs: Mapping[str, list[Path]], path: Path, name: str = BITS_PER_BYTE) -> None:
    """Draws a validation figure against steps: a line a run, the mean and range of several seeds.

    Args:
        runs: label → metrics.csv of one run or of equal runs with different seeds.
        path: of the picture; its suffix names the format.
        name: of the figure, by which it was logged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    draw_curves(figure.subplots(), runs, name)
    figure.savefig(path, dpi=160)


def draw_curves(axes: Any, runs: Mapping[str, list[Path]], name: str) -> None:
    """What `plot_curves` puts into its picture, into axes of another one."""
    # Colours of Okabe and Ito (2008), told apart by colour-blind readers, and line styles for print.
    colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
    for i, (label, files) in enumerate(runs.items()):
        curves = [read_curve(file, name) for file in files]
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
    axes.set_ylabel("validation " + name.removeprefix("val/").replace("_", " "))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
