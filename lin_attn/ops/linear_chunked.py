"""Linear attention in chunks: O(N) time, and nothing kept for backward but the inputs and one number a row.

Within a chunk the weights are formed, as in the quadratic form; what came before the chunk enters through the running
sums S and z. With A = tril(q̃ k̃ᵀ) for the chunk's rotated features q̃ and k̃, plain features q̂ and k̂:

    out = (A v + q̃ S) / d,   d = q̂ ⊙ (z + cumsum k̂) summed over D,   then S ← S + k̃ᵀ v,  z ← z + Σ k̂

Backward recomputes φ, R and S from q, k and v, scanning forward once for the gradient of q and backward once for those
of k and v, with dS and dz the running sums from the right. With g = ∂out / d and Q = tril(g vᵀ):

    ∂q̃ = Q k̃ + g Sᵀ           ∂d = −(out · ∂out) / d = −(q̃ · ∂q̃) / d     so that the output need not be kept
    ∂k̃ = Qᵀ q̃ + v dSᵀ         ∂v = Aᵀ g + k̃ dS
    ∂q̂ = ∂d (z + cumsum k̂)    ∂k̂ = dz + reverse cumsum (∂d q̂)

The op is opaque to torch.compile and torch.export (registered with torch.library): the loop over chunks is neither
unrolled nor specialised to a length.

Letters: B batch, K heads of k and v, G = H/K queries' heads for each, P = B·K, N length, C chunk, D, M head dims.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lin_attn.feature_maps import FeatureMap
from lin_attn.ops.chunks import ChunkedInputs
from lin_attn.ops.linear_reference import Rotation, Sums, floored, least


def chunked(
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
    """Arguments and results as in `linear_reference.quadratic`, except that q, k, v may be of any floating dtype.

    The output has their dtype; sums are float32 (float64 for float64).
    """
    if torch.autograd.forward_ad._current_level >= 0:  # torch.library would drop the tangents without a word
        raise ValueError("backend 'chunked' has no forward-mode derivative; wanted backend='reference' for that")
    cos, sin = rotation if rotation is not None else (None, None)
    out, _, kv, k_sum = _forward(q, k, v, key_mask, *sums, cos, sin, phi.name, rope, normalize, causal, eps)
    return out, kv, k_sum


def _prefixes(
    inputs: ChunkedInputs, kv: Tensor, k_sum: Tensor, causal: bool
) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor] | None, Tensor]]:
    """Scans the keys into S (P, D, M) and z (P, D), in place, pausing at each chunk of queries.

    Yields the chunk, its own keys and values if causal (else None), and z as each row sees it, (P, C or 1, D). At that
    moment S holds what came before the chunk (all keys if not causal); at the end both hold everything.
    """

    def add(k_num: Tensor, k_den: Tensor, values: Tensor) -> None:
        kv.baddbmm_(k_num.mT, values)
        k_sum.add_(k_den.sum(1))

    if not causal:
        for chunk in inputs.chunks(inputs.k.shape[2]):
            add(*inputs.keys(chunk))
    for chunk in inputs.chunks(inputs.q.shape[3]):
        keys = inputs.keys(chunk) if causal else None
        seen = k_sum[:, None]
        yield chunk, keys, seen if keys is None else seen + keys[1].cumsum(1)
        if keys is not None:
            add(*keys)


def _copy(sums: Tensor) -> Tensor:
    """(B, K, …) → (P, …), to be added to, and dense whatever the layout of the original: what the fake op promises."""
    return sums.flatten(0, 1).clone(memory_format=torch.contiguous_format)


def _fold(x: Tensor) -> Tensor:
    """(P, G, C, …) → (P, G·C, …): all queries that share keys, as rows of one matrix."""
    return x.flatten(1, 2)


def _causal_scores(rows: Tensor, columns: Tensor) -> Tensor:
    """rows (P, G, C, X) against columns (P, C, X): (P, G·C, C), zero where the column comes after the row."""
    scores = torch.bmm(_fold(rows), columns.mT).unflatten(1, rows.shape[1:3])
    return _fold(scores.tril_())


@torch.library.custom_op("lin_attn::linear_chunked", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    k_sum: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    feature_map: str,
    rope: str,
    normalize: bool,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (B, H, N, M), denominators d (B, H, N) with their floor (empty if not normalize), and the new S and z."""
    inputs = ChunkedInputs(q, k, v, key_mask, cos, sin, feature_map, rope)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    denominators = kv.new_empty(q.shape[:3] if normalize else (0,))
    kv, k_sum = _copy(kv), _copy(k_sum)
    for chunk, keys, seen in _prefixes(inputs, kv, k_sum, causal):
        q_num, q_den = inputs.queries(chunk)
        rows = torch.bmm(_fold(q_num), kv)
        if keys is not None:
            rows.baddbmm_(_causal_scores(q_num, keys[0]), keys[2])
        if normalize:
            d = floored((q_den * seen[:, None]).sum(-1), eps)
            rows /= _fold(d)[..., None]
            denominators[:, :, chunk] = d.view_as(denominators[:, :, chunk])
        out[:, :, chunk] = rows.view_as(out[:, :, chunk])
    return out, denominators, kv.unflatten(0, k.shape[:2]), k_sum.unflatten(0, k.shape[:2])


