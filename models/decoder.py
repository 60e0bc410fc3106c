"""A decoder: embeddings, causal blocks, and a head (Radford et al. 2019, GPT-2).

    hidden = norm(blocks(embed(tokens))),   logits = hidden Wᵀ

The last norm is there with pre-norm blocks only. In an encoder-decoder the blocks attend to the encoder's output too.
With BERT's head, hidden is LayerNorm(gelu(W_t hidden + b_t)), as wide as the embeddings, and W has a bias.

Letters: B batch, N length, E model dim, F width that the head takes: E, with BERT's head that of the embeddings.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lin_attn.projection import project
from models.blocks import Block, ContextState, LayerState, build_norm
from models.config import NetworkConfig
from models.embedding import TokenNetwork


class DecoderState(NamedTuple):
    """What the decoder remembers of the tokens it has seen.

    Attributes:
        layers: the state of each layer's attention.
        lengths: (B,) int64, how many real tokens each sequence has had, so that padding moves no position.
        length: the greatest that an entry of lengths can be.
    """

    layers: tuple[LayerState, ...]
    lengths: Tensor
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes that the layers' states hold."""
        return sum(layer.nbytes for layer in self.layers)


class HeadTransform(nn.Module):
    """The layer and the norm of BERT's head: (…, E) → (…, W)."""

    def __init__(self, config: NetworkConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, width)
        self.activation = nn.ReLU() if config.ffn == "relu" else nn.GELU()
        self.norm = build_norm(config, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """norm(f(W_t hidden + b_t))."""
        out: Tensor = self.norm(self.activation(project(hidden, self.dense)[0]))
        return out


class Decoder(TokenNetwork):
    """Tokens to hidden states; `head` takes those to logits, in a step of its own since it may be the widest.

    Raises:
        ValueError: for a head that is tied to embeddings of another width.
    """

    def __init__(self, config: NetworkConfig, *, cross_attention: bool = False) -> None:
        super().__init__(config, causal=True, cross_attention=cross_attention)
        bert = config.head == "bert"
        if config.tie_embeddings and not bert and self.width != config.d_model:
            raise ValueError(
                f"network.embedding_size is {self.width} with d_model {config.d_model} and tie_embeddings, and the "
                "head takes d_model; wanted tie_embeddings false, or head bert"
            )
        self.transform = HeadTransform(config, self.width) if bert else nn.Identity()
        self.head = nn.Linear(self.width if bert else config.d_model, config.vocab_size, bias=bert)
        self.initialize()

    def initialize(self) -> None:
        """See TokenNetwork.initialize; a tied head is the embedding."""
        super().initialize()
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        state: DecoderState | None = None,
        context: Sequence[ContextState] | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """tokens (B, N) int64, key_mask (B, N) bool → hidden states (B, N, F) and the state after these tokens.

        With cross-attention, context is what `read` made of the encoder's output.
        """
        if self.config.segment_length is not None and tokens.shape[1] > self.config.segment_length:
            return self._by_segments(tokens, key_mask, state, self.config.segment_length)
        x = self.embed(tokens, key_mask, state)
        layers = []
        for i, block in enumerate(self.blocks):
            past, other = None if state is None else state.layers[i], None if context is None else context[i]
            x, layer = self.run_block(block, x, key_mask, past, other)
            layers.append(layer)
        real = tokens.shape[1] if key_mask is None else key_mask.sum(1)
        lengths = tokens.new_zeros(tokens.shape[0]) if state is None else state.lengths
        length = tokens.shape[1] + (0 if state is None else state.length)
        return self.transform(self.norm(x)), DecoderState(tuple(layers), lengths + real, length)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (…, F) → (…, vocab_size)."""
        return project(hidden, self.head)[0]

    def read(self, memory: Tensor, key_mask: Tensor | None = None) -> tuple[ContextState, ...]:
        """What each layer's cross-attention keeps of the encoder's output (B, N_k, E), made once a source."""
        return tuple(block.cross_attention.read(memory, key_mask) for block in self.blocks if isinstance(block, Block))

    def _by_segments(
        self, tokens: Tensor, key_mask: Tensor | None, state: DecoderState | None, length: int
    ) -> tuple[Tensor, DecoderState]:
        """`forward`, one segment after the other, each with the memory of those before."""
        outs = []
        for start in range(0, tokens.shape[1], length):
            part = slice(start, start + length)
            hidden, state = self.forward(tokens[:, part], None if key_mask is None else key_mask[:, part], state)
            outs.append(hidden)
        assert state is not None
        return torch.cat(outs, dim=1), state
