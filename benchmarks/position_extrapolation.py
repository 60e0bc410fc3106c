"""Trains a small twin at a short length with each position encoding, evaluates it at longer ones, prints a table.

    python benchmarks/position_extrapolation.py [--length 128] [--steps 300] [--seed 0] [--runs runs/extrapolation]

Runs that are finished are not run again, so that it can be stopped and called anew. Validation is of the same text at
every length, in blocks whose first token sees nothing before it: a longer block helps who can use it.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from lin_attn.data import TextCorpus
from models import CausalLM
from models.checkpoint import load_checkpoint
from models.loss import token_nll

ROOT = Path(__file__).resolve().parent.parent
TRAINED = {
    f"{attention} {position}": {"attention": attention, "position": position}
    for attention, positions in (
        ("softmax", "none sinusoidal rope xpos shaw transformer_xl t5 deberta alibi"),
        ("linear", "none sinusoidal rope xpos"),
    )
    for position in positions.split()
}
# The weights of a run, read with other angles.
REREAD = {
    "softmax rope": ({"rope_scaling": "linear"}, {"rope_scaling": "ntk"}),
    "linear rope": ({"rope_scaling": "linear"}, {"rope_scaling": "ntk"}),
}
TOKENS = 2**17  # of validation


def train(label: str, options: argparse.Namespace) -> CausalLM:
    """The model of a run, trained if it is not there."""
    folder = options.runs.resolve() / f"{label.replace(' ', '-')}-{options.length}-{options.steps}-{options.seed}"
    if not (folder / "done").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, ROOT / "train.py", "fit", "-c", ROOT / "configs/lm/stdlib-softmax-rope.yaml"]
        given = {
            "seed_everything": options.seed,
            "data.seed": options.seed,
            "data.block_length": options.length,
            "data.batch_size": 4096 // options.length,
            "trainer.max_steps": options.steps,
            "trainer.val_check_interval": options.steps,
            "trainer.limit_val_batches": 8,
            "trainer.default_root_dir": folder,
            "trainer.enable_progress_bar": "false",
            "model.network.d_model": 64,
            "model.network.n_layers": 3,
        } | {f"model.network.{name}": value for name, value in TRAINED[label].items()}
        command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
        folder.mkdir(parents=True)
        with (folder / "log.txt").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        (folder / "done").touch()
    return load_checkpoint(folder / "version_0" / "checkpoints" / "last.ckpt")


@torch.no_grad()
def bits_per_byte(model: CausalLM, length: int) -> float:
    """Of the first TOKENS of the validation text, in blocks of length."""
    data = TextCorpus("stdlib", block_length=length, batch_size=4096 // length)
    nats, count, tokens = 0.0, 0, 0
    for batch in data.val_dataloader():
        hidden, _ = model.network(batch["tokens"])
        nll = token_nll(hidden.flatten(0, 1), model.network.head.weight, batch["targets"].flatten())
        nats, count = nats + nll.double().sum().item(), count + int(batch["n_bytes"].sum())
        tokens += batch["tokens"].numel()
        if tokens >= TOKENS:
            break
    return nats / count / torch.log(torch.tensor(2.0)).item()


def main() -> None:
    """Trains what is missing and prints bits per byte, a row an encoding and a column a length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "extrapolation")
    options = parser.parse_args()
    lengths = [options.length * 2**i for i in range(4)]
    print(
        f"| trained at {options.length} | {' | '.join(map(str, lengths))} |\n|---|{'---|' * len(lengths)}", flush=True
    )
    for label in TRAINED:
        model = train(label, options)
        cells = [f"{bits_per_byte(model, length):.3f}" for length in lengths]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)
        for changes in REREAD.get(label, ()):
            cells = []
            for length in lengths[1:]:
                factor = length / options.length
                other = CausalLM(network=replace(model.network_config, rope_factor=factor, **changes)).eval()
                other.load_state_dict(model.state_dict())
                cells.append(f"{bits_per_byte(other, length):.3f}")
            print(f"| {label}, scaling {changes['rope_scaling']} | – | {' | '.join(cells)} |", flush=True)
    print(f"\nCommand: {shlex.join(sys.argv)}; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
