"""Relative position representations (Shaw et al. 2018, arXiv 1803.02155, eqs. 3–4), in scores and in values.

    score_mn = q_mᵀ (k_n + a^K_c) / √D,   out_m = Σ_n w_mn (v_n + a^V_c),   c = clip(n − m, −L, L)

The vectors are shared by the heads of a layer (§3.3). The form here never holds a^K_c for all m and n: q_mᵀ a^K_c is
computed for the 2L + 1 vectors and read by distance, and weights are summed by distance before they meet a^V.

Letters: m query, n key, L greatest distance, H heads, D and M head dims, N queries, J keys.
"""

import torch
from torch import Tensor, nn

from lin_attn.positions.score_positions import ScorePositions, distances


class ShawPositions(ScorePositions):
    """Tables a^K (2L + 1, D) and a^V (2L + 1, M); L + 1 rows where causal, which meets no n > m.

    Args:
        head_dim: D.
        value_dim: M, D by default.
        max_distance: L, from which on all distances share a vector.
        causal: keys n ≤ m only.

    Raises:
        ValueError: for a number below 1.
    """

    in_values = True

    def __init__(self, head_dim: int, value_dim: int | None = None, max_distance: int = 16, *, causal: bool) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        for name, size in (("head_dim", head_dim), ("value_dim", value_dim), ("max_distance", max_distance)):
            if size < 1:
                raise ValueError(f"{name} is {size}; wanted at least 1")
        self.causal, self.max_distance = causal, max_distance
        rows = max_distance + 1 if causal else 2 * max_distance + 1
        self.key_positions = nn.Embedding(rows, head_dim)
        self.value_positions = nn.Embedding(rows, value_dim)

    def rows(self, queries: int, keys: int, past: int, device: torch.device) -> Tensor:
        """The row of each query and key, (N, J) int64; row 0 is for keys L or more before the query."""
        c = -distances(queries, keys, past, device)
        return c.clamp(-self.max_distance, 0 if self.causal else self.max_distance) + self.max_distance

    def scores(self, q: Tensor, k: Tensor, past: int) -> Tensor:
        """See ScorePositions.scores: (B, H, N, J)."""
        by_row = (q @ self.key_positions.weight.to(q.dtype).mT) * self.scale(q.shape[-1])
        rows = self.rows(q.shape[2], k.shape[2], past, q.device)
        return by_row.gather(-1, rows.expand(*q.shape[:2], -1, -1))

    def values(self, weights: Tensor, past: int) -> Tensor:
        """See ScorePositions.values."""
        rows = self.rows(weights.shape[2], weights.shape[3], past, weights.device)
        by_row = weights.new_zeros(*weights.shape[:3], self.value_positions.num_embeddings)
        by_row = by_row.scatter_add(-1, rows.expand_as(weights), weights)
        return by_row @ self.value_positions.weight.to(weights.dtype)
