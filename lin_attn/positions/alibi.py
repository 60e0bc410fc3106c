"""Attention with linear biases (ALiBi, Press et al. 2022, arXiv 2108.12409, §3): nearer keys weigh more.

    term_mn = −s_h · |m − n|,   s_h = 2^(−8h/H),  h = 1 … H

for H a power of two. For other H, as in the authors' code: the slopes of the greatest power of two P below H, then
every other slope of 2P. The paper has causal attention; with |m − n| it serves both directions.

Letters: m query, n key, H heads, N queries, J keys.
"""

import torch
from torch import Tensor

from lin_attn.positions.score_positions import ScorePositions, span, toeplitz


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """s_h of each head.

    Raises:
        ValueError: if there is no head.
    """
    if n_heads < 1:
        raise ValueError(f"n_heads is {n_heads}; wanted at least 1")
    power = 1 << (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return tuple(slopes + between[: n_heads - power])


class AlibiPositions(ScorePositions):
    """ALiBi: no parameters.

    Args:
        n_heads: H.

    Raises:
        ValueError: if n_heads is less than 1.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(n_heads)

    def scores(self, q: Tensor, k: Tensor, past: int) -> Tensor:
        """See ScorePositions.scores: (H, N, J)."""
        wide = torch.promote_types(q.dtype, torch.float32)  # bfloat16 has no 257
        away = span(q.shape[2], k.shape[2], past, q.device).abs().to(wide)
        slopes = torch.tensor(self.slopes, dtype=wide, device=q.device)
        return toeplitz((-slopes[:, None] * away).to(q.dtype), q.shape[2])
