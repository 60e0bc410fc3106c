"""An encoder that gives a text, or a pair of texts, a few numbers (BERT, Devlin et al. 2019, arXiv 1810.04805, §4.1).

    outputs = W f(W_p pooled + b_p) + b      pooled: the first real token's hidden state, or the mean over real tokens

f is tanh in BERT, gelu in RoFormer; without either the layer W_p is left out.

Letters: B batch, N length, E model dim, C outputs.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from models.encoder import BertEncoder, EncoderConfig

Pooling = Literal["first", "mean"]
Pooler = Literal["tanh", "gelu", "none"]


class PooledEncoder(nn.Module):
    """Tokens to outputs (B, C).

    Args:
        config: of the encoder.
        n_outputs: C, at least 1.
        pooling: first, the hidden state of the first real token, or mean, that of all real tokens.
        pooler: f of the layer before the outputs; none leaves that layer out.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(self, config: EncoderConfig, n_outputs: int, pooling: Pooling, pooler: Pooler) -> None:
        super().__init__()
        check_pooling(pooling)
        if pooler not in get_args(Pooler):
            raise ValueError(f"pooler is {pooler!r}; wanted one of {', '.join(get_args(Pooler))}")
        self.pooling, self.pooler = pooling, pooler
        self.encoder = BertEncoder(config)
        self.dense = None if pooler == "none" else nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.d_model, n_outputs)
        for linear in (self.dense, self.output):
            if linear is not None:
                nn.init.normal_(linear.weight, std=config.d_model**-0.5)
                nn.init.zeros_(linear.bias)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """tokens (B, N) int64, key_mask (B, N) bool, token_types (B, N) int64 → (B, C)."""
        x = pool(self.encoder(tokens, key_mask, token_types), key_mask, self.pooling)
        if self.dense is not None:
            # RoFormer drops out before this layer too, BERT does not.
            gelu = self.pooler == "gelu"
            x = nn.functional.gelu(self.dense(self.dropout(x))) if gelu else torch.tanh(self.dense(x))
        out: Tensor = self.output(self.dropout(x))
        return out


def check_pooling(pooling: str) -> None:
    """Raises ValueError for anything but first and mean."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling is {pooling!r}; wanted one of {', '.join(get_args(Pooling))}")


def pool(hidden: Tensor, key_mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Hidden states (B, N, E) to one a row, (B, E): the first real token's, or the mean over real tokens."""
    if pooling == "first":
        if key_mask is None:
            return hidden[:, 0]
        first = key_mask.int().argmax(1)  # of equal values the first
        return hidden[torch.arange(len(hidden), device=hidden.device), first]
    if key_mask is None:
        return hidden.mean(1)
    real = key_mask[..., None]
    return hidden.masked_fill(~real, 0).sum(1) / real.sum(1).clamp(min=1)
