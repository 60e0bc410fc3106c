"""xPos (Sun et al. 2022, arXiv 2212.10554, eqs. 12–15): rotary embedding whose pairs fade with distance.

    a_mn = Σ_i ζ_i^((m − n)/b) · (R_m q)_i · (R_n k)_i,   ζ_i = (2i/D + γ) / (1 + γ) < 1,   m ≥ n

by q_m ↦ ζ^(m/b) R_m q_m and k_n ↦ ζ^(−n/b) R_n k_n: slow pairs, which say little about order nearby, keep their weight
further out. In softmax attention a faded score is a score of 0, a middling one, and not a weight of 0. In linear
attention it is a weight of 0: there xPos is a decay for each pair, as RetNet has one for each head (Sun et al. 2023,
arXiv 2307.08621).

ζ_0^(−n/b) leaves float32 at n = 36,000 and float16 at n = 4,500 where γ = 0.4 and b = 512. Only the difference m − n
means something, so the ops measure exponents from an origin that goes along with the text, over stretches of
`stretch` tokens, where no factor is greater than e⁵: exact at any length.

Letters: m, n positions, D head dim, i = 0 … D/2 − 1 pair, b decay base, N length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lin_attn.positions.rotary import Rotary


@dataclass(frozen=True)
class XPos:
    """Rotation and decay; like Rotary it holds a few numbers and no tensor. For causal attention only.

    Attributes:
        head_dim: D, even.
        base: of the rotary wavelengths.
        decay_base: b, the positions over which pair i fades to ζ_i; positive. 512 in the paper.
        gamma: γ, positive; 0.4 in the paper.

    Raises:
        ValueError: for a number that is out of range.
    """

    head_dim: int
    base: float = 10000.0
    decay_base: float = 512.0
    gamma: float = 0.4

    def __post_init__(self) -> None:
        Rotary(self.head_dim, self.base)  # checks both
        for name in ("decay_base", "gamma"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; wanted a positive number")

    @property
    def rotary(self) -> Rotary:
        """R without the decay."""
        return Rotary(self.head_dim, self.base)

    @property
    def stretch(self) -> int:
        """How many positions the exponents may be measured over from one origin."""
        return max(1, int(5 * self.decay_base / math.log((1 + self.gamma) / self.gamma)))

    def decay(self, distances: Tensor, *, dtype: torch.dtype) -> Tensor:
        """ζ_i^(distance/b) of integer distances (…): (…, D) in dtype, each pair's number twice."""
        device = distances.device
        origin = torch.device("cpu") if device.type == "mps" else device
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=origin) / self.head_dim
        logs = ((pairs + self.gamma) / (1 + self.gamma)).log() / self.decay_base
        factors = (distances.to(origin, torch.float64)[..., None] * logs).exp()
        return factors.repeat_interleave(2, dim=-1).to(dtype).to(device)
