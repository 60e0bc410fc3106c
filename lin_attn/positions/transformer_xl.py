"""Transformer-XL's relative positions (Dai et al. 2019, arXiv 1901.02860, §3.3).

    score_mn = (q_mᵀ k_n + q_mᵀ W_R r_{m−n} + uᵀ k_n + vᵀ W_R r_{m−n}) / √D

with r_d the sinusoidal encoding of the distance d and learned u and v for each head, of each layer. q_m and v meet all
W_R r_d in one product, whose rows are then shifted to their places (appendix B), O(N·J) numbers. Sines and cosines are
interleaved here, and in two halves in the authors' code: W_R learns either.

Letters: m query, n key, E model dim, H heads, K heads of keys, D head dim, N queries, J keys.
"""

import torch
from torch import Tensor, nn

from lin_attn.positions.score_positions import ScorePositions, relative_shift, span
from lin_attn.positions.sinusoidal import sinusoidal


class TransformerXLPositions(ScorePositions):
    """W_R (H·D, E), u and v (H·D).

    Args:
        d_model: E, the size of r; even.
        n_heads: H.
        head_dim: D.
        causal: keys n ≤ m only, for which half of the distances do.

    Raises:
        ValueError: for a number below 1, or an odd d_model.
    """

    def __init__(self, d_model: int, n_heads: int, head_dim: int, *, causal: bool) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("n_heads", n_heads), ("head_dim", head_dim)):
            if size < 1:
                raise ValueError(f"{name} is {size}; wanted at least 1")
        if d_model % 2:
            raise ValueError(f"d_model is {d_model}; pairs of sine and cosine need a positive even number")
        self.causal, self.d_model, self.n_heads = causal, d_model, n_heads
        self.projection = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.content_bias = nn.Parameter(0.02 * torch.randn(n_heads * head_dim))
        self.position_bias = nn.Parameter(0.02 * torch.randn(n_heads * head_dim))

    def scores(self, q: Tensor, k: Tensor, past: int) -> Tensor:
        """See ScorePositions.scores: (B, H, N, J)."""
        dtype, (queries, head_dim), keys = q.dtype, q.shape[2:], k.shape[2]
        away = span(queries, keys, past, q.device)
        if self.causal:
            away = away[: past + queries]  # down to 0
        r = sinusoidal(away, self.d_model, dtype=dtype)  # (W, E)
        w = self.projection.weight.to(dtype).unflatten(0, (self.n_heads, head_dim))  # (H, D, E)
        rows = q + self.position_bias.to(dtype).view(self.n_heads, 1, head_dim)
        # Rows meet W_R first where they are few, as one token that is decoded is.
        few = queries * (head_dim + len(away)) * self.d_model < len(away) * head_dim * (self.d_model + queries)
        by_distance = (rows @ w) @ r.mT if few else rows @ (r @ w.mT).mT
        u = self.content_bias.to(dtype).view(k.shape[1], -1, head_dim)  # (K, H/K, D)
        by_key = (u @ k.mT).flatten(1, 2)[:, :, None]  # (B, H, 1, J)
        return (relative_shift(by_distance, keys) + by_key) * self.scale(head_dim)
