"""Loss, perplexity and bits per byte of a language model, exact over any number of tokens, batches and processes."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from models.loss import exact_dtype


class LanguageModelMetric(Metric):
    """Sums negative log-likelihoods in float64 and counts tokens and bytes in int64; all figures come from the three.

    `compute` gives a dict of float64 scalars:
        loss: nats per token; perplexity: exp(loss); bits_per_byte: total bits over the bytes that the tokens stand for,
        which compares models of different tokenizers.
    """

    full_state_update = False
    nll: Tensor
    tokens: Tensor
    n_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("n_bytes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, tokens: Tensor | int, n_bytes: Tensor | int) -> None:
        """Adds a sum of negative log-likelihoods in nats, over so many tokens that stand for so many bytes."""
        self.nll += nll.to(exact_dtype(nll.device))
        self.tokens += tokens
        self.n_bytes += n_bytes

    def compute(self) -> dict[str, Tensor]:
        """The figures of all that was added; NaN if that was nothing."""
        loss = self.nll / self.tokens
        return {
            "loss": loss,
            "perplexity": loss.exp(),
            "bits_per_byte": self.nll / math.log(2) / self.n_bytes,  # a number times the int64 would be float32
        }
