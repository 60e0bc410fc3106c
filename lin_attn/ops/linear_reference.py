"""Linear attention written for clarity: the truth that every other backend is tested against.

    out_m = Σ_n (R_m φ(q_m))ᵀ (R_n φ(k_n)) v_n / Σ_n φ(q_m)ᵀ φ(k_n)          (RoFormer, arXiv 2104.09864, eq. 19)

`quadratic` forms all N × N_k weights; `recurrent` carries S_m = Σ_{n≤m} (R_n φ(k_n)) v_nᵀ and z_m = Σ_{n≤m} φ(k_n)
from one token to the next. Autograd differentiates both.

Letters: B batch, H heads of q, K heads of k and v, N length, D head dim, M value head dim.
"""

import math

import torch
from torch import Tensor

from lin_attn.feature_maps import FeatureMap
from lin_attn.positions import rotate

Rotation = tuple[Tensor, Tensor] | None  # cos and sin, each (N, D/2)
Sums = tuple[Tensor, Tensor]  # S (B, K, D, M) and z (B, K, D)


def features(x: Tensor, phi: FeatureMap, rotation: Rotation, rope: str) -> tuple[Tensor, Tensor]:
    """What x (…, N, D) puts into the numerator and into the denominator.

    With rope="after" these are R φ(x) and φ(x), as in eq. 19; with "before" both are φ(R x); without rotation φ(x).
    """
    if rotation is None:
        plain = phi.forward(x)
        return plain, plain
    cos, sin = (table[: x.shape[-2]] for table in rotation)
    if rope == "before":
        plain = phi.forward(rotate(x, cos, sin))
        return plain, plain
    plain = phi.forward(x)
    return rotate(plain, cos, sin), plain


def divide(numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
    """numerator (…, N, M) / denominator (…, N), whose magnitude is taken to be eps where it is less."""
    return numerator / floored(denominator, eps)[..., None]


def floored(denominator: Tensor, eps: float) -> Tensor:
    """The denominator, its magnitude raised to eps where it is less; a floor, since adding eps would bias every row."""
    eps = least(denominator, eps)
    signed = torch.where(denominator < 0, -eps, eps).to(denominator.dtype)
    return torch.where(denominator.abs() < eps, signed, denominator)


def least(denominator: Tensor, eps: float) -> float:
    """eps, but no less than what a gradient can be divided by without overflow: 0 · ∞ would be NaN."""
    return max(eps, math.sqrt(torch.finfo(denominator.dtype).tiny))


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Sums,
    rotation: Rotation,
    *,
    phi: FeatureMap,
    rope: str,
    normalize: bool,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """All weights at once, O(N · N_k) time and memory.

    Args:
        q: (B, H, N, D), float32 or float64, as are k (B, K, N_k, D) and v (B, K, N_k, M).
        sums: S and z of what came before.

    Returns:
        The output (B, H, N, M) and the sums with this input's keys added.
    """
    groups = q.shape[1] // k.shape[1]
    q_num, q_den = features(q, phi, rotation, rope)
    k_num, k_den, v = _masked(*features(k, phi, rotation, rope), v, key_mask)

    def per_query_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(groups, dim=1)

    def weights(queries: Tensor, keys: Tensor) -> Tensor:
        scores = queries @ per_query_head(keys).mT
        return scores.tril() if causal else scores

    out = weights(q_num, k_num) @ per_query_head(v) + q_num @ per_query_head(sums[0])
    if normalize:
        denominator = weights(q_den, k_den).sum(-1) + (q_den * per_query_head(sums[1])[:, :, None]).sum(-1)
        out = divide(out, denominator, eps)
    return out, sums[0] + k_num.mT @ v, sums[1] + k_den.sum(-2)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sums: Sums,
    rotation: Rotation,
    *,
    phi: FeatureMap,
    rope: str,
    normalize: bool,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token after another; arguments and results as in `quadratic`."""
    batch, kv_heads = k.shape[:2]
    q_num, q_den = (x.unflatten(1, (kv_heads, -1)) for x in features(q, phi, rotation, rope))  # (B, K, H/K, N, D)
    k_num, k_den, v = _masked(*features(k, phi, rotation, rope), v, key_mask)
    kv, k_sum = sums
    if not causal:  # every query sees the sums over all keys
        for n in range(k.shape[2]):
            kv = kv + k_num[:, :, n, :, None] * v[:, :, n, None, :]
            k_sum = k_sum + k_den[:, :, n]
    rows = []
    for m in range(q.shape[2]):
        if causal:
            kv = kv + k_num[:, :, m, :, None] * v[:, :, m, None, :]
            k_sum = k_sum + k_den[:, :, m]
        row = q_num[:, :, :, m] @ kv
        if normalize:
            row = divide(row, (q_den[:, :, :, m] @ k_sum[..., None])[..., 0], eps)
        rows.append(row)
    shape = (batch, kv_heads, q.shape[1] // kv_heads, 0, v.shape[-1])
    out = torch.stack(rows, dim=3) if rows else v.new_zeros(shape)
    return out.flatten(1, 2), kv, k_sum


def _masked(k_num: Tensor, k_den: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Takes hidden keys out *after* the feature map, since φ(0) = 1, and their values, which may be anything."""
    if key_mask is None:
        return k_num, k_den, v
    hidden = ~key_mask[:, None, :, None]
    return k_num.masked_fill(hidden, 0), k_den.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
