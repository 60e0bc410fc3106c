"""Cross-entropy of a head's logits, in pieces, so that the logits of a long batch never stand in memory at once.

    logits_t = hidden_t Wᵀ + b
    loss = Σ_t −log softmax(logits_t)[target_t]      over the targets that are not IGNORED

With label smoothing ε (Szegedy et al. 2016, arXiv 1512.00567, §7) a target is worth 1 − ε and every token ε/V of its
own. The gradient is known as soon as a piece's softmax is, so it is formed on the way forward: one pass over the
logits, and memory O(CHUNK · V) beside the gradients themselves.

Letters: T tokens, E model dim, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lin_attn.data.blocks import IGNORED

CHUNK = 2048  # tokens whose logits are in memory at once


def token_nll(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """−log p of each target, without gradient.

    Args:
        hidden: (T, E).
        weight: of the head, (V, E).
        targets: (T,) int64, IGNORED where there is none.
        bias: of the head, (V,).

    Returns:
        (T,) float32 in nats, 0 where there is no target.
    """
    return token_scores(hidden, weight, targets, bias)[0]


def token_scores(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`token_nll`, and whether each target is the likeliest token, (T,) bool, False where there is no target."""
    nll, hits = [hidden.new_zeros(0, dtype=torch.float32)], [targets.new_zeros(0, dtype=torch.bool)]
    with torch.no_grad():
        for _, _, y, logprobs in _pieces(hidden, weight, bias, targets):
            nll.append(F.nll_loss(logprobs, y, ignore_index=IGNORED, reduction="none"))
            hits.append(logprobs.argmax(-1) == y)
    return torch.cat(nll), torch.cat(hits)


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """The sum of `token_nll`, smoothed: a scalar, float64 if the device has that, differentiable but in targets."""
    total: Tensor = _CrossEntropySum.apply(hidden, weight, bias, targets, label_smoothing)
    return total


def exact_dtype(device: torch.device) -> torch.dtype:
    """For sums over many tokens: float64, which only Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


def _pieces(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, their hidden states, targets and log-probabilities: products in hidden's dtype, softmax in float32."""
    for start in range(0, hidden.shape[0], CHUNK):
        rows = slice(start, start + CHUNK)
        yield rows, hidden[rows], targets[rows], F.linear(hidden[rows], weight, bias).float().log_softmax(-1)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float
    ) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        device = hidden.device.type
        if torch.is_autocast_enabled(device):  # once, not a piece at a time
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        wants_grad = any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_grad else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_grad and bias is not None else None
        total = hidden.new_zeros((), dtype=exact_dtype(hidden.device))
        with torch.autocast(device, enabled=False):
            for rows, x, y, logprobs in _pieces(hidden, weight, bias, targets):
                nll = F.nll_loss(logprobs, y, ignore_index=IGNORED, reduction="none").to(total.dtype)
                if smoothing:
                    nll = (1 - smoothing) * nll - smoothing * logprobs.mean(-1) * (y != IGNORED)
                total += nll.sum()
                if grad_hidden is not None and grad_weight is not None:
                    # ∂ = softmax − (1 − ε) onehot(target) − ε/V, in the memory of the log-probabilities
                    real = (y != IGNORED).float()[:, None]
                    grad = logprobs.exp_()
                    if smoothing:
                        grad -= smoothing / grad.shape[-1]
                    grad = grad.mul_(real).scatter_add_(1, y.clamp(min=0)[:, None], -(1 - smoothing) * real)
                    if grad_bias is not None:
                        grad_bias += grad.sum(0)
                    grad = grad.to(x.dtype)
                    grad_hidden[rows] = grad @ weight
                    grad_weight += grad.mT @ x
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0].float()
        return *(
            None if grad is None else (grad * scale).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ), None, None  # fmt: skip
