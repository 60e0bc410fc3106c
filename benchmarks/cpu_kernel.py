"""The fused CPU kernel against plain PyTorch, softmax attention and what the machine can do.

    python benchmarks/cpu_kernel.py [--rounds 9] [--json FILE]

All that is compared takes turns in one run; figures are medians. B 1, H 8, D = M = 64 unless said otherwise, float32,
φ = elu + 1, RoPE after it, causal. Operations are counted as 4·64·64·2 a token and head in forward, and 3.5 times that
in training (forward and backward); the ceiling is a product of two 2048 × 2048 float32 matrices. Run it on a quiet
machine.
"""

import argparse
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import medians
from torch import Tensor

from lin_attn import LinearState, Rotary, linear_attention
from lin_attn.kernels import cpu
from lin_attn.kernels.cpu.calls import has_bf16_products
from lin_attn.scaling.plan import Point
from lin_attn.scaling.subjects import operation
from models import CausalLM

D = 64
OPERATIONS = {"forward": 4 * 64 * 64 * 2, "train": 3.5 * 4 * 64 * 64 * 2}  # a token and head
LENGTHS = (256, 1024, 4096, 16384)
DECODED = 100  # tokens in a row, whose weights stay in cache as they do in use
MATH_UP_TO = 4096  # beyond, softmax by plain products holds gigabytes of weights


def main() -> None:
    """Runs all parts and prints their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each call (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    machine = (
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads, torch {torch.__version__}"
    )
    print(machine)
    print(f"kernel: {cpu.describe()}\n")
    figures: dict[str, Any] = {"machine": machine, "kernel": cpu.describe().split(", /")[0], "rounds": options.rounds}
    for phase in ("forward", "train"):
        figures[phase] = compare(phase, options.rounds)
    figures["crossover"] = {phase: crossover(phase, options.rounds) for phase in ("forward", "train")}
    figures["one head"] = one_head(options.rounds)
    figures["growth"] = growth(options.rounds)
    figures["decode"] = decode(options.rounds)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def compare(phase: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each way at each length, and what follows from them."""
    ways = ("cpu", "cpu bf16", "chunked", "flash", "math")
    print(f"{phase}, ms")
    print(
        f"{'N':>7}",
        *(f"{way:>9}" for way in ways),
        f"{'GFLOP/s':>9} {'of ceiling':>10} {'× chunked':>9} {'× flash':>8}",
    )
    found = {}
    for length in LENGTHS:
        calls = {
            "cpu": call("linear", phase, length, "cpu"),
            "chunked": call("linear", phase, length, "chunked"),
            "flash": call("softmax-flash", phase, length),
            "matmul": matmul(),
        }
        if has_bf16_products():
            calls["cpu bf16"] = call("linear", phase, length, "cpu", dtype="bfloat16")
        if length <= MATH_UP_TO:
            calls["math"] = call("softmax-math", phase, length)
        seconds = medians(calls, rounds)
        rate = OPERATIONS[phase] * 8 * length / seconds["cpu"]
        found[str(length)] = {name: 1e3 * value for name, value in seconds.items()} | {
            "rate": rate / 1e9,
            "share of ceiling": rate / (2 * 2048**3 / seconds["matmul"]),
            "times chunked": seconds["chunked"] / seconds["cpu"],
            "times flash": seconds["flash"] / seconds["cpu"],
        }
        row = found[str(length)]
        print(f"{length:7,}", *(f"{row.get(way, math.nan):9.2f}" for way in ways), f"{row['rate']:9.0f}", end="")
        print(f" {row['share of ceiling']:10.2f} {row['times chunked']:9.1f} {row['times flash']:8.1f}")
    print()
    return found


def crossover(phase: str, rounds: int) -> float:
    """The length from which on the kernel is faster than flash softmax, between powers of two by their logarithms."""
    lengths, ratios = (16, 32, 64, 128, 256, 512), []
    for length in lengths:
        calls = {"cpu": call("linear", phase, length, "cpu"), "flash": call("softmax-flash", phase, length)}
        seconds = medians(calls, 3 * rounds)
        ratios.append(seconds["flash"] / seconds["cpu"])
    print(f"{phase}: flash softmax's time over the kernel's, ", end="")
    print(", ".join(f"{ratio:.2f} at {length}" for length, ratio in zip(lengths, ratios, strict=True)))
    found = float(lengths[0])
    for i in range(len(lengths) - 1, 0, -1):
        if ratios[i - 1] < 1:
            low, high = math.log(ratios[i - 1]), math.log(ratios[i])
            found = lengths[i - 1] * 2 ** (-low / (high - low)) if high > 0 else math.inf
            break
    print(f"{phase}: faster than flash softmax from N = {found:.0f} on\n")
    return found


