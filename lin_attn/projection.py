"""nn.Linear, faster where a step of decoding on the CPU takes one token, or a few."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        if takes(x, self.weight, self.bias):
            return cpu.project(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel is to project x: it can, it is faster, and there is nothing for torch to see or keep."""
    parameters = (weight,) if bias is None else (weight, bias)
    if not is_bare(x, *parameters):  # asked first: a tracer would bind the model to the size that it is asked for
        return False
    inputs = weight.shape[1]
    return (
        0 < x.numel() <= FEW.get(x.dtype, 0) * inputs
        and x.shape[-1] == inputs
        and all(p.dtype == x.dtype and p.is_contiguous() for p in parameters)
        and x.is_contiguous()
        and not (torch.is_grad_enabled() and any(p.requires_grad for p in (x, *parameters)))
        and not torch.is_autocast_enabled("cpu")
        and torch.autograd.forward_ad._current_level < 0
        and check_backend("auto") in ("auto", "cpu")
        and cpu.unusable() is None
    )
