"""Rotary position embedding (RoFormer, Su et al. 2021, arXiv 2104.09864, eqs. 14–16 and 34).

    R_m x:  (x_2i, x_2i+1) ↦ (x_2i cos mθ_i − x_2i+1 sin mθ_i,  x_2i sin mθ_i + x_2i+1 cos mθ_i),   θ_i = base^(−2i/r)

so that (R_m x)ᵀ (R_n y) depends on m and n through m − n only. Pairs are *interleaved*, as in the paper; the
half-split layout of some later models is a permutation of it. Rotation may be partial, of the first r of D dims (Wang
and Komatsuzaki 2021, GPT-J): what is not rotated has angle 0.

Letters: m position, D head dim, r rotary dim, i = 0 … r/2 − 1 pair, N length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lin_attn.eager import is_eager
from lin_attn.positions.rope_scaling import RopeScaling
from lin_attn.positions.tables import kept_tables

_STEPS = 256  # positions of a table from which steps of decoding take a row each


@dataclass(frozen=True)
class Rotary:
    """Rotates the pairs of the last axis by angles that grow with position.

    It holds a few numbers and no tensor: there is nothing to move to a device or to lose in half precision, and equal
    objects are interchangeable.

    Attributes:
        head_dim: D, the size of the axis that is rotated; even.
        base: base of the geometric series of wavelengths, positive.
        rotary_dim: r, how many of the D entries are rotated, from the first on; even; all of them by default.
        scaling: stretches the wavelengths for longer sequences than were trained on.

    Raises:
        ValueError: if head_dim or rotary_dim is odd or not positive, rotary_dim is beyond head_dim or too small for its
            scaling, or base is not positive.
    """

    head_dim: int
    base: float = 10000.0
    rotary_dim: int | None = None
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim <= 0 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary pairs need a positive even number")
        if not self.base > 0:
            raise ValueError(f"base is {self.base}; wanted a positive number")
        if self.rotary_dim is not None and not (0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0):
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}; rotary pairs need a positive even number, at most head_dim, "
                f"{self.head_dim}"
            )
        if self.scaling is not None and not isinstance(self.scaling, RopeScaling):
            raise ValueError(f"scaling is {self.scaling!r}; wanted a RopeScaling or None")
        if self.scaling is not None and self.scaling.kind == "ntk" and self.rotated == 2:
            raise ValueError(
                "rotary_dim is 2 with scaling ntk, which leaves the fastest pair as it is; wanted 4 or more"
            )

    @property
    def rotated(self) -> int:
        """r, the number of entries that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def __call__(self, x: Tensor, offset: int = 0, *, positions: Tensor | None = None) -> Tensor:
        """Rotates x, computing in float32 at least and returning x's dtype.

        Args:
            x: (…, N, D).
            offset: position of the first of the N vectors, which then are consecutive.
            positions: integers, (N,) or (B, N) with B the first axis of x, in place of an offset.

        Returns:
            The rotated tensor, of x's shape and dtype; x is left as it is.

        Raises:
            ValueError: if the last axis is not D, or positions are not integers of a fitting shape, or both an
                offset and positions are given.
        """
        if x.dim() < 2 or x.shape[-1] != self.head_dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; wanted (…, N, {self.head_dim})")
        if not x.is_floating_point():
            raise ValueError(f"x has dtype {x.dtype}; wanted floating point")
        wide = torch.promote_types(x.dtype, torch.float32)
        if not isinstance(offset, int | torch.SymInt):
            raise ValueError(f"offset is {offset!r}; wanted an integer")
        if positions is None:
            cos, sin = self.tables(x.shape[-2], offset, device=x.device, dtype=wide)
        else:
            if offset != 0:
                raise ValueError(f"offset is {offset} and positions are given as well; wanted one of the two")
            cos, sin = self.tables_at(self._checked(positions, x), dtype=wide)
            if positions.dim() == 2:  # (B, N, D/2) → (B, 1 …, N, D/2)
                shape = (cos.shape[0], *[1] * (x.dim() - 3), *cos.shape[1:])
                cos, sin = cos.view(shape), sin.view(shape)
        if self.rotated == self.head_dim:
            return rotate(x.to(wide), cos, sin).to(x.dtype)
        turned, kept = x.split((self.rotated, self.head_dim - self.rotated), dim=-1)
        pairs = slice(0, self.rotated // 2)
        return torch.cat((rotate(turned.to(wide), cos[..., pairs], sin[..., pairs]).to(x.dtype), kept), dim=-1)

    def tables(self, length: int, offset: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos mθ_i and sin mθ_i for m = offset … offset + length − 1, each (length, D/2), in dtype on device."""

        def make() -> tuple[Tensor, Tensor]:
            if length == 1 and is_eager():  # a step of decoding: its angles would take longer to make than the step
                place = offset % _STEPS
                cos, sin = self.tables(_STEPS, offset - place, device=device, dtype=dtype)
                return cos[place : place + 1], sin[place : place + 1]
            return self.tables_at(torch.arange(offset, offset + length, device=device), dtype=dtype)

        return kept_tables((self, length, offset, torch.device(device), dtype), make)

    def tables_at(self, positions: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos mθ_i and sin mθ_i for integer positions m (…), each (…, D/2), in dtype on their device."""
        # Angles in float64: at m = 10⁶ a float32 angle is off by 0.03 radians already. Apple's GPUs have no float64, so
        # for them angles are made on the CPU rather than less exactly.
        device = positions.device
        origin = torch.device("cpu") if device.type == "mps" else device
        angles = positions.to(origin, torch.float64)[..., None] * self.frequencies(origin)
        return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """θ_i in radians a position, (D/2,) float64; 0 for pairs that are not rotated."""
        base, slowdown = self.base, 1.0
        if self.scaling is not None:
            base, slowdown = self.scaling.base(base, self.rotated), self.scaling.slowdown
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float64, device=device) / self.rotated
        still = torch.zeros((self.head_dim - self.rotated) // 2, dtype=torch.float64, device=device)
        return torch.cat((base**-exponents / slowdown, still))

    @staticmethod
    def _checked(positions: Tensor, x: Tensor) -> Tensor:
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"positions has dtype {positions.dtype}; wanted integers, whose angles are exact")
        fits = [(x.shape[-2],)] + [(x.shape[0], x.shape[-2])] * (x.dim() >= 3)
        if tuple(positions.shape) not in fits:
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}; wanted {' or '.join(map(str, fits))} "
                f"for x of shape {tuple(x.shape)}"
            )
        return positions


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs of x (…, N, D) by the angles of cos and sin (…, N, D/2); −sin rotates back."""
    if torch.compiler.is_compiling() or x.storage_offset() % 2:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    # The same products and sums as one multiplication of complex numbers: several times faster where no compiler fuses
    # the form above, and not understood by the compiler that could.
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
