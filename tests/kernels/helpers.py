"""Random problems for the kernel, on the level of `linear_attention`, and the kernel compiled in other ways."""

import ctypes
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lin_attn import LinearState, Rotary
from lin_attn.kernels.cpu import build
from tests.helpers import double, values_and_gradients

LENGTHS = (0, 1, 2, 63, 64, 65, 130)
MAPS = ("identity", "relu", "squared_relu", "elu1")


def compiled(folder: Path, *flags: str) -> ctypes.CDLL:
    """The kernel with flags after its own."""
    output = folder / "kernel.so"
    compiler, _ = build.find_compiler()
    assert build.compile_sources(compiler, [*build.FLAGS, *flags], output) is None
    library = ctypes.CDLL(str(output))
    library.lin_attn_built.restype = ctypes.c_int64
    return library


def scattered(x: Tensor, choice: random.Random) -> Tensor:
    """The same numbers in memory of another layout: axes in another order, gaps, an offset that is no multiple of 4."""
    order = list(range(4))
    choice.shuffle(order)
    stored = x.detach().permute(order)
    last = choice.choice((1, 1, 2))
    room = x.new_full((*stored.shape[:3], last * stored.shape[3] + 3), float("nan"))
    view = room[..., 1 : 1 + last * stored.shape[3] : last]
    view.copy_(stored)
    return view.permute([order.index(axis) for axis in range(4)])


class Problem:
    """A random call of linear_attention; `seed` fixes it all.

    Nothing can be compared near a denominator of 0, so that only positive maps are normalised; nor where a gradient is
    0 but for rounding, as that of a single feature's scale.
    """

    def __init__(self, seed: int, *, dtype: torch.dtype = torch.float32, max_dim: int = 256, **fixed: Any) -> None:
        choice = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def dim() -> int:
            return choice.choice(
                (choice.randint(1, 40), choice.randint(1, max_dim), 16 * choice.randint(1, max_dim // 16))
            )

        self.causal = fixed.get("causal", choice.random() < 0.6)
        batch, kv_heads, groups = choice.choice((0, 1, 2, 2)), choice.randint(1, 3), choice.randint(1, 3)
        batch, kv_heads, groups = fixed.get("heads", (batch, kv_heads, groups))
        queries = fixed.get("length", choice.choice(LENGTHS))
        keys = queries if self.causal else fixed.get("keys", choice.choice(LENGTHS))
        size, value_size = (fixed.get(name, dim()) for name in ("size", "value_size"))
        phi = choice.choice(MAPS)
        rope = choice.choice(("none", "after", "before")) if size % 2 == 0 else "none"
        normalize = (phi == "elu1" and size > 1) or (phi != "identity" and size >= 16 and rope == "none")
        self.options: dict[str, Any] = {
            "feature_map": phi,
            "normalize": fixed.get("normalize", normalize and choice.random() < 0.8),
            "causal": self.causal,
        } | ({} if rope == "none" else {"rotary": Rotary(size), "rope": rope})
        if choice.random() < 0.5:
            mask = torch.rand(batch, 2 * keys, generator=generator) > 0.3
            self.options["key_mask"] = mask[:, ::2]

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator)
            return scattered(x.to(dtype), choice) if choice.random() < 0.7 else x.to(dtype)

        self.q = draw(batch, kv_heads * groups, queries, size).requires_grad_()
        self.k = draw(batch, kv_heads, keys, size).requires_grad_()
        self.v = draw(batch, kv_heads, keys, value_size).requires_grad_()
        kv = torch.randn(batch, kv_heads, value_size, size, generator=generator).mT  # not dense either
        k_sum = torch.rand(batch, kv_heads, size, generator=generator) + 0.5
        self.state = LinearState(kv.requires_grad_(), k_sum.requires_grad_(), choice.randint(0, 100_000))
        self.shape = f"{tuple(self.q.shape)} on {tuple(self.v.shape)}, {phi}, rope {rope}"

    def computed(self, backend: str = "cpu") -> dict[str, Tensor]:
        return values_and_gradients(self.q, self.k, self.v, self.state, backend=backend, **self.options)

    def wanted(self) -> dict[str, Tensor]:
        """By the reference in float64."""
        inputs = double(self.q, self.k, self.v, self.state)
        return values_and_gradients(*inputs, backend="reference", **self.options)  # type: ignore[arg-type]
