"""Sinusoidal position encoding (Vaswani et al. 2017, arXiv 1706.03762, §3.5), added to the embeddings.

    PE(m, 2i) = sin(m / 10000^(2i/E)),   PE(m, 2i+1) = cos(m / 10000^(2i/E))

The angles are those of rotary embedding over E. Letters: m position, E model dim, i = 0 … E/2 − 1.
"""

import torch
from torch import Tensor

from lin_attn.positions.rotary import Rotary


def sinusoidal(positions: Tensor, d_model: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The encodings of integer positions (…), as (…, d_model) in dtype; angles are computed in float64.

    Raises:
        ValueError: if d_model is odd or positions are not integers.
    """
    if d_model < 2 or d_model % 2:
        raise ValueError(f"d_model is {d_model}; pairs of sine and cosine need a positive even number")
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise ValueError(f"positions has dtype {positions.dtype}; wanted integers, whose angles are exact")
    cos, sin = Rotary(d_model).tables_at(positions, dtype=dtype)
    return torch.stack((sin, cos), dim=-1).flatten(-2)
