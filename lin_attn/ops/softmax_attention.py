"""Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, eq. 1) with every kind of position encoding.

    out_m = Σ_n softmax_n( (R_m q_m)ᵀ (R_n k_n) · scale + term_mn + bias_mn ) v_n

The baseline: torch's scaled_dot_product_attention does the work (its flash kernel where the arguments allow), which
needs O(N²) time.

Letters: B batch, H heads of q, H_k heads of k and v, N queries, P positions before them, N_k keys, D, M head dims.
"""

from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from lin_attn.ops.checks import check_key_mask, check_qkv, check_rotary
from lin_attn.ops.softmax_core import attend, faded
from lin_attn.ops.state import KVCache
from lin_attn.positions import Rotary, ScorePositions, XPos


@overload
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | XPos | None = ...,
    positions: ScorePositions | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    state: KVCache | None = ...,
    return_state: Literal[False] = ...,
    scale: float | None = ...,
) -> Tensor: ...


@overload
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | XPos | None = ...,
    positions: ScorePositions | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    state: KVCache | None = ...,
    return_state: Literal[True],
    scale: float | None = ...,
) -> tuple[Tensor, KVCache]: ...


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | XPos | None = None,
    positions: ScorePositions | None = None,
    bias: Tensor | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    state: KVCache | None = None,
    return_state: bool = False,
    scale: float | None = None,
) -> Tensor | tuple[Tensor, KVCache]:
    """Softmax attention of queries over keys before them or over all keys.

    Products are taken in the inputs' dtype, under autocast too; the softmax accumulates in float32 at least.

    Args:
        q: queries, (B, H, N, D), floating point.
        k: keys, (B, H_k, N_k, D), with H a multiple of H_k and N_k = N if causal.
        v: values, (B, H_k, N_k, M).
        rotary: rotates q and k, head_dim D; with an XPos, which is for causal attention, pairs fade with distance as
            well. None for no rotation.
        positions: adds a term of q, k and their positions to the scores, and may add to the values; in q's dtype.
        bias: added to the scaled scores, broadcastable to (B, H, N, P + N_k) with P keys in the state; q's dtype.
        causal: query m sees the keys n ≤ m (and the state); otherwise all keys.
        key_mask: (B, N_k) bool, True where the key is real. A query that sees no key gets zeros.
        state: what an earlier call returned for the tokens before these: positions go on from its length.
        return_state: return the cache with these keys and values as well.
        scale: factor of q_mᵀ k_n; by default that of the positions, if given, and 1/√D otherwise.

    Returns:
        The output (B, H, N, M) in q's dtype, or that and a KVCache.

    Raises:
        ValueError: naming the argument that does not fit, what came and what was wanted.
    """
    check_qkv(q, k, v, causal=causal)
    check_key_mask(key_mask, k)
    check_rotary(rotary.rotary if isinstance(rotary, XPos) else rotary, q.shape[-1])
    _check_positions(positions, rotary, causal)
    if state is not None:
        _check_cache(state, k, v)
    past = 0 if state is None else state.length
    if rotary is not None:
        turn = rotary.rotary if isinstance(rotary, XPos) else rotary
        q, k = turn(q, past), turn(k, past)
    if key_mask is not None:  # what is hidden may be anything, NaN too, which no mask of the scores would hide
        hidden = ~key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    if state is not None:  # whose hidden keys are zeros already
        if key_mask is not None or state.key_mask is not None:
            key_mask = torch.cat((_mask_of(state.key_mask, state.k), _mask_of(key_mask, k)), dim=1)
        k, v = torch.cat((state.k, k), dim=2), torch.cat((state.v, v), dim=2)
    bias, values = _expanded(bias, q, k), None
    if scale is None:
        scale = q.shape[-1] ** -0.5 if positions is None else positions.scale(q.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        if positions is not None and q.shape[2]:  # no queries have no scores
            term = positions.scores(q, k, past)
            bias = _expanded(term if bias is None else term + bias, q, k)
            values = partial(positions.values, past=past) if positions.in_values else None
        run = partial(attend, causal=causal, scale=scale, values=values)
        if isinstance(rotary, XPos):
            out = faded(run, rotary, q, k, v, bias=bias, key_mask=key_mask)
        else:
            out = run(q, k, v, bias=bias, key_mask=key_mask)
    return (out, KVCache(k, v, k.shape[2], key_mask)) if return_state else out


def _check_positions(positions: ScorePositions | None, rotary: Rotary | XPos | None, causal: bool) -> None:
    if positions is not None:
        if not isinstance(positions, ScorePositions):
            raise ValueError(f"positions is a {type(positions).__name__}; wanted a ScorePositions or None")
        if positions.causal and not causal:
            raise ValueError("positions are for causal attention and causal is False; wanted positions of both signs")
        if positions.in_values and isinstance(rotary, XPos):
            raise ValueError("positions add to the values and rotary is an XPos; wanted one of the two")
    if isinstance(rotary, XPos) and not causal:
        raise ValueError(
            "rotary is an XPos, which grows without bound ahead of a query; wanted causal=True or a Rotary"
        )


def _mask_of(key_mask: Tensor | None, k: Tensor) -> Tensor:
    return k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask


def _check_cache(state: KVCache, k: Tensor, v: Tensor) -> None:
    if not isinstance(state, KVCache):
        raise ValueError(f"state is a {type(state).__name__}; wanted the KVCache of an earlier call")
    for name, old, new in (("k", state.k, k), ("v", state.v, v)):
        wanted = (*new.shape[:2], state.length, new.shape[3])
        if old.shape != wanted or old.dtype != new.dtype or old.device != new.device:
            raise ValueError(
                f"state.{name} is {old.dtype} of shape {tuple(old.shape)} on {old.device}; "
                f"wanted {new.dtype} of shape {wanted} on {new.device}"
            )
    mask, wanted = state.key_mask, (k.shape[0], state.length)
    if mask is not None and (mask.shape != wanted or mask.dtype != torch.bool or mask.device != k.device):
        raise ValueError(
            f"state.key_mask is {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}; "
            f"wanted bool of shape {wanted} on {k.device}"
        )


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias with all four axes and all queries and keys, as the kernels want it."""
    if bias is None:
        return None
    full = (*q.shape[:3], k.shape[2])
    if bias.dtype != q.dtype or bias.dim() > 4:
        raise ValueError(f"bias is {bias.dtype} of shape {tuple(bias.shape)}; wanted {q.dtype}, up to {full}")
    if any(size not in (1, wanted) for size, wanted in zip(reversed(bias.shape), reversed(full), strict=False)):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; wanted one that broadcasts to {full}")
    bias = bias.view(*[1] * (4 - bias.dim()), *bias.shape)
    return bias.expand(*bias.shape[:2], *full[2:])
