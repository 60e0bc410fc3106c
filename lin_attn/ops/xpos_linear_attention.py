"""Linear attention with xPos: rotary embedding after φ whose pairs fade with distance (see `lin_attn.positions.xpos`).

    out_m = Σ_{n≤m} Σ_i ζ_i^((m−n)/b) (R_m φ(q_m))_i (R_n φ(k_n))_i v_n / Σ_{n≤m} Σ_i ζ_i^((m−n)/b) φ(q_m)_i φ(k_n)_i

The decay is in numerator and denominator alike: a denominator that remembers what the numerator has forgotten would
draw every output to zero as the sequence grows. The denominator stays unrotated, as in RoFormer's eq. 19.

ζ^(m/b) φ(q_m) and ζ^(−n/b) φ(k_n) are features like any others, so that this is `linear_attention` of them, by any
backend, with φ the identity. Exponents are measured from the beginning of a stretch of the sequence (`XPos.stretch`);
between two stretches the sums S and z are brought to the new origin, which only ever makes them smaller.
"""

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor

from lin_attn.feature_maps import feature_map as find_feature_map
from lin_attn.ops.checks import check_key_mask, check_qkv
from lin_attn.ops.linear_attention import linear_attention
from lin_attn.ops.state import LinearState
from lin_attn.positions import XPos


@overload
def xpos_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    xpos: XPos,
    feature_map: str | Callable[[Tensor], Tensor] = ...,
    normalize: bool = ...,
    key_mask: Tensor | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[False] = ...,
    eps: float = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def xpos_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    xpos: XPos,
    feature_map: str | Callable[[Tensor], Tensor] = ...,
    normalize: bool = ...,
    key_mask: Tensor | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[True],
    eps: float = ...,
    backend: str = ...,
) -> tuple[Tensor, LinearState]: ...


def xpos_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    xpos: XPos,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    normalize: bool = True,
    key_mask: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    eps: float = 1e-12,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """Causal linear attention in O(N) time whose weights depend on m − n and fade with it.

    Features, decay, rotation and sums are computed in float32 (float64 for float64 inputs), under autocast too.

    Args:
        q: queries, (B, H, N, D), floating point.
        k: keys, (B, H_k, N, D), with H a multiple of H_k.
        v: values, (B, H_k, N, M).
        xpos: rotation and decay; its head_dim is D′, the size of φ's features.
        feature_map: φ, as in `linear_attention`; autograd keeps φ(q) and φ(k).
        normalize: divide by the sum of unrotated weights; False leaves the numerator.
        key_mask: (B, N) bool, True where the key is real. A query that sees no key gets zeros.
        state: what an earlier call returned for the tokens before these. Its sums are as the next position sees them.
        return_state: return the state after these tokens as well.
        eps: as in `linear_attention`.
        backend: of `linear_attention`.

    Returns:
        The output (B, H, N, M) in q's dtype, or that and a LinearState.

    Raises:
        ValueError: naming the argument that does not fit, what came and what was wanted.
    """
    check_qkv(q, k, v, causal=True)
    check_key_mask(key_mask, k)
    if not isinstance(xpos, XPos):
        raise ValueError(f"xpos is a {type(xpos).__name__}; wanted an XPos")
    phi = find_feature_map(feature_map) if isinstance(feature_map, str) else feature_map
    if not callable(phi):
        raise ValueError(f"feature_map is {feature_map!r}; wanted a name or a callable on (…, D)")
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if key_mask is not None:  # what is hidden may be NaN, whose gradient no later mask would stop
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = phi(q.to(wide)).to(wide), phi(k.to(wide)).to(wide), v.to(wide)
        if q.shape[-1] != xpos.head_dim:
            raise ValueError(f"xpos has head_dim {xpos.head_dim}; wanted {q.shape[-1]}, the size of what it rotates")
        outs, after = [], state
        for start in range(0, max(q.shape[2], 1), xpos.stretch):
            rows = slice(start, start + xpos.stretch)
            steps = torch.arange(q[:, :, rows].shape[2], device=q.device)
            out, after = linear_attention(
                q[:, :, rows] * xpos.decay(steps, dtype=wide),
                k[:, :, rows] * xpos.decay(-steps, dtype=wide),
                v[:, :, rows],
                feature_map="identity",
                rotary=xpos.rotary,
                normalize=normalize,
                key_mask=None if key_mask is None else key_mask[:, rows],
                state=after,
                return_state=True,
                eps=eps,
                backend=backend,
            )
            outs.append(out)
            moved = xpos.decay(torch.tensor(len(steps), device=q.device), dtype=wide)  # (D,)
            after = LinearState(after.kv * moved[:, None], after.k_sum * moved, after.length)
        out = torch.cat(outs, dim=2).to(dtype)
    assert after is not None
    return (out, after) if return_state else out
