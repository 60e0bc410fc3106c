"""Training tokens a second of a whole model, linear attention against softmax with RoPE, by length.

    python benchmarks/training_speed.py [--rounds 5] [--lengths 256 512 …] [--json FILE]

6 layers, 256 wide, 4 heads, bytes as tokens, 8,192 tokens a step; a step is forward, loss, backward and AdamW, in
float32. Softmax is torch's flash kernel. The models take turns; figures are medians. Run it on a quiet machine.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from timing import medians

from lin_attn.kernels import cpu
from models import CausalLM
from models.loss import cross_entropy_sum
from models.optimization import build_optimizer

TOKENS = 8192  # a step
NETWORK = {"d_model": 256, "n_layers": 6, "n_heads": 4}


def main() -> None:
    """Prints a row a length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each model (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}\nkernel: {cpu.describe()}\n")
    print(f"{'N':>6} {'linear, tokens/s':>17} {'softmax, tokens/s':>18} {'ratio':>6}")
    figures = {}
    for length in options.lengths:
        seconds = medians({name: step(name, length) for name in ("linear", "softmax")}, options.rounds)
        rates = {name: TOKENS / value for name, value in seconds.items()}
        figures[str(length)] = rates | {"ratio": rates["linear"] / rates["softmax"]}
        print(f"{length:6,} {rates['linear']:17,.0f} {rates['softmax']:18,.0f} {figures[str(length)]['ratio']:6.2f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "lengths": figures}, indent=1) + "\n")


def step(attention: str, length: int) -> Callable[[], None]:
    """One step of training on random bytes."""
    torch.manual_seed(0)
    model = CausalLM(network={**NETWORK, "attention": attention})
    optimizer = build_optimizer(model, model.optimizer_config, fused=None)
    tokens = torch.randint(0, 256, (TOKENS // length, length + 1))

    def run() -> None:
        hidden, _ = model.network(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        loss = cross_entropy_sum(hidden.flatten(0, 1), model.network.head.weight, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


if __name__ == "__main__":
    main()
