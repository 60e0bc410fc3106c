"""From the runs of configs/zoo to the checkpoints that are shipped: models/zoo/NAME, and docs/zoo-curves.csv and .png.

    python benchmarks/ship_zoo.py [--runs runs/zoo] [--only linear-rope …] [--curves-only]

Takes each run's last checkpoint, evaluates it on the held-out files at three lengths, measures how fast it decodes, and
writes it in bfloat16 with these figures in its config.json and model card. Figures are those of the weights as they are
stored. Run it on a quiet machine.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from lin_attn.data import TextCorpus
from models import CausalLM
from models.checkpoint import load_checkpoint
from models.evaluation import Reading, evaluate
from models.hardware import default_precision
from models.pretrained.loading import ZOO
from models.report import plot_curves, read_curve
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
    write_curves({name: metrics_of(run) for name, run in runs.items()})
    if not options.curves_only:
        corpus = TextCorpus("stdlib")
        print(f"by the frequencies of bytes alone: {bits_by_frequency(corpus):.4f} bits per byte")
        for name, run in runs.items():
            if options.only is None or name in options.only:
                ship(name, run, corpus)


def ship(name: str, run: Path, corpus: TextCorpus) -> None:
    """Writes one checkpoint, with what it reaches."""
    config = yaml.safe_load((ROOT / "configs" / "zoo" / f"{name}.yaml").read_text())
    model = load_checkpoint(metrics_of(run).parent / "checkpoints" / "last.ckpt", kind=TrainedModel)
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
        metrics |= bits_per_byte(model, corpus)
        summary["bits_per_byte"] = metrics[f"bits_per_byte_at_{context}"]
        summary["decode_tokens_per_second"] = decode_rate(model)
    else:
        for key in ("loss", "perplexity", "accuracy"):
            metrics[key] = read_curve(metrics_of(run), f"val/{key}")[1][-1]
    model.save_pretrained(ZOO / stored, dtype=torch.bfloat16, summary=summary | {"metrics": metrics}, overwrite=True)
    size = (ZOO / stored / "model.safetensors").stat().st_size
    print(f"{stored}: {size / 1e6:.2f} MB, {metrics}, {summary.get('decode_tokens_per_second', '')}")


def metrics_of(run: Path) -> Path:
    """The log of a run; of one that was resumed, that of its last part."""
    return max(run.glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)


def bits_per_byte(model: CausalLM, corpus: TextCorpus) -> dict[str, float]:
    """On all held-out files, in blocks of each length that begin anew."""
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


def write_curves(runs: dict[str, Path]) -> None:
    """docs/zoo-curves.csv: training loss, validation loss and bits per byte by step; docs/zoo-curves.png: the last."""
    names = ("train/loss", "val/loss", "val/bits_per_byte")
    lines = ["model,step,figure,value"]
    for model, metrics in runs.items():
        for name in names:
            points = zip(*read_curve(metrics, name), strict=True)
            lines += [f"{model},{step},{name},{value:.4f}" for step, value in points]
    (ROOT / "docs" / "zoo-curves.csv").write_text("\n".join(lines) + "\n")
    judged = {model: [metrics] for model, metrics in runs.items() if read_curve(metrics, names[-1])[0]}
    plot_curves(judged, ROOT / "docs" / "zoo-curves.png")


def bits_by_frequency(corpus: TextCorpus) -> float:
    """What a held-out byte costs by the frequencies of bytes in the training files alone, and the ends of files."""
    counts, held_out = (
        np.bincount(corpus.stores[split].tokens(0, len(corpus.stores[split])), minlength=corpus.vocab_size)
        for split in ("train", "validation")
    )
    probabilities = (counts + 1) / (counts + 1).sum()
    return float(-(held_out * np.log2(probabilities)).sum() / held_out.sum())


if __name__ == "__main__":
    main()
