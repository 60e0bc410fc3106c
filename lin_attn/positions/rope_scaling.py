"""Stretching rotary positions over longer sequences than a model was trained on.

    linear   θ_i / s                                 (Chen et al. 2023, arXiv 2306.15595, eq. 3: positions m / s)
    ntk      θ_i of the base b · s^(r / (r − 2))     (bloc97 2023, "NTK-aware scaled RoPE")

The factor s is how many times longer the new length is than the original one, as in other libraries. Linear scaling
slows all pairs alike, which wants a little training at the new length; the other one leaves the fastest pair as it was
and slows the slowest by s, and works better without any. Both are fixed: a factor that follows the length of the text
at hand ("dynamic") would rotate keys that are kept in a cache by angles that no longer hold.

Letters: r rotated dims, b base, s factor, i pair.
"""

from dataclasses import dataclass
from typing import Literal, get_args

ScalingKind = Literal["linear", "ntk"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary wavelengths are stretched.

    Attributes:
        kind: "linear" or "ntk".
        factor: new length / original length, at least 1.

    Raises:
        ValueError: for another kind, or a factor below 1.
    """

    kind: ScalingKind
    factor: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScalingKind):
            known = ", ".join(get_args(ScalingKind))
            raise ValueError(f"kind of scaling is {self.kind!r}; wanted one of {known} (no scaling for none)")
        if not 1 <= self.factor < float("inf"):
            raise ValueError(f"factor of scaling is {self.factor}; wanted new length / original length, at least 1")

    @classmethod
    def between(cls, kind: ScalingKind, original_length: int, length: int) -> "RopeScaling":
        """The scaling of a model that was trained on original_length tokens and is to read length of them.

        Raises:
            ValueError: if original_length is not positive, or length is less than it.
        """
        if original_length < 1:
            raise ValueError(f"original_length is {original_length}; wanted at least 1")
        if length < original_length:
            raise ValueError(f"length is {length}; wanted at least original_length, {original_length}")
        return cls(kind, length / original_length)

    def base(self, base: float, rotary_dim: int) -> float:
        """The base of the stretched wavelengths."""
        return base if self.kind == "linear" else base * self.factor ** (rotary_dim / (rotary_dim - 2))

    @property
    def slowdown(self) -> float:
        """By what all angles are divided."""
        return self.factor if self.kind == "linear" else 1.0
