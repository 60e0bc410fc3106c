"""Linear attention by the fused CPU kernel, as an operator that torch knows.

The mathematics and what is kept for backward are those of `linear_chunked`; `lin_attn.kernels.cpu` computes it. The op
is opaque to torch.compile and torch.export.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lin_attn.eager import is_bare
from lin_attn.feature_maps import FeatureMap
from lin_attn.kernels import cpu
from lin_attn.kernels.cpu.calls import empty_rows
from lin_attn.ops.linear_chunked import differentiate, gradients, save
from lin_attn.ops.linear_reference import Rotation, Sums, least


def reason_against(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], feature_map: str) -> str | None:
    """None if the kernel can compute attention of such inputs, with dims D and M; else why it cannot."""
    if device.type != "cpu":
        return f"the tensors are on {device}, not on the CPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the tensors are {dtype}, not float32 or bfloat16"
    if feature_map not in cpu.FEATURE_MAPS:
        return f"the feature map is {feature_map!r}, not one of {', '.join(cpu.FEATURE_MAPS)}"
    if not (min(dims) >= 1 and max(dims) <= cpu.MAX_DIM):
        return f"head dims are {dims[0]} and {dims[1]}, not from 1 to {cpu.MAX_DIM}"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no forward-mode derivative"
    reason: str | None = unusable()
    return reason


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def unusable() -> str | None:
    """None if the kernel is built, or can be; else why not. Builds it."""
    return cpu.unusable()


def fused(
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
    """Arguments and results as in `linear_chunked.chunked`; `reason_against` says which it takes."""
    cos, sin = rotation if rotation is not None else (None, None)
    arguments = (q, k, v, key_mask, *sums, cos, sin, phi.name, rope, normalize, causal, least(sums[0], eps))
    if not is_bare(q, k, v, *sums):
        out, _, kv, k_sum = _forward(*arguments)
    # The dispatcher takes longer than a step, or 256 tokens of a head.
    elif wants_grad(q, k, v, *sums):
        out, kv, k_sum = _Differentiable.apply(*arguments)
    else:
        out, _, kv, k_sum = cpu.forward(*arguments)
    return out, kv, k_sum


def wants_grad(*tensors: Tensor) -> bool:
    """Whether autograd is to know what is made of them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class _Differentiable(torch.autograd.Function):
    """The same as the operator, for autograd alone."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        results = cpu.forward(*arguments)
        save(ctx, arguments, results)
        ctx.set_materialize_grads(False)
        out, _, kv, k_sum = results
        ctx.out = out.shape, out.dtype
        return out, kv, k_sum

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_kv: Tensor | None, grad_k_sum: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None:
            shape, dtype = ctx.out
            grad_out = torch.zeros((), dtype=dtype, device="cpu").expand(shape)
        return gradients(ctx, _either_backward, grad_out, grad_kv, grad_k_sum)


def _either_backward(*arguments: Any) -> Any:
    # The operator knows that it has no derivative, should one be asked for.
    bare = not torch.is_grad_enabled() and is_bare(*(x for x in arguments if isinstance(x, Tensor)))
    return (cpu.backward if bare else _backward)(*arguments)


_forward = torch.library.custom_op("lin_attn::linear_cpu", cpu.forward, mutates_args=(), device_types="cpu")
_backward = torch.library.custom_op("lin_attn::linear_cpu_backward", cpu.backward, mutates_args=(), device_types="cpu")


@_forward.register_fake
def _(q, k, v, key_mask, kv, k_sum, cos, sin, feature_map, rope, normalize, causal, eps):  # type: ignore[no-untyped-def]
    denominators = kv.new_empty(q.shape[:3] if normalize else (0,))
    return empty_rows(q, v.shape[3]), denominators, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


@_backward.register_fake
def _(grad_out, grad_kv, grad_k_sum, q, k, v, key_mask, kv, k_sum, *_):  # type: ignore[no-untyped-def]
    return *(empty_rows(x, x.shape[3]) for x in (q, k, v)), kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


differentiate(_forward, _backward)


# Operations of matrix products, two for each multiplication and its addition, as if the half of a chunk's scores that
# causality leaves out were computed.


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool) -> int:
    """For q (B, H, N, D), k (B, K, N_k, D) and v (B, K, N_k, M): scores and what they weigh, q̃ S, and S itself."""
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q, v
    scores = heads * _squares(queries) * (dim + value_dim) if causal else 0
    return 2 * batch * (scores + (heads * queries + kv_heads * keys) * dim * value_dim)


def backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool) -> int:
    """g vᵀ twice, q̃ k̃ᵀ, and what they weigh; g Sᵀ and dS by queries; S again, v dSᵀ and k̃ dS by keys."""
    (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q, v
    scores = heads * _squares(queries) * 3 * (dim + value_dim) if causal else 0
    return 2 * batch * (scores + (2 * heads * queries + 3 * kv_heads * keys) * dim * value_dim)


def _squares(length: int) -> int:
    """The sum of C² over the chunks."""
    return length // cpu.CHUNK * cpu.CHUNK**2 + (length % cpu.CHUNK) ** 2


@register_flop_formula(torch.ops.lin_attn.linear_cpu)
def _(q, k, v, key_mask, kv, k_sum, cos, sin, feature_map, rope, normalize, causal, *_, **__):  # type: ignore[no-untyped-def]
    return forward_flops(q, k, v, causal)


@register_flop_formula(torch.ops.lin_attn.linear_cpu_backward)
def _(grad_out, grad_kv, grad_k_sum, q, k, v, *rest, **__):  # type: ignore[no-untyped-def]
    return backward_flops(q, k, v, rest[9])
