"""Cross-entropy of a head's logits, in pieces, so that the logits of a long batch never stand in memory at once.

    loss = Σ_t −log softmax(hidden_t Wᵀ)[target_t]      over the targets that are not IGNORED

The gradient is known as soon as a piece's softmax is, so it is formed on the way forward: one pass over the logits, and
memory O(CHUNK · V) beside the gradients themselves.

Letters: T tokens, E model dim, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lin_attn.data.blocks import IGNORED

CHUNK = 2048  # tokens whose logits are in memory at once


def token_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """−log p of each target, without gradient.

    Args:
        hidden: (T, E).
        weight: of the head, (V, E).
        targets: (T,) int64, IGNORED where there is none.

    Returns:
        (T,) float32 in nats, 0 where there is no target.
    """
    with torch.no_grad():
        pieces = [
            F.nll_loss(logprobs, y, ignore_index=IGNORED, reduction="none")
            for _, _, y, logprobs in _pieces(hidden, weight, targets)
        ]
    return torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.float32)


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of `token_nll`, differentiable in hidden and weight: a scalar, float64 where the device has that."""
    total: Tensor = _CrossEntropySum.apply(hidden, weight, targets)
    return total


def exact_dtype(device: torch.device) -> torch.dtype:
    """For sums over many tokens: float64, which only Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


def _pieces(hidden: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, their hidden states, targets and log-probabilities: products in hidden's dtype, softmax in float32."""
    for start in range(0, hidden.shape[0], CHUNK):
        rows = slice(start, start + CHUNK)
        yield rows, hidden[rows], targets[rows], F.linear(hidden[rows], weight).float().log_softmax(-1)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        device = hidden.device.type
        if torch.is_autocast_enabled(device):  # once, not a piece at a time
            hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
        wants_grad = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_grad else None
        total = hidden.new_zeros((), dtype=exact_dtype(hidden.device))
        with torch.autocast(device, enabled=False):
            for rows, x, y, logprobs in _pieces(hidden, weight, targets):
                total += F.nll_loss(logprobs, y, ignore_index=IGNORED, reduction="none").to(total.dtype).sum()
                if grad_hidden is not None and grad_weight is not None:
                    # ∂ = softmax − onehot(target), in the memory of the log-probabilities
                    real = (y != IGNORED).float()[:, None]
                    grad = logprobs.exp_().mul_(real).scatter_add_(1, y.clamp(min=0)[:, None], -real).to(x.dtype)
                    grad_hidden[rows] = grad @ weight
                    grad_weight += grad.mT @ x
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0].float()
        return *((grad * scale).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)), None
