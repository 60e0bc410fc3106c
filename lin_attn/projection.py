"""x Wᵀ + b by the CPU kernel where there are a few tokens and nothing for torch to see or keep, else by nn.Linear.

A step of decoding projects one token of each sequence, and what torch calls is made for larger products.
LIN_ATTN_BACKEND=chunked leaves all to torch.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from lin_attn.eager import is_bare
from lin_attn.kernels import cpu
from lin_attn.ops.backends import check_backend

# Up to so many tokens the kernel is faster than torch's product of matrices (benchmarks/projection.py).
FEW = {torch.float32: 4, torch.bfloat16: 1}

_FORWARD = nn.Linear.forward


def project(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """x (…, in_features) through each of the layers, as if they were called one by one; by the kernel in one call.

    Its sums are float32. Layers that are not nn.Linear itself, or that have hooks, are called in any case.
    """
    by_kernel = _by_kernel(x, layers)
    return [layer(x) for layer in layers] if by_kernel is None else by_kernel


def project_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """gelu(layer(x)), y Φ(y) with the normal distribution's Φ, likewise in one call."""
    by_kernel = _by_kernel(x, (layer,), gelu=True)
    return F.gelu(layer(x)) if by_kernel is None else by_kernel[0]


def _by_kernel(x: Tensor, layers: Sequence[nn.Module], *, gelu: bool = False) -> list[Tensor] | None:
    """The projections, or None if it is not for the kernel to make them."""
    plain = plain_layers(layers)
    return cpu.project(x, plain, gelu=gelu) if plain is not None and takes(x, plain) else None


def plain_layers(layers: Sequence[nn.Module]) -> list[cpu.Layer] | None:
    """Each layer's weights and bias, or None if a call of one would do more than torch's Linear does."""
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks or nn.Linear.forward is not _FORWARD:
        return None
    found: list[cpu.Layer] = []
    for layer in layers:
        if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        parameters = layer._parameters  # as attributes, they would take longer to look up than all else here
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters or layer._compiled_call_impl or "forward" in layer.__dict__:
            return None
        found.append((weight, parameters["bias"]))
    return found


def takes(x: Tensor, layers: Sequence[cpu.Layer]) -> bool:
    """Whether the kernel is to project x: it can, it is faster, and there is nothing for torch to see or keep."""
    # Loops, as a generator takes longer to set up than its tests take, and a step of decoding waits for all of this.
    tensors = [parameter for layer in layers for parameter in layer if parameter is not None]
    if not is_bare(x, *tensors):  # asked first: a tracer would bind the model to the size that it is asked for
        return False
    dtype, grad = x.dtype, torch.is_grad_enabled()
    if not x.dim() or not 0 < x.numel() <= FEW.get(dtype, 0) * x.shape[-1] or not x.is_contiguous():
        return False
    for parameter in tensors:
        if parameter.dtype != dtype or not parameter.is_contiguous() or (grad and parameter.requires_grad):
            return False
    for layer in layers:
        if not is_layer(layer) or layer[0].shape[1] != x.shape[-1]:
            return False
    return (
        not (grad and x.requires_grad)
        and not torch.is_autocast_enabled("cpu")
        and torch.autograd.forward_ad._current_level < 0
        and check_backend("auto") in ("auto", "cpu")
        and cpu.usable()
    )


def is_layer(layer: cpu.Layer) -> bool:
    """Whether the weights are a matrix (F, E), not empty, and the bias, if any, (F,)."""
    weight, bias = layer
    if weight.dim() != 2 or weight.numel() == 0:
        return False
    return bias is None or (bias.dim() == 1 and len(bias) == len(weight))