@torch.library.custom_op("lin_attn::linear_chunked_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_kv: Tensor,
    grad_k_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    kv: Tensor,
    k_sum: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    denominators: Tensor,
    feature_map: str,
    rope: str,
    normalize: bool,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the incoming S and z."""
    inputs = ChunkedInputs(q, k, v, key_mask, cos, sin, feature_map, rope)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    grad_d = torch.empty_like(denominators)
    kv, k_sum = _copy(kv), _copy(k_sum)
    grad_kv, grad_k_sum = _copy(grad_kv), _copy(grad_k_sum)

    def rows_of(x: Tensor, chunk: slice) -> Tensor:
        """A chunk of x (B, H, N, …) as (P, G, C, …), wide."""
        rows: Tensor = x[:, :, chunk].to(inputs.wide).unflatten(1, (k.shape[1], -1))
        return rows.flatten(0, 1)

    def numerator_grad(chunk: slice) -> Tensor:
        """g = ∂out / d, (P, G, C, M)."""
        grad = rows_of(grad_out, chunk)
        return grad / rows_of(denominators, chunk)[..., None] if normalize else grad

    def add(q_num: Tensor, q_den: Tensor, grad: Tensor, slope: Tensor | None) -> None:
        """Adds a chunk of queries to dS and dz."""
        grad_kv.baddbmm_(_fold(q_num).mT, _fold(grad))
        if slope is not None:
            grad_k_sum.add_((slope[..., None] * q_den).sum((1, 2)))

    for chunk, keys, seen in _prefixes(inputs, kv, k_sum, causal):
        q_num, q_den = inputs.queries(chunk)
        grad = numerator_grad(chunk)
        grad_num = torch.bmm(_fold(grad), kv.mT)
        if keys is not None:
            grad_num.baddbmm_(_causal_scores(grad, keys[2]), keys[0])
        grad_num = grad_num.view_as(q_num)
        slope = grad_den = None
        if normalize:
            d = rows_of(denominators, chunk)
            slope = -(q_num * grad_num).sum(-1) / d
            slope = slope.masked_fill(d.abs() <= least(d, eps), 0)  # a floor is constant
            grad_d[:, :, chunk] = slope.view_as(grad_d[:, :, chunk])
            grad_den = slope[..., None] * seen[:, None]
        grad_q[:, :, chunk] = inputs.queries_vjp(chunk, grad_num, grad_den).view_as(grad_q[:, :, chunk])
        if not causal:
            add(q_num, q_den, grad, slope)

    for chunk in reversed(inputs.chunks(k.shape[2])):
        k_num, _, values = inputs.keys(chunk)
        grad_num, grad_values = torch.bmm(values, grad_kv.mT), torch.bmm(k_num, grad_kv)
        grad_den = grad_k_sum[:, None].expand_as(k_num)
        if causal:
            q_num, q_den = inputs.queries(chunk)
            grad = numerator_grad(chunk)
            grad_num.baddbmm_(_causal_scores(grad, values).mT, _fold(q_num))
            grad_values.baddbmm_(_causal_scores(q_num, k_num).mT, _fold(grad))
            slope = rows_of(grad_d, chunk) if normalize else None
            if slope is not None:
                grad_den = grad_den + (slope[..., None] * q_den).sum(1).flip(1).cumsum(1).flip(1)
            add(q_num, q_den, grad, slope)
        grad_k[:, :, chunk] = inputs.keys_vjp(chunk, grad_num, grad_den).view_as(grad_k[:, :, chunk])
        grad_v[:, :, chunk] = grad_values.view_as(grad_v[:, :, chunk])
    return grad_q, grad_k, grad_v, grad_kv.unflatten(0, k.shape[:2]), grad_k_sum.unflatten(0, k.shape[:2])


@_forward.register_fake
def _(q, k, v, key_mask, kv, k_sum, cos, sin, feature_map, rope, normalize, causal, eps):  # type: ignore[no-untyped-def]
    denominators = kv.new_empty(q.shape[:3] if normalize else (0,))
    return q.new_empty(*q.shape[:3], v.shape[3]), denominators, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


@_backward.register_fake
def _(grad_out, grad_kv, grad_k_sum, q, k, v, key_mask, kv, k_sum, *_):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v, kv, k_sum))


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Keeps for `gradients` what they need of the arguments and results of the forward operator."""
    ctx.options = inputs[8:]
    ctx.save_for_backward(*inputs[:8], output[1])


def gradients(
    ctx: Any, backward: Any, grad_out: Tensor, grad_kv: Tensor | None, grad_k_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the forward operator's arguments, by the backward operator."""
    grad_q, grad_k, grad_v, grad_kv, grad_k_sum = backward(
        grad_out, grad_kv, grad_k_sum, *ctx.saved_tensors, *ctx.options
    )
    return grad_q, grad_k, grad_v, None, grad_kv, grad_k_sum, None, None, *[None] * len(ctx.options)


def differentiate(forward: Any, backward: Any) -> None:
    """Makes one operator the derivative of another; their arguments and results are those of the two above."""

    def grad(ctx: Any, grad_out: Tensor, _: Tensor, grad_kv: Tensor, grad_k_sum: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_out.device.type, enabled=False):
            return gradients(ctx, backward, grad_out, grad_kv, grad_k_sum)

    forward.register_autograd(grad, setup_context=save)


differentiate(_forward, _backward)
