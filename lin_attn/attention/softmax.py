"""Softmax attention as a module, the quadratic baseline (Vaswani et al. 2017, arXiv 1706.03762)."""

from torch import Tensor

from lin_attn.attention.multi_head import MultiHeadAttention
from lin_attn.ops import KVCache, softmax_attention
from lin_attn.positions import Rotary, ScorePositions, XPos


class SoftmaxAttention(MultiHeadAttention):
    """Multi-head scaled dot-product attention.

    Args:
        d_model, n_heads, n_kv_heads, head_dim, causal, output_norm, bias: as in MultiHeadAttention.
        rope: rotate queries and keys by their positions; by default where no other positions are given.
        rope_base: base of the rotary wavelengths.
        rotary: the rotation in full (partial, scaled, or xPos), in place of rope_base.
        positions: a term of the scores; several layers may share one, or parts of one.

    Raises:
        ValueError: if the sizes do not divide, options contradict each other, or positions are of another direction.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope: bool | None = None,
        rope_base: float = 10000.0,
        rotary: Rotary | XPos | None = None,
        positions: ScorePositions | None = None,
        causal: bool = True,
        output_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(
            d_model, n_heads, n_kv_heads, head_dim, causal=causal, output_norm=output_norm, bias=bias
        )  # fmt: skip
        if rope is None:
            rope = rotary is not None or positions is None
        if not isinstance(rope, bool):
            raise ValueError(f"rope is {rope!r}; wanted True or False: softmax has no feature map")
        self.rotary = self.checked_rotation(rope, rope_base, rotary)
        if positions is not None and positions.causal not in (None, causal):
            raise ValueError(f"positions have causal={positions.causal}; wanted {causal}, as the attention")
        # Not `positions`: by that name models keep tables from weight decay, and a projection of them is no table.
        self.encoding = positions

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, state: KVCache | None
    ) -> tuple[Tensor, KVCache]:
        """See MultiHeadAttention.mix."""
        return softmax_attention(
            q,
            k,
            v,
            rotary=self.rotary,
            positions=self.encoding,
            causal=self.causal,
            key_mask=key_mask,
            state=state,
            return_state=True,
        )
