"""Time and memory of attention against sequence length: measuring, fitting, and saying what came out."""

from lin_attn.scaling.cost import cost
from lin_attn.scaling.fit import fit
from lin_attn.scaling.measure import measure
from lin_attn.scaling.plan import Point

__all__ = ["Point", "cost", "fit", "measure"]
