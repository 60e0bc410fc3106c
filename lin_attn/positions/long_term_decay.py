"""How RoPE's inner product can shrink with distance (RoFormer, arXiv 2104.09864, §3.4.3, eqs. 35–37).

    (R_m q)ᵀ (R_n k) = Re Σ_i h_i e^(i(m−n)θ_i),   |that| ≤ (max_i |h_i+1 − h_i|) · Σ_j |S_j|
    S_j = Σ_{i<j} e^(i(m−n)θ_i),   relative bound = (1 / (D/2)) Σ_{j=1…D/2} |S_j|

with h_i = q_i k̄_i of the pairs seen as complex numbers and h_{D/2} = 0, by Abel's transformation. What depends on the
distance alone is the relative bound: (D/2 + 1)/2 at distance 0, and falling, in waves, from there.

Letters: m, n positions, D rotated dims, i, j pair.
"""

import torch
from torch import Tensor

from lin_attn.positions.rotary import Rotary


def relative_upper_bound(rotary: Rotary, distances: Tensor) -> Tensor:
    """The relative bound at integer distances (…), as (…) in float64.

    Raises:
        ValueError: if distances are not integers.
    """
    if distances.is_floating_point() or distances.dtype == torch.bool:
        raise ValueError(f"distances has dtype {distances.dtype}; wanted integers, whose angles are exact")
    pairs = rotary.rotated // 2
    cos, sin = (table[..., :pairs] for table in rotary.tables_at(distances, dtype=torch.float64))
    return torch.complex(cos, sin).cumsum(-1).abs().mean(-1)
