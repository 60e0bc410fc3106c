"""nn.Linear, faster where a step of decoding on the CPU takes one token, or a few."""

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


class Projection(nn.Linear):
    """y = x Wᵀ + b, (…, in_features) → (…, out_features); arguments, weights and results are nn.Linear's.

    Up to `FEW` tokens are projected by the CPU kernel, with float32 sums, where autograd keeps nothing of it: what
    torch calls is made for larger products. LIN_ATTN_BACKEND=chunked leaves all to torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        layer = self.weight, self.bias
        if takes(x, (layer,)):
            return cpu.project(x, (layer,))[0]
        return F.linear(x, *layer)


def project(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """x through each of the layers, as if they were called one by one; in one call where the kernel takes it."""
    by_kernel = _by_kernel(x, layers)
    return [layer(x) for layer in layers] if by_kernel is None else by_kernel


def project_gelu(x: Tensor, layer: nn.Module) -> Tensor:
    """gelu(layer(x)), y Φ(y) with the normal distribution's Φ; in one call where the kernel takes it."""
    by_kernel = _by_kernel(x, (layer,), gelu=True)
    return F.gelu(layer(x)) if by_kernel is None else by_kernel[0]


def _by_kernel(x: Tensor, layers: Sequence[nn.Module], *, gelu: bool = False) -> list[Tensor] | None:
    """The projections, or None if it is not for the kernel to make them."""
    plain = plain_layers(layers)
    return cpu.project(x, plain, gelu=gelu) if plain is not None and takes(x, plain) else None


def plain_layers(layers: Sequence[nn.Module]) -> list[cpu.Layer] | None:
    """Each layer's weights and bias, or None if a call of one would do more than Projection.forward."""
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return None
    found: list[cpu.Layer] = []
    for layer in layers:
        if type(layer) is not Projection or layer._forward_hooks or layer._forward_pre_hooks:
            return None
        parameters = layer._parameters  # as attributes, they would take longer to look up than all else here
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters or "forward" in layer.__dict__:
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
    for weight, bias in layers:
        if weight.shape[1] != x.shape[-1] or (bias is not None and bias.numel() != weight.shape[0]):
            return False
    return (
        not (grad and x.requires_grad)
        and not torch.is_autocast_enabled("cpu")
        and torch.autograd.forward_ad._current_level < 0
        and check_backend("auto") in ("auto", "cpu")
        and cpu.unusable() is None
    )
