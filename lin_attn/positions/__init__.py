"""Position encodings, one a file."""

from lin_attn.positions.learned import LearnedPositions
from lin_attn.positions.rotary import Rotary, rotate
from lin_attn.positions.sinusoidal import sinusoidal

__all__ = ["LearnedPositions", "Rotary", "rotate", "sinusoidal"]
