"""Linear attention in C++ for the CPU at hand, compiled on first use."""

from lin_attn.kernels.cpu.calls import CHUNK, FEATURE_MAPS, MAX_DIM, Layer, attend, backward, forward, project
from lin_attn.kernels.cpu.library import describe, unusable, usable

__all__ = [
    "CHUNK",
    "FEATURE_MAPS",
    "MAX_DIM",
    "Layer",
    "attend",
    "backward",
    "describe",
    "forward",
    "project",
    "unusable",
    "usable",
]