def one_head(rounds: int) -> dict[str, float]:
    """B 1, H 1, N 65,536, cut into segments, against as much work in 8 heads, which need none, and one thread."""
    length, threads = 65536, torch.get_num_threads()
    one, eight = call("linear", "forward", length, "cpu", heads=1), call("linear", "forward", length // 8, "cpu")

    def on_one_thread() -> None:
        torch.set_num_threads(1)
        one()
        torch.set_num_threads(threads)

    # The product comes after the single thread, and wakes the others up again.
    seconds = medians(
        {"one head": one, "eight heads": eight, "one thread": on_one_thread, "matmul": matmul()}, 2 * rounds
    )
    rates = {name: OPERATIONS["forward"] * length / value / 1e9 for name, value in seconds.items() if name != "matmul"}
    share = rates["one head"] / rates["eight heads"]
    print(f"B 1, H 1, N {length:,}, forward: {rates['one head']:.0f} GFLOP/s on {threads} threads, ", end="")
    print(f"{rates['one thread']:.0f} on one; as much work in 8 heads {rates['eight heads']:.0f}: {share:.2f} of it\n")
    return rates | {"share": share}


def growth(rounds: int) -> dict[str, Any]:
    """The exponent of time in N from 4,096 to 262,144, by least squares of the logarithms."""
    lengths = [4096 * 4**i for i in range(4)]
    found: dict[str, Any] = {}
    for phase in ("forward", "train"):
        seconds = medians({str(n): call("linear", phase, n, "cpu") for n in lengths}, rounds)
        x, y = [math.log(n) for n in lengths], [math.log(seconds[str(n)]) for n in lengths]
        mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
        slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
        print(f"{phase}: time grows with N to the {slope:.3f} from {lengths[0]:,} to {lengths[-1]:,}: ", end="")
        print(", ".join(f"{1e3 * seconds[str(n)]:.1f} ms" for n in lengths))
        found[phase] = {"exponent": slope, "ms": {n: 1e3 * value for n, value in seconds.items()}}
    print()
    return found


def decode(rounds: int) -> dict[str, float]:
    """A step at positions 100 and 100,000, and tokens a second of a model of 6 layers, 256 wide, at batch 1."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, 1, D, generator=generator) for _ in range(3))
    rotary = Rotary(D)

    @torch.no_grad()
    def step(state: LinearState) -> Tensor:
        return linear_attention(q, k, v, rotary=rotary, state=state, return_state=True)[0]

    positions = (100, 100_000)
    states = {n: LinearState(torch.randn(1, 8, D, D), n * (1 + torch.rand(1, 8, D)), n) for n in positions}
    seconds = medians({str(n): (lambda n=n: step(states[n])) for n in positions}, 5 * rounds)
    print("a step of attention: ", end="")
    print(", ".join(f"{1e6 * seconds[str(n)]:.1f} µs at position {n:,}" for n in positions), end="")
    print(f", ratio {seconds['100000'] / seconds['100']:.3f}")

    models = {
        name: CausalLM(network={"d_model": 256, "n_layers": 6, "n_heads": 4}).eval().to(getattr(torch, name))
        for name in ("float32", "bfloat16")
    }
    prompt = torch.randint(0, 256, (1, 100), generator=generator)
    figures = {"us at 100": 1e6 * seconds["100"], "us at 100000": 1e6 * seconds["100000"]}
    source = torch.randn(2**24)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    for name, model in models.items():
        calls[name] = lambda step=decoder(model, prompt): step(DECODED)
    seconds = medians(calls, rounds)
    seconds |= {name: seconds[name] / DECODED for name in models}
    bandwidth = source.nbytes / seconds["copy"]  # bytes read, and as many written
    for name, model in models.items():
        weights = sum(parameter.nbytes for parameter in model.parameters())
        floor = weights / bandwidth
        print(f"a model of 6 layers, 256 wide, {name}: {1 / seconds[name]:.0f} tokens/s at batch 1, ", end="")
        print(
            f"{floor / seconds[name]:.2f} of what reading {weights / 1e6:.1f} MB at {bandwidth / 1e9:.1f} GB/s allows"
        )
        figures |= {f"tokens/s {name}": 1 / seconds[name], f"share of floor {name}": floor / seconds[name]}
    return figures


def decoder(model: CausalLM, prompt: Tensor) -> Callable[[int], None]:
    """A function that continues the prompt by so many of the likeliest tokens; the prompt is read before."""
    with torch.no_grad():
        logits, state = model(prompt, return_state=True)

    @torch.no_grad()
    def run(count: int) -> None:
        token, after = logits[:, -1:].argmax(-1), state
        for _ in range(count):
            latest, after = model(token, state=after, return_state=True)
            token = latest.argmax(-1)

    return run


def call(
    mechanism: str, phase: str, length: int, backend: str = "", *, heads: int = 8, dtype: str = "float32"
) -> Callable[[], Any]:
    """One call of attention on random inputs."""
    point = Point(
        mechanism=mechanism,
        backend=backend or mechanism.removeprefix("softmax-"),
        level="op",
        phase=phase,
        device="cpu",
        dtype=dtype,
        batch=1,
        heads=heads,
        head_dim=D,
        length=length,
    )
    return operation(point).run


def matmul() -> Callable[[], Any]:
    """The ceiling: a product of two 2048 × 2048 float32 matrices."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return lambda: a @ b


if __name__ == "__main__":
    main()
