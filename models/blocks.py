"""The block that every network of the zoo is stacked from: attention and feed-forward on a residual stream.

    pre-norm    x ← x + branch(norm(x))          (Xiong et al. 2020, arXiv 2002.04745)
    post-norm   x ← norm(x + branch(x))          (Vaswani et al. 2017, arXiv 1706.03762)

for each branch in turn: self-attention; cross-attention, in the decoder of an encoder-decoder; feed-forward.

Letters: B batch, N length, E model dim.
"""

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from lin_attn import KVCache, LinearState
from lin_attn.attention import (
    LinearAttention,
    MultiHeadAttention,
    SegmentMemory,
    SegmentRecurrentAttention,
    SoftmaxAttention,
)
from lin_attn.positions import ScorePositions
from lin_attn.projection import project, project_gelu
from models.config import NetworkConfig
from models.positions import rotation

LayerState = LinearState | KVCache | SegmentMemory
ContextState = LinearState | KVCache  # what a layer's cross-attention keeps of the encoder's output


def build_attention(
    config: NetworkConfig, positions: ScorePositions | None = None, *, causal: bool = True
) -> MultiHeadAttention:
    """The self-attention that the config names, with a layer's own `score_positions`."""
    sizes = (config.d_model, config.n_heads, config.n_kv_heads)
    rotary = rotation(config)
    if config.attention == "linear":
        return LinearAttention(
            *sizes,
            feature_map=config.feature_map,
            rope="none" if rotary is None else config.rope,
            rotary=rotary,
            normalize=config.normalize,
            causal=causal,
            output_norm=config.output_norm,
            bias=config.bias,
        )
    if config.memory_length is None:
        return SoftmaxAttention(
            *sizes,
            rope=rotary is not None,
            rotary=rotary,
            positions=positions,
            causal=causal,
            output_norm=config.output_norm,
            bias=config.bias,
        )
    if not causal or positions is None:
        raise ValueError(f"network.memory_length is {config.memory_length}; only a causal network has a memory")
    return SegmentRecurrentAttention(
        *sizes,
        positions=positions,
        memory_length=config.memory_length,
        output_norm=config.output_norm,
        bias=config.bias,
    )


def build_cross_attention(config: NetworkConfig) -> MultiHeadAttention:
    """Attention to another sequence, of the config's mechanism and without positions.

    RoFormer rotates in self-attention only: m − n is a distance within one text, and none between a place in a
    target and a place in its source. The same goes for terms of the scores.
    """
    sizes = (config.d_model, config.n_heads, config.n_kv_heads)
    if config.attention == "softmax":
        return SoftmaxAttention(*sizes, rope=False, causal=False, output_norm=config.output_norm, bias=config.bias)
    return LinearAttention(
        *sizes,
        feature_map=config.feature_map,
        rope="none",
        normalize=config.normalize,
        causal=False,
        output_norm=config.output_norm,
        bias=config.bias,
    )


def build_norm(config: NetworkConfig, width: int | None = None) -> nn.Module:
    """LayerNorm or RMSNorm over the residual stream, or over vectors of another width."""
    width = config.d_model if width is None else width
    if config.norm == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps or 1e-5)
    return nn.RMSNorm(width, eps=config.norm_eps or 1e-6)


class FeedForward(nn.Module):
    """W_out f(W_in x), f gelu or relu, or SwiGLU, W_out (silu(W_gate x) ⊙ W_in x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        gated = config.ffn == "swiglu"
        # Three matrices of 8/3 E hold as many parameters as two of 4 E; a multiple of 16 suits matrix products.
        d_ff = config.d_ff or (round(config.d_model / 6) * 16 if gated else 4 * config.d_model)
        self.inner = nn.Linear(config.d_model, d_ff, bias=config.bias)
        self.gate = nn.Linear(config.d_model, d_ff, bias=config.bias) if gated else None
        self.output = nn.Linear(d_ff, config.d_model, bias=config.bias)
        self.relu = config.ffn == "relu"

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) → (B, N, E)."""
        if self.gate is not None:
            gate, inner = project(x, self.gate, self.inner)
            hidden = F.silu(gate) * inner
        elif self.relu:
            hidden = F.relu(project(x, self.inner)[0])
        else:
            hidden = project_gelu(x, self.inner)
        return project(hidden, self.output)[0]


class Block(nn.Module):
    """Self-attention, cross-attention if asked for, and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        config: NetworkConfig,
        positions: ScorePositions | None = None,
        *,
        causal: bool = True,
        cross_attention: bool = False,
    ) -> None:
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.attention_norm = build_norm(config)
        self.attention = build_attention(config, positions, causal=causal)
        if cross_attention:
            self.cross_attention_norm = build_norm(config)
            self.cross_attention = build_cross_attention(config)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else None

    def forward(
        self, x: Tensor, key_mask: Tensor | None, state: LayerState | None, context: ContextState | None = None
    ) -> tuple[Tensor, LayerState]:
        """(B, N, E) → (B, N, E) and the attention's state after these tokens."""
        after: Any = None

        def attend(x: Tensor) -> Tensor:
            nonlocal after
            mixed: Tensor
            mixed, after = self.attention(x, key_mask=key_mask, state=state, return_state=True)
            return mixed

        x = self._add(x, attend, self.attention_norm)
        if context is not None:
            x = self._add(x, lambda x: self.cross_attention.attend(x, context), self.cross_attention_norm)
        return self._add(x, self.feed_forward, self.feed_forward_norm), after

    def outputs(self) -> list[nn.Linear]:
        """The last projection of each branch, which writes to the residual stream."""
        branches = [self.attention, getattr(self, "cross_attention", None), self.feed_forward]
        return [branch.output for branch in branches if branch is not None]

    def _add(self, x: Tensor, branch: Callable[[Tensor], Tensor], norm: nn.Module) -> Tensor:
        added = branch(cast(Tensor, norm(x)) if self.pre_norm else x)
        if self.dropout is not None:
            added = self.dropout(added)
        x = x + added
        return x if self.pre_norm else cast(Tensor, norm(x))
