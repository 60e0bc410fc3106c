"""A decoder of pre-norm blocks (Radford et al. 2019; norm first: Xiong et al. 2020, arXiv 2002.04745).

    x ← x + attention(norm(x)),   x ← x + feed_forward(norm(x)),   hidden = norm(x),   logits = hidden Wᵀ

Letters: B batch, N length, E model dim.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lin_attn import KVCache, LinearState
from lin_attn.attention import LinearAttention, MultiHeadAttention, SoftmaxAttention
from lin_attn.positions import LearnedPositions, sinusoidal
from models.config import NetworkConfig


class DecoderState(NamedTuple):
    """What the decoder remembers of the tokens it has seen.

    Attributes:
        layers: the state of each layer's attention.
        lengths: (B,) int64, how many real tokens each sequence has had, so that padding moves no position.
        length: the greatest that an entry of lengths can be.
    """

    layers: tuple[LinearState | KVCache, ...]
    lengths: Tensor
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes that the layers' states hold."""
        return sum(layer.nbytes for layer in self.layers)


def build_attention(config: NetworkConfig) -> MultiHeadAttention:
    """The attention that the config names."""
    if config.attention == "softmax":
        return SoftmaxAttention(
            config.d_model,
            config.n_heads,
            config.n_kv_heads,
            rope=config.position == "rope",
            output_norm=config.output_norm,
        )
    return LinearAttention(
        config.d_model,
        config.n_heads,
        config.n_kv_heads,
        feature_map=config.feature_map,
        rope=config.rope if config.position == "rope" else "none",
        normalize=config.normalize,
        output_norm=config.output_norm,
    )


def build_norm(config: NetworkConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the residual stream."""
    return nn.LayerNorm(config.d_model) if config.norm == "layer" else nn.RMSNorm(config.d_model, eps=1e-6)


class FeedForward(nn.Module):
    """W_out gelu(W_in x), or SwiGLU, W_out (silu(W_gate x) ⊙ W_in x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        gated = config.ffn == "swiglu"
        # Three matrices of 8/3 E hold as many parameters as two of 4 E; a multiple of 16 suits matrix products.
        d_ff = config.d_ff or (round(config.d_model / 6) * 16 if gated else 4 * config.d_model)
        self.inner = nn.Linear(config.d_model, d_ff, bias=False)
        self.gate = nn.Linear(config.d_model, d_ff, bias=False) if gated else None
        self.output = nn.Linear(d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) → (B, N, E)."""
        hidden = F.gelu(self.inner(x)) if self.gate is None else F.silu(self.gate(x)) * self.inner(x)
        out: Tensor = self.output(hidden)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each normalised on its way in and added to the residual stream."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = build_attention(config)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, key_mask: Tensor | None, state: LinearState | KVCache | None
    ) -> tuple[Tensor, LinearState | KVCache]:
        """(B, N, E) → (B, N, E) and the attention's state after these tokens."""
        mixed, state = self.attention(self.attention_norm(x), key_mask=key_mask, state=state, return_state=True)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), state


class Decoder(nn.Module):
    """Tokens to hidden states; `head` takes those to logits, in a step of its own since it may be the widest."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.learned_positions = (
            LearnedPositions(config.max_length, config.d_model) if config.max_length is not None else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = build_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.initialize()

    def initialize(self) -> None:
        """Normal weights of variance 1/fan-in; less on what each layer adds to the residual stream, by depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
        # 2·n_layers branches add up: each gets its share of the variance (Radford et al. 2019, GPT-2, §2.3).
        for block in self.blocks:
            assert isinstance(block, Block)
            for output in (block.attention.output, block.feed_forward.output):
                nn.init.normal_(output.weight, std=(2 * self.config.n_layers * output.in_features) ** -0.5)
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        state: DecoderState | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """tokens (B, N) int64, key_mask (B, N) bool → hidden states (B, N, E) and the state after these tokens."""
        x = self.embed(tokens, key_mask, state)
        layers = []
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            inputs = (x, key_mask, None if state is None else state.layers[i])
            x, layer = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
            layers.append(layer)
        real = tokens.shape[1] if key_mask is None else key_mask.sum(1)
        lengths = tokens.new_zeros(tokens.shape[0]) if state is None else state.lengths
        length = tokens.shape[1] + (0 if state is None else state.length)
        return self.norm(x), DecoderState(tuple(layers), lengths + real, length)

    def embed(self, tokens: Tensor, key_mask: Tensor | None, state: DecoderState | None) -> Tensor:
        """Embeddings (B, N, E), with absolute positions, counted over real tokens, where the config has them."""
        x: Tensor = self.embedding(tokens)
        if self.config.position in ("sinusoidal", "learned"):
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            if key_mask is not None:
                positions = (key_mask.cumsum(1) - 1).clamp(min=0)
            if state is not None:
                positions = positions + state.lengths[:, None]
            if self.learned_positions is not None:
                past = 0 if state is None else state.length
                x = x + self.learned_positions(positions, end=past + tokens.shape[1])
            else:  # embeddings of variance 1/E are brought to the encodings' scale (Vaswani et al. 2017, §3.4)
                x = x * math.sqrt(self.config.d_model) + sinusoidal(positions, self.config.d_model).to(x.dtype)
        dropped: Tensor = self.dropout(x)
        return dropped
