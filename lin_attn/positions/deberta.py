"""DeBERTa's disentangled attention (He et al. 2021, arXiv 2006.03654, eqs. 2–4).

    score_mn = (q_mᵀ k_n + q_mᵀ k^R_{δ(m,n)} + k_nᵀ q^R_{δ(m,n)}) / √(3D),   k^R = W_K^R p,  q^R = W_Q^R p
    δ(m, n) = clip(m − n + L, 0, 2L − 1)

content to content, content to position, position to content. p is a table of learned vectors that all layers share;
W_K^R and W_Q^R are each layer's own. In the last term the paper prints δ(n, m); the authors' code, and so every
published weight, reads q^R at δ(m, n), as here.

Letters: m query, n key, L greatest distance, E model dim, H heads, K heads of keys, D head dim, N queries, J keys.
"""

import torch
from torch import Tensor, nn

from lin_attn.positions.score_positions import ScorePositions, distances


class DebertaPositions(ScorePositions):
    """Projections W_K^R and W_Q^R (H·D, E) of a table p (2L, E); (L, E) where causal, which meets no n > m.

    Args:
        d_model: E.
        n_heads: H.
        head_dim: D.
        max_distance: L; distances from L − 1 on share a vector (from −L on, on the other side).
        causal: keys n ≤ m only.
        bias: of W_Q^R; the authors' code has one.
        table: another layer's `positions`, to share it.

    Raises:
        ValueError: for a number below 1, or a table of another size.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        head_dim: int,
        max_distance: int = 512,
        *,
        causal: bool,
        bias: bool = False,
        table: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        sizes = {"d_model": d_model, "n_heads": n_heads, "head_dim": head_dim, "max_distance": max_distance}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; wanted at least 1")
        rows = max_distance if causal else 2 * max_distance
        if table is not None and table.weight.shape != (rows, d_model):
            raise ValueError(f"table has shape {tuple(table.weight.shape)}; wanted {(rows, d_model)}")
        self.causal, self.max_distance, self.n_heads = causal, max_distance, n_heads
        self.positions = nn.Embedding(rows, d_model) if table is None else table
        self.key = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.query = nn.Linear(d_model, n_heads * head_dim, bias=bias)

    def scale(self, head_dim: int) -> float:
        """1/√(3D), for a sum of three products."""
        return float((3 * head_dim) ** -0.5)

    def rows(self, queries: int, keys: int, past: int, device: torch.device) -> Tensor:
        """The row of p for each query and key, (N, J) int64."""
        first = 0 if self.causal else self.max_distance
        return (distances(queries, keys, past, device) + first).clamp(0, first + self.max_distance - 1)

    def scores(self, q: Tensor, k: Tensor, past: int) -> Tensor:
        """See ScorePositions.scores: (B, H, N, J)."""
        dtype, (batch, heads, queries, head_dim), keys = q.dtype, q.shape, k.shape[2]
        k_r, q_r = (
            nn.functional.linear(
                self.positions.weight.to(dtype),
                layer.weight.to(dtype),
                None if layer.bias is None else layer.bias.to(dtype),
            )
            .unflatten(-1, (heads, head_dim))
            .transpose(0, 1)  # (H, 2L, D)
            for layer in (self.key, self.query)
        )
        rows = self.rows(queries, keys, past, q.device)
        to_position = (q @ k_r.mT).gather(-1, rows.expand(batch, heads, -1, -1))
        k = k.repeat_interleave(heads // k.shape[1], dim=1)
        if queries == 1:  # a token that is decoded needs one vector a key
            from_position = (k * q_r[:, rows[0]]).sum(-1)[:, :, None]
        else:
            from_position = (k @ q_r.mT).gather(-1, rows.mT.expand(batch, heads, -1, -1)).mT
        term: Tensor = (to_position + from_position) * self.scale(head_dim)
        return term
