"""Losses and the figures made of them, exact over any number of tokens, batches and processes.

Each sums a loss in float64 and counts in int64; all figures come from the sums, and are NaN where nothing was added.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import Metric

from models.loss import exact_dtype


class _Sums(Metric):
    """A sum of losses, and of how many."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, *others: str) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("count", *others):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, total: Tensor, count: Tensor | int) -> None:
        self.total += total.to(exact_dtype(total.device))
        self.count += count


class MeanLoss(_Sums):
    """The mean of a loss over examples: a float64 scalar.

    Args:
        losses: outputs (B, …) and labels (B,) → the loss of each example, (B,).
    """

    def __init__(self, losses: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.losses = losses

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Adds a batch of examples."""
        losses = self.losses(outputs, labels)
        self._add(losses.to(exact_dtype(losses.device)).sum(), losses.numel())

    def compute(self) -> Tensor:
        """The figure of all that was added."""
        return self.total / self.count


class AccuracyMetric(_Sums):
    """Loss and accuracy over examples.

    `compute` gives a dict of float64 scalars: loss, and accuracy, the share of examples that were hit.
    """

    hits: Tensor

    def __init__(self) -> None:
        super().__init__("hits")

    def update(self, total: Tensor, count: Tensor | int, hits: Tensor | int) -> None:
        """Adds a sum of losses over so many examples, so many of which were hit."""
        self._add(total, count)
        self.hits += hits

    def compute(self) -> dict[str, Tensor]:
        """The figures of all that was added."""
        return {"loss": self.total / self.count, "accuracy": self.hits.to(self.total.dtype) / self.count}


class TokenMetric(AccuracyMetric):
    """Loss and accuracy over the tokens that were to be predicted, whatever the batches.

    `compute` gives a dict of float64 scalars:
        loss: nats per target; perplexity: exp(loss); accuracy: the share of targets that are the likeliest token.
    """

    def compute(self) -> dict[str, Tensor]:
        """The figures of all that was added."""
        figures = super().compute()
        return figures | {"perplexity": figures["loss"].exp()}


class LanguageModelMetric(_Sums):
    """Loss, perplexity and bits per byte of a language model.

    `compute` gives a dict of float64 scalars:
        loss: nats per token; perplexity: exp(loss); bits_per_byte: total bits over the bytes that the tokens stand for,
        which compares models of different tokenizers.
    """

    n_bytes: Tensor

    def __init__(self) -> None:
        super().__init__("n_bytes")

    def update(self, nll: Tensor, tokens: Tensor | int, n_bytes: Tensor | int) -> None:
        """Adds a sum of negative log-likelihoods in nats, over so many tokens that stand for so many bytes."""
        self._add(nll, tokens)
        self.n_bytes += n_bytes

    def compute(self) -> dict[str, Tensor]:
        """The figures of all that was added."""
        loss = self.total / self.count
        return {
            "loss": loss,
            "perplexity": loss.exp(),
            "bits_per_byte": self.total / math.log(2) / self.n_bytes,  # a number times the int64 would be float32
        }
