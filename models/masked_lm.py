"""A masked language model (BERT, Devlin et al. 2019, arXiv 1810.04805, §3.1) as a Lightning module.

    logits = W · LayerNorm(gelu(W_t hidden + b_t)) + b      W the embedding, where it is tied

The loss is that of the tokens that were masked, and the head works on those alone.

Letters: B batch, N length, E model dim, W width of the embeddings.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lin_attn.data.blocks import IGNORED
from models.blocks import build_norm
from models.config import OptimizerConfig, as_config
from models.encoder import BertEncoder, EncoderConfig
from models.encoder_use import MARKER, Guess, TextEncoder, fill_mask
from models.loss import cross_entropy_sum, exact_dtype, token_scores
from models.metrics import TokenMetric
from models.training import Batch, TrainedModel

if TYPE_CHECKING:
    Network = EncoderConfig | Mapping[str, Any]
    Optimizer = OptimizerConfig | Mapping[str, Any]
else:  # as in models/causal_lm.py
    Network, Optimizer = EncoderConfig, OptimizerConfig


class MaskedLMHead(nn.Module):
    """Hidden states (…, E) to logits (…, vocab), in two steps, since the second may be wide."""

    def __init__(self, config: EncoderConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        width = embedding.embedding_dim
        self.transform = nn.Linear(config.d_model, width)
        self.activation = nn.ReLU() if config.ffn == "relu" else nn.GELU()
        self.norm = build_norm(config, width)
        self.output = nn.Linear(width, config.vocab_size)
        for linear in (self.transform, self.output):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)
        if config.tie_embeddings:
            self.output.weight = embedding.weight

    def features(self, hidden: Tensor) -> Tensor:
        """(…, E) → (…, W), what `output` takes to logits."""
        out: Tensor = self.norm(self.activation(self.transform(hidden)))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, E) → (…, vocab)."""
        logits: Tensor = self.output(self.features(hidden))
        return logits


class MaskedLM(TextEncoder, TrainedModel):
    """Predicts tokens that were masked from all others.

    A batch is a dict of tokens (B, N) int64, some of them masked; targets (B, N) int64, what stood in their places, and
    −100 everywhere else; key_mask (B, N) bool, True where the token is real, if any is padding; token_types (B, N)
    int64, if the network has types.

    Args:
        network: the encoder: an EncoderConfig or a dict of its fields.
        optimizer: AdamW and its schedule: an OptimizerConfig or a dict of its fields.

    Raises:
        ValueError: for a field that is unknown, out of range, or without effect.
    """

    network_config: EncoderConfig
    not_judged_by = ("n_bytes",)  # of a text whose next tokens are the targets: an encoder sees them

    def __init__(self, network: Network = EncoderConfig(), optimizer: Optimizer = OptimizerConfig()) -> None:
        super().__init__(as_config(EncoderConfig, network, "network"), optimizer)
        self.network = BertEncoder(self.network_config)
        self.head = MaskedLMHead(self.network_config, self.network.embedding)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """Logits of the token in each place.

        Args:
            tokens: (B, N) int64.
            key_mask: (B, N) bool, True where the token is real, False where it is padding.
            token_types: (B, N) int64, less than network.n_token_types; all 0 by default.

        Returns:
            (B, N, vocab_size).

        Raises:
            ValueError: for tokens or token_types that are no (B, N) integers, or types that the network has not.
        """
        logits: Tensor = self.head(self.network(tokens, key_mask, token_types))
        return logits

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of negative log-likelihoods of masked tokens in nats, and their number."""
        features, targets = self._masked(batch)
        output = self.head.output
        return cross_entropy_sum(features, output.weight, targets, output.bias), _count(targets)

    def new_metric(self, stage: str) -> TokenMetric:
        """Loss, perplexity and accuracy over all masked tokens."""
        return TokenMetric()

    def evaluate(self, batch: Batch, metric: TokenMetric) -> None:
        """Adds the batch's masked tokens."""
        features, targets = self._masked(batch)
        nll, hits = token_scores(features, self.head.output.weight, targets, self.head.output.bias)
        metric.update(nll.to(exact_dtype(nll.device)).sum(), _count(targets), hits.sum())

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """The batch's tokens (B, N), those that were masked replaced by the likeliest."""
        likeliest = self(batch["tokens"], batch.get("key_mask"), batch.get("token_types")).argmax(-1)
        return {"tokens": torch.where(batch["targets"] != IGNORED, likeliest, batch["tokens"])}

    def fill_mask(self, text: str, top_k: int = 5, *, marker: str = MARKER, framed: bool = True) -> list[list[Guess]]:
        """The likeliest tokens where a text has a marker.

        A marker stands for one token: a byte, or a piece of a word. Where tokens begin with the blank before a word, as
        in byte-level BPE, write none before the marker: "the capital[MASK] France".

        Args:
            text: with one or several markers.
            top_k: how many guesses a place, the likeliest first. Tokens that stand for no text are none.
            marker: what stands for the mask token.
            framed: with the class token before and the separator after the text.

        Returns:
            For each marker the guesses: text, probability and token.

        Raises:
            ValueError: for a text without a marker, or a tokenizer without a mask token.
        """
        return fill_mask(self, text, top_k, marker=marker, framed=framed)

    def _masked(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the head's output takes, (T, W), and the targets (T,), of the T masked places."""
        hidden = self.network(batch["tokens"], batch.get("key_mask"), batch.get("token_types"))
        masked = batch["targets"] != IGNORED
        return self.head.features(hidden[masked]), batch["targets"][masked]


def _count(targets: Tensor) -> Tensor:
    return torch.tensor(targets.numel(), device=targets.device)
