"""A few tokens' projection by the CPU kernel against torch's.

    python benchmarks/projection.py [--rounds 60]

The weights of each size are so many that they do not stay in cache, as in a model; calls take turns, and figures are
medians.
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from timing import medians
from torch import Tensor

from lin_attn.kernels import cpu

SHAPES = ((256, 256), (1024, 256), (256, 1024), (4096, 1024))  # outputs, inputs
WEIGHTS = 2**24  # of all matrices of a size


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    print(f"{torch.get_num_threads()} threads; torch's time over the kernel's")
    print("element    outputs  inputs  " + "".join(f"{tokens:>4} tokens" for tokens in (1, 2, 4, 8)))
    for dtype, (outputs, inputs) in itertools.product((torch.float32, torch.bfloat16), SHAPES):
        weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(WEIGHTS // (outputs * inputs))]
        ratios = [ratio(torch.randn(1, tokens, inputs).to(dtype), weights, rounds) for tokens in (1, 2, 4, 8)]
        print(f"{str(dtype)[6:]:<9}{outputs:>9}{inputs:>8}  " + "".join(f"{x:>11.2f}" for x in ratios))


def ratio(x: Tensor, weights: list[Tensor], rounds: int) -> float:
    """Seconds of torch over those of the kernel, each weight used in turn."""
    turn = itertools.cycle(weights)
    seconds = medians(
        {"torch": lambda: F.linear(x, next(turn)), "kernel": lambda: cpu.project(x, ((next(turn), None),))}, rounds
    )
    return seconds["torch"] / seconds["kernel"]


if __name__ == "__main__":
    main()
