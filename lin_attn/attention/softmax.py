"""Softmax attention as a module, with RoPE: the quadratic baseline (Vaswani et al. 2017, arXiv 1706.03762)."""

from torch import Tensor

from lin_attn.attention.multi_head import MultiHeadAttention
from lin_attn.ops import KVCache, softmax_attention
from lin_attn.positions import Rotary


class SoftmaxAttention(MultiHeadAttention):
    """Multi-head scaled dot-product attention.

    Args:
        d_model, n_heads, n_kv_heads, head_dim, causal, output_norm, bias: as in MultiHeadAttention.
        rope: rotate queries and keys by their positions.
        rope_base: base of the rotary wavelengths.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope: bool = True,
        rope_base: float = 10000.0,
        causal: bool = True,
        output_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(
            d_model, n_heads, n_kv_heads, head_dim, causal=causal, output_norm=output_norm, bias=bias
        )  # fmt: skip
        if not isinstance(rope, bool):
            raise ValueError(f"rope is {rope!r}; wanted True or False: softmax has no feature map")
        self.rotary = Rotary(self.head_dim, rope_base) if rope else None

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, state: KVCache | None
    ) -> tuple[Tensor, KVCache]:
        """See MultiHeadAttention.mix."""
        return softmax_attention(
            q, k, v, rotary=self.rotary, causal=self.causal, key_mask=key_mask, state=state, return_state=True
        )
