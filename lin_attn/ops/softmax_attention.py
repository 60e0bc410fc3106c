"""Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, eq. 1) with rotary position embedding.

    out_m = Σ_n softmax_n( (R_m q_m)ᵀ (R_n k_n) · scale + bias_mn ) v_n

The baseline: torch's scaled_dot_product_attention does the work (its flash kernel where the arguments allow), which
needs O(N²) time.
"""

from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lin_attn.ops.checks import check_key_mask, check_qkv, check_rotary
from lin_attn.ops.state import KVCache
from lin_attn.positions import Rotary


@overload
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotary: Rotary | None = ...,
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
    rotary: Rotary | None = ...,
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
    rotary: Rotary | None = None,
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
        rotary: rotates q and k, head_dim D; None for no rotation.
        bias: added to the scaled scores, broadcastable to (B, H, N, P + N_k) with P keys in the state; q's dtype.
        causal: query m sees the keys n ≤ m (and the state); otherwise all keys.
        key_mask: (B, N_k) bool, True where the key is real. A query that sees no key gets zeros.
        state: what an earlier call returned for the tokens before these: positions go on from its length.
        return_state: return the cache with these keys and values as well.
        scale: factor of the scores, 1/√D by default.

    Returns:
        The output (B, H, N, M) in q's dtype, or that and a KVCache.

    Raises:
        ValueError: naming the argument that does not fit, what came and what was wanted.
    """
    check_qkv(q, k, v, causal=causal)
    check_key_mask(key_mask, k)
    check_rotary(rotary, q.shape[-1])
    if state is not None:
        _check_cache(state, k, v)
    past = 0 if state is None else state.length
    if rotary is not None:
        q, k = rotary(q, past), rotary(k, past)
    if state is not None:
        if key_mask is not None or state.key_mask is not None:
            key_mask = torch.cat((_mask_of(state.key_mask, state.k), _mask_of(key_mask, k)), dim=1)
        k, v = torch.cat((state.k, k), dim=2), torch.cat((state.v, v), dim=2)
    if key_mask is not None:  # what is hidden may be anything, NaN too, which no mask of the scores would hide
        hidden = ~key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    bias = _expanded(bias, q, k)

    # One query at the end of the keys sees them all, and an unmasked square is what the kernels call causal: neither
    # needs a mask in memory.
    length, keys = q.shape[2], k.shape[2]
    needs_tril = causal and length > 1
    is_causal = needs_tril and past == 0 and key_mask is None and bias is None
    visible: Tensor | None = None
    if key_mask is not None:
        visible = key_mask[:, None, None, :]
    if needs_tril and not is_causal:
        tril = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(past)
        visible = tril if visible is None else visible & tril
    # A row without keys would be 0/0. It is given all of them here, and its output is set to zero below, so that
    # its gradients are zeros and not NaN.
    blind = None if visible is None or key_mask is None else ~visible.any(-1, keepdim=True)
    mask = visible if blind is None or visible is None else visible | blind
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    with torch.autocast(q.device.type, enabled=False):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if blind is not None:
        out = out.masked_fill(blind, 0)
    return (out, KVCache(k, v, keys, key_mask)) if return_state else out


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
