"""Attention modules, one mechanism a file, all with the interface of MultiHeadAttention."""

from lin_attn.attention.linear import LinearAttention
from lin_attn.attention.multi_head import MultiHeadAttention
from lin_attn.attention.segment_recurrent import SegmentMemory, SegmentRecurrentAttention
from lin_attn.attention.softmax import SoftmaxAttention

__all__ = ["LinearAttention", "MultiHeadAttention", "SegmentMemory", "SegmentRecurrentAttention", "SoftmaxAttention"]
