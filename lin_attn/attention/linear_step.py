"""A token through linear attention, projections and all, in one call of the CPU kernel.

The same as MultiHeadAttention.forward in a tenth of the Python, for which a step of decoding waits longer than for the
numbers. Whatever is out of the ordinary goes the long way, which also says what is wrong with it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lin_attn.eager import is_bare
from lin_attn.feature_maps import is_registered
from lin_attn.kernels import cpu
from lin_attn.ops import LinearState
from lin_attn.ops.linear_attention import EPS
from lin_attn.ops.linear_reference import least
from lin_attn.positions import Rotary
from lin_attn.projection import is_layer, plain_layers, takes

if TYPE_CHECKING:
    from lin_attn.attention.linear import LinearAttention


def step(attention: "LinearAttention", x: Tensor, state: LinearState) -> tuple[Tensor, LinearState] | None:
    """The output (B, 1, E) and the state after x, or None if it is not for the kernel to compute it."""
    layers = plain_layers((attention.query, attention.key, attention.value, attention.output))
    if layers is None or not takes(x, layers[:3]) or x.dim() != 3 or x.shape[1] != 1:
        return None
    phi, rotary, dim = attention.feature_map, attention.rotary, attention.head_dim
    if not (
        is_registered(phi)
        and phi.name in cpu.FEATURE_MAPS
        and dim <= cpu.MAX_DIM
        and (rotary is None or (type(rotary) is Rotary and rotary.head_dim == dim))
        and attention.causal
        and attention.output_norm is None
        and attention.rope in ("after", "before", "none")
        and attention.backend in ("auto", "cpu")
        and attention.n_heads % attention.n_kv_heads == 0
        and "mix" not in attention.__dict__
        and _fits(layers, attention.n_heads * dim, attention.n_kv_heads * dim, x.dtype)
        and isinstance(state, LinearState)
        and _is_state(state, (x.shape[0], attention.n_kv_heads, dim))
    ):
        return None
    kv, k_sum, length = state
    cos: Tensor | None = None
    sin: Tensor | None = None
    if rotary is not None:
        cos, sin = rotary.tables(1, length, device=x.device, dtype=torch.float32)
    rope = "after" if attention.rope == "none" else attention.rope  # as in LinearAttention.mix
    out, kv, k_sum = cpu.attend(x, layers, kv, k_sum, cos, sin, phi.name, rope, attention.normalize, least(kv, EPS))
    return out, LinearState(kv, k_sum, length + 1)


def _fits(layers: list[cpu.Layer], width: int, kv_width: int, dtype: torch.dtype) -> bool:
    """Whether weights have the shapes of their module's sizes, and the output's are such as `takes` asks for."""
    (query, _), (key, _), (value, _), (output, bias) = layers
    if not is_layer(layers[3]):
        return False
    if (query.shape[0], key.shape[0], value.shape[0], output.shape[1]) != (width, kv_width, kv_width, width):
        return False
    for parameter in (output,) if bias is None else (output, bias):
        if not (is_bare(parameter) and parameter.dtype == dtype and parameter.is_contiguous()):
            return False
        if parameter.requires_grad and torch.is_grad_enabled():
            return False
    return True


def _is_state(state: LinearState, shape: tuple[int, int, int]) -> bool:
    """Whether S is (B, K, D, D) and z (B, K, D), float32, dense, and nothing that autograd is to know of."""
    kv, k_sum, _ = state
    return (
        is_bare(kv, k_sum)
        and kv.shape == (*shape, shape[2])
        and k_sum.shape == shape
        and kv.dtype == k_sum.dtype == torch.float32
        and kv.is_contiguous()
        and k_sum.is_contiguous()
        and not (torch.is_grad_enabled() and (kv.requires_grad or k_sum.requires_grad))
    )
