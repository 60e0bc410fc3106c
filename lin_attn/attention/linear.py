"""Linear attention as a module: RoFormer's eq. 19 (arXiv 2104.09864) between projections.

    out_m = Σ_{n≤m} (R_m φ(q_m))ᵀ (R_n φ(k_n)) v_n / Σ_{n≤m} φ(q_m)ᵀ φ(k_n)

The op is `lin_attn.linear_attention` (with xPos `lin_attn.ops.xpos_linear_attention`); here stand the projections and
the choices that a model makes once.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lin_attn.attention.linear_step import step
from lin_attn.attention.multi_head import MultiHeadAttention
from lin_attn.feature_maps import feature_map as find_feature_map
from lin_attn.ops import LinearState, linear_attention, xpos_linear_attention
from lin_attn.ops.backends import BACKENDS
from lin_attn.positions import Rotary, XPos


class LinearAttention(MultiHeadAttention):
    """Multi-head linear attention, O(N) in time and O(1) in state.

    Args:
        d_model, n_heads, n_kv_heads, head_dim, causal, output_norm, bias: as in MultiHeadAttention.
        feature_map: φ, by name or as a callable (…, D) → (…, D); a module's parameters are learned.
        rope: "after" φ (eq. 19), "before" it, or "none".
        rope_base: base of the rotary wavelengths.
        rotary: the rotation in full (partial, scaled, or xPos, which comes after φ), in place of rope_base.
        normalize: divide by the unrotated sum of weights.
        backend: of `lin_attn.linear_attention`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        feature_map: str | Callable[[Tensor], Tensor] = "elu1",
        rope: str = "after",
        rope_base: float = 10000.0,
        rotary: Rotary | XPos | None = None,
        normalize: bool = True,
        causal: bool = True,
        output_norm: bool = False,
        bias: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            d_model, n_heads, n_kv_heads, head_dim, causal=causal, output_norm=output_norm, bias=bias
        )  # fmt: skip
        if isinstance(feature_map, str):
            feature_map = find_feature_map(feature_map)
        if not callable(feature_map):
            raise ValueError(f"feature_map is {feature_map!r}; wanted a name or a callable on (…, D)")
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; wanted one of {', '.join(map(repr, BACKENDS))}")
        if rope not in ("after", "before", "none"):
            raise ValueError(f"rope is {rope!r}; wanted 'after', 'before' or 'none'")
        self.feature_map, self.rope, self.normalize, self.backend = feature_map, rope, normalize, backend
        self.rotary = self.checked_rotation(rope != "none", rope_base, rotary)
        if isinstance(self.rotary, XPos) and rope == "before":
            raise ValueError("rope is 'before' and rotary is an XPos, whose decay no feature map keeps; wanted 'after'")

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: LinearState | None = None,
        return_state: bool = False,
    ) -> Any:
        """See MultiHeadAttention.forward."""
        if state is not None and return_state and context is None and key_mask is None:
            stepped = step(self, x, state) if type(self) is LinearAttention else None
            if stepped is not None:
                return stepped
        return super().forward(x, context=context, key_mask=key_mask, state=state, return_state=return_state)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, state: LinearState | None
    ) -> tuple[Tensor, LinearState]:
        """See MultiHeadAttention.mix."""
        if isinstance(self.rotary, XPos):
            return xpos_linear_attention(
                q,
                k,
                v,
                xpos=self.rotary,
                feature_map=self.feature_map,
                normalize=self.normalize,
                key_mask=key_mask,
                state=state,
                return_state=True,
                backend=self.backend,
            )
        return linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            rotary=self.rotary,
            rope="after" if self.rope == "none" else self.rope,
            normalize=self.normalize,
            causal=self.causal,
            key_mask=key_mask,
            state=state,
            return_state=True,
            backend=self.backend,
        )
