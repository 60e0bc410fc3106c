"""Linear attention with rotary position embedding after the feature map, beside softmax attention."""

from lin_attn.feature_maps import feature_map
from lin_attn.ops import KVCache, LinearState, linear_attention, softmax_attention
from lin_attn.positions import Rotary

__all__ = ["KVCache", "LinearState", "Rotary", "feature_map", "linear_attention", "softmax_attention"]
__version__ = "0.1.0"
