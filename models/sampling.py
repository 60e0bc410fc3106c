"""Choosing the next token from logits: penalty on repetition, then greedy, temperature, top-k and nucleus (top-p).

The penalty θ of CTRL (Keskar et al. 2019, arXiv 1909.05858, §4.1) is on tokens that came before. Their logits x become
x/θ where x > 0, and x·θ elsewhere, so that it lowers them whatever their sign.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Generators = torch.Generator | Sequence[torch.Generator] | None


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, repetition_penalty: float = 1.0) -> None:
    """Raises ValueError for an argument out of range, or one that greedy choice would ignore."""
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; wanted a number ≥ 0, 0 for the likeliest token")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; wanted at least 1, or None for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; wanted a number in (0, 1], or None for all tokens")
    if temperature == 0 and not (top_k is None and top_p is None):
        raise ValueError("top_k or top_p is given with temperature 0, which takes the likeliest token; wanted one kind")
    if not 0 < repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty is {repetition_penalty}; wanted a positive number, 1 for none")


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits (B, V) with the penalty on the tokens that are seen, (B, V) bool."""
    found = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    greatest = torch.finfo(found.dtype).max  # an extreme penalty gives extreme logits, not infinite ones
    return found.clamp(-greatest, greatest)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: Generators = None,
) -> Tensor:
    """Draws a token a row.

    Args:
        logits: (B, V).
        temperature: divides the logits; 0 takes the greatest.
        top_k: only the k likeliest tokens.
        top_p: only the likeliest tokens that together reach this probability (Holtzman et al. 2020, arXiv 1904.09751).
        generator: of the random numbers, on the logits' device: one for all rows, or one a row.

    Returns:
        (B,) int64.

    Raises:
        ValueError: for an argument out of range.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    # From the greatest down, so that however low the temperature the likeliest token stays at 0, and nothing overflows.
    logits = (logits.float() - logits.float().amax(-1, keepdim=True)) / max(
        temperature, torch.finfo(torch.float32).tiny
    )
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the token that crosses top_p still belongs
        outside = (before >= top_p).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, float("-inf"))
    probabilities = logits.softmax(-1)
    if generator is None or isinstance(generator, torch.Generator):
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    if len(generator) != len(logits):
        raise ValueError(f"generator has {len(generator)} entries; wanted one a row, {len(logits)}")
    if not generator:
        return logits.new_empty(0, dtype=torch.int64)
    rows = zip(probabilities.split(1), generator, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=own)[:, 0] for row, own in rows])
