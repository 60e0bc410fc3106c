"""Segment-level recurrence (Transformer-XL, Dai et al. 2019, arXiv 1901.02860, §3.2): attention with a memory.

    h̃ = [SG(memory) ∘ h],   q = h W_q,   k, v = h̃ W_k, h̃ W_v,   memory ← the last M of SG(h̃)

A segment is what comes in one call. What is kept is the layer's inputs and not its keys, so that W_k and W_v learn from
the memory too, while no gradient (SG) goes back into earlier segments. Positions have to be distances, since those of
the memory are not the ones it was made with.

Letters: B batch, N length, E model dim, M memory length.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from lin_attn.attention.softmax import SoftmaxAttention
from lin_attn.ops import KVCache
from lin_attn.positions import ScorePositions


class SegmentMemory(NamedTuple):
    """The last inputs of a layer, without gradient.

    Attributes:
        hidden: (B, n, E), n ≤ M.
        key_mask: (B, n) bool, True where the token is real; None if all are.
    """

    hidden: Tensor
    key_mask: Tensor | None = None

    @property
    def length(self) -> int:
        """n, the number of tokens that are remembered."""
        return self.hidden.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that the memory holds."""
        return self.hidden.nbytes + (0 if self.key_mask is None else self.key_mask.nbytes)


class SegmentRecurrentAttention(SoftmaxAttention):
    """Causal softmax attention over a segment and the memory_length tokens before it.

    Args:
        d_model, n_heads, n_kv_heads, head_dim, output_norm, bias: as in MultiHeadAttention.
        positions: a term of the scores that depends on distances, TransformerXLPositions in the paper.
        memory_length: M, at least 1.

    Raises:
        ValueError: if the sizes do not divide, or memory_length is less than 1.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        positions: ScorePositions,
        memory_length: int,
        output_norm: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(
            d_model, n_heads, n_kv_heads, head_dim, positions=positions, output_norm=output_norm, bias=bias
        )  # fmt: skip
        if memory_length < 1:
            raise ValueError(f"memory_length is {memory_length}; wanted at least 1")
        self.memory_length = memory_length

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:
        """See MultiHeadAttention.forward; the state is a SegmentMemory."""
        cache = None if state is None else self._recall(state, x)
        out = super().forward(x, context=context, key_mask=key_mask, state=cache)
        return (out, self._remember(state, x, key_mask)) if return_state else out

    def _recall(self, memory: SegmentMemory, x: Tensor) -> KVCache:
        """Keys and values of the memory, by the weights of now."""
        if not isinstance(memory, SegmentMemory):
            raise ValueError(f"state is a {type(memory).__name__}; wanted the SegmentMemory of an earlier call")
        hidden = memory.hidden
        if hidden.dim() != 3 or hidden.shape[::2] != x.shape[::2]:
            wanted = (x.shape[0], "n", x.shape[-1])
            raise ValueError(f"state.hidden has shape {tuple(hidden.shape)}; wanted {wanted}")
        k, v = (rearrange(layer(hidden), "b n (h d) -> b h n d", h=self.n_kv_heads) for layer in (self.key, self.value))
        return KVCache(k, v, memory.length, memory.key_mask)

    def _remember(self, memory: SegmentMemory | None, x: Tensor, key_mask: Tensor | None) -> SegmentMemory:
        kept = slice(-self.memory_length, None)
        if memory is None:
            return SegmentMemory(x.detach()[:, kept], None if key_mask is None else key_mask[:, kept])
        hidden = torch.cat((memory.hidden, x.detach()), dim=1)[:, kept]
        if key_mask is None and memory.key_mask is None:
            return SegmentMemory(hidden)
        masks = (
            hidden.new_ones(part.shape[:2], dtype=torch.bool) if mask is None else mask
            for part, mask in ((memory.hidden, memory.key_mask), (x, key_mask))
        )
        return SegmentMemory(hidden, torch.cat(tuple(masks), dim=1)[:, kept])
