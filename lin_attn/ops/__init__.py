"""Attention as pure functions of tensors: the mathematics, with explicit state in and out."""

from lin_attn.ops.linear_attention import linear_attention
from lin_attn.ops.softmax_attention import softmax_attention
from lin_attn.ops.state import KVCache, LinearState
from lin_attn.ops.xpos_linear_attention import xpos_linear_attention

__all__ = ["KVCache", "LinearState", "linear_attention", "softmax_attention", "xpos_linear_attention"]
