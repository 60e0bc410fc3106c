"""Checks of arguments that the attention ops share. Each names the argument, what came and what was wanted."""

import torch
from torch import Tensor

from lin_attn.positions import Rotary


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    """q (B, H, N, D), k (B, H_k, N_k, D), v (B, H_k, N_k, M) of one floating dtype and device; N = N_k if causal."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted four axes (batch, heads, length, head_dim)")
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}; wanted floating point")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}; wanted that of q, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; wanted the device of q, {q.device}")
    batch, heads, length, head_dim = q.shape
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"k has shape {tuple(k.shape)}; wanted ({batch}, heads, length, {head_dim}) to fit q")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads; wanted a divisor of the {heads} heads of q")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {tuple(v.shape)}; wanted {tuple(k.shape[:3])} and a head_dim to fit k")
    if causal and k.shape[2] != length:
        raise ValueError(
            f"k has length {k.shape[2]} and q {length}; causal attention wants them equal, "
            "one key a query (earlier keys come in through state=)"
        )


def check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    """(B, N_k) bool on k's device, or None."""
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask has dtype {key_mask.dtype}; wanted bool, True where the key is real")
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(f"key_mask has shape {tuple(key_mask.shape)}; wanted {(k.shape[0], k.shape[2])}")
    if key_mask.device != k.device:
        raise ValueError(f"key_mask is on {key_mask.device}; wanted the device of k, {k.device}")


def check_rotary(rotary: Rotary | None, features: int) -> None:
    """The vectors that are rotated have the rotary's head_dim."""
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        raise ValueError(f"rotary is a {type(rotary).__name__}; wanted a Rotary or None")
    if rotary.head_dim != features:
        raise ValueError(f"rotary has head_dim {rotary.head_dim}; wanted {features}, the size of what it rotates")
