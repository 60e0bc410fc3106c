"""Position encodings, one a file."""

from lin_attn.positions.alibi import AlibiPositions, alibi_slopes
from lin_attn.positions.deberta import DebertaPositions
from lin_attn.positions.learned import LearnedPositions
from lin_attn.positions.rope_scaling import RopeScaling
from lin_attn.positions.rotary import Rotary, rotate
from lin_attn.positions.score_positions import ScorePositions
from lin_attn.positions.shaw import ShawPositions
from lin_attn.positions.sinusoidal import sinusoidal
from lin_attn.positions.t5 import T5Positions
from lin_attn.positions.transformer_xl import TransformerXLPositions
from lin_attn.positions.xpos import XPos

__all__ = [
    "AlibiPositions",
    "DebertaPositions",
    "LearnedPositions",
    "RopeScaling",
    "Rotary",
    "ScorePositions",
    "ShawPositions",
    "T5Positions",
    "TransformerXLPositions",
    "XPos",
    "alibi_slopes",
    "rotate",
    "sinusoidal",
]
