"""T5's relative position bias (Raffel et al. 2020, arXiv 1910.10683, §2.1): a learned number a head and distance.

    term_mn = w_h[bucket(m − n)],   no scaling of q_mᵀ k_n

A bucket is one distance up to e, then a stretch that grows as the logarithm up to the greatest distance, and the last
one is for all beyond:

    bucket(d) = d                                           d < e
    bucket(d) = e + ⌊(L − e) · log(d/e) / log(D_max/e)⌋     e ≤ d < D_max,   at most L − 1,   e = ⌊L/2⌋

Causal: L is the number of buckets, d = m − n. Both directions: half of the buckets for n ≤ m, half for n > m. The
paper shares the table among all layers; pass one module to all of them for that.

Letters: m query, n key, d distance, L buckets, e exact ones, D_max greatest distance, H heads, N queries, J keys.
"""

import torch
from torch import Tensor, nn

from lin_attn.positions.score_positions import ScorePositions, span, toeplitz


class T5Positions(ScorePositions):
    """A table (n_buckets, H) that is read by distance. T5 does not divide the scores by √D.

    Args:
        n_heads: H.
        n_buckets: number of rows; even if not causal.
        max_distance: the distance from which on all share a bucket.
        causal: buckets for n ≤ m only; otherwise for both directions.
        scaled: divide q_mᵀ k_n by √D all the same, as this project's other models do. T5 folds it into its
            initial weights.

    Raises:
        ValueError: for a number that is out of range.
    """

    def __init__(
        self,
        n_heads: int,
        n_buckets: int = 32,
        max_distance: int = 128,
        *,
        causal: bool,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        if n_heads < 1:
            raise ValueError(f"n_heads is {n_heads}; wanted at least 1")
        per_side = n_buckets if causal else n_buckets // 2
        if per_side < 2 or (not causal and n_buckets % 2):
            wanted = "at least 2" if causal else "an even number, 4 or more, half of it for each direction"
            raise ValueError(f"n_buckets is {n_buckets}; wanted {wanted}")
        if max_distance <= per_side // 2:
            raise ValueError(
                f"max_distance is {max_distance}; wanted more than {per_side // 2}, the distances with a bucket each"
            )
        self.causal, self.scaled, self.per_side = causal, scaled, per_side
        self.starts = bucket_starts(per_side, max_distance)
        self.positions = nn.Embedding(n_buckets, n_heads)

    def scale(self, head_dim: int) -> float:
        """1, or 1/√D if scaled."""
        return super().scale(head_dim) if self.scaled else 1.0

    def buckets(self, distances: Tensor) -> Tensor:
        """The bucket of each distance m − n, int64; where causal, keys ahead are in bucket 0."""
        starts = torch.tensor(self.starts, device=distances.device)
        size = distances.clamp(min=0) if self.causal else distances.abs()
        found = torch.bucketize(size, starts, right=True)
        return found if self.causal else found + (distances < 0) * self.per_side

    def scores(self, q: Tensor, k: Tensor, past: int) -> Tensor:
        """See ScorePositions.scores: (H, N, J)."""
        by_distance = self.positions(self.buckets(span(q.shape[2], k.shape[2], past, q.device)))
        return toeplitz(by_distance.mT.to(q.dtype), q.shape[2])


def bucket_starts(n_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The least distance of each bucket but the first.

    In whole numbers: the logarithm's bucket j begins where (d/e)^(L − e) ≥ (D_max/e)^j, which rounding does not move.
    """
    exact = n_buckets // 2
    rest, starts, d = n_buckets - exact, list(range(1, exact + 1)), exact
    for j in range(1, rest):
        while d**rest * exact**j < max_distance**j * exact**rest:
            d += 1
        starts.append(d)
    return tuple(starts)
