"""A decoder: embeddings, causal blocks, and a head (Radford et al. 2019, GPT-2).

    hidden = norm(blocks(embed(tokens))),   logits = hidden Wᵀ

The last norm is there with pre-norm blocks only. In an encoder-decoder the blocks attend to the encoder's output too.

Letters: B batch, N length, E model dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.blocks import Block, ContextState, LayerState
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


class Decoder(TokenNetwork):
    """Tokens to hidden states; `head` takes those to logits, in a step of its own since it may be the widest."""

    def __init__(self, config: NetworkConfig, *, cross_attention: bool = False) -> None:
        super().__init__(config, causal=True, cross_attention=cross_attention)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
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
        """tokens (B, N) int64, key_mask (B, N) bool → hidden states (B, N, E) and the state after these tokens.

        With cross-attention, context is what `read` made of the encoder's output.
        """
        if self.config.segment_length is not None and tokens.shape[1] > self.config.segment_length:
            return self._by_segments(tokens, key_mask, state, self.config.segment_length)
        x = self.dropout(self.embed_tokens(tokens, key_mask, state))
        layers = []
        for i, block in enumerate(self.blocks):
            past, other = None if state is None else state.layers[i], None if context is None else context[i]
            x, layer = self.run_block(block, x, key_mask, past, other)
            layers.append(layer)
        real = tokens.shape[1] if key_mask is None else key_mask.sum(1)
        lengths = tokens.new_zeros(tokens.shape[0]) if state is None else state.lengths
        length = tokens.shape[1] + (0 if state is None else state.length)
        return self.norm(x), DecoderState(tuple(layers), lengths + real, length)

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
