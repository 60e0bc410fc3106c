"""What softmax attention comes down to once keys are gathered and rotated: masks, torch's kernel, and weights.

Letters: B batch, H heads of q, H_k heads of k and v, N queries, J keys, D, M head dims. Where causal, the queries are
at the last N of the J positions.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lin_attn.positions import XPos


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None,
    key_mask: Tensor | None,
    causal: bool,
    scale: float,
    values: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Softmax attention of q (B, H, N, D) over k (B, H_k, J, D) and v (B, H_k, J, M).

    Args:
        bias: added to the scaled scores, (1 or B, 1 or H, N, J).
        key_mask: (B, J) bool; a query that sees no key gets zeros.
        values: adds to the output what it makes of the weights (B, H, N, J), which then all stand in memory.

    Returns:
        (B, H, N, M).
    """
    # One query at the end of the keys sees them all, and an unmasked square is what the kernels call causal: neither
    # needs a mask in memory.
    length, keys = q.shape[2], k.shape[2]
    needs_tril = causal and length > 1
    is_causal = needs_tril and length == keys and key_mask is None and bias is None and values is None
    visible: Tensor | None = None
    if key_mask is not None:
        visible = key_mask[:, None, None, :]
    if needs_tril and not is_causal:
        tril = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
        visible = tril if visible is None else visible & tril
    # A row without keys would be 0/0. It is given all of them here, and its output is set to zero below, so that
    # its gradients are zeros and not NaN.
    blind = None if visible is None or key_mask is None else ~visible.any(-1, keepdim=True)
    mask = visible if blind is None or visible is None else visible | blind
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    if values is None:
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    else:
        weights = _weights(q, k, mask, scale)
        out = _per_query_head(weights, v) + values(weights)
    return out if blind is None else out.masked_fill(blind, 0)


def faded(
    run: Callable[..., Tensor],
    xpos: XPos,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """Causal attention with xPos's decay of rotated q and k, a stretch of queries at a time.

    ζ^((m − n)/b) is ζ^((m − o)/b) · ζ^((o − n)/b) for every origin o. With o in the middle of a stretch the first
    factor is near 1, and the second one is too for its own keys and vanishes for far ones, as the product does.
    """
    outs, past = [], k.shape[2] - q.shape[2]
    for start in range(0, max(q.shape[2], 1), xpos.stretch):
        rows = slice(start, min(start + xpos.stretch, q.shape[2]))
        keys = past + rows.stop
        origin = past + (rows.start + rows.stop) // 2
        places = torch.arange(keys, device=q.device)
        outs.append(
            run(
                q[:, :, rows] * xpos.decay(places[past + rows.start :] - origin, dtype=q.dtype),
                k[:, :, :keys] * xpos.decay(origin - places, dtype=k.dtype),
                v[:, :, :keys],
                bias=None if bias is None else bias[:, :, rows, :keys],
                key_mask=None if key_mask is None else key_mask[:, :keys],
            )
        )
    return torch.cat(outs, dim=2)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + mask), (B, H, N, J), accumulated in float32 at least, in q's dtype."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # (B, H_k, H/H_k, N, D)
    scores = (grouped * scale @ k[:, :, None].mT).flatten(1, 2)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    wide = torch.promote_types(q.dtype, torch.float32)
    weights: Tensor = scores.softmax(-1, dtype=wide).to(q.dtype)
    return weights


def _per_query_head(weights: Tensor, v: Tensor) -> Tensor:
    """Σ_n w_mn v_n, (B, H, N, M)."""
    out: Tensor = (weights.unflatten(1, (v.shape[1], -1)) @ v[:, :, None]).flatten(1, 2)
    return out
