"""An encoder-decoder (Vaswani et al. 2017, arXiv 1706.03762, §3): a decoder that attends to the encoder's output.

    memory = encoder(source),   logits = W decoder(target, memory)

Positions, of whatever kind, are of self-attention and of the embeddings; cross-attention has none. Of the memory each
decoder layer keeps its keys and values (softmax), or their sums (linear, whose size does not depend on the source's
length): made once a source, and read by every token that is decoded.

Letters: B batch, N source length, M target length, E model dim.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from models.blocks import ContextState, LayerState
from models.config import NetworkConfig
from models.decoder import Decoder, DecoderState
from models.encoder import Encoder, refuse_directed

State = TypeVar("State", bound=LayerState)


@dataclass(frozen=True)
class Seq2SeqConfig(NetworkConfig):
    """An encoder and a decoder of the same blocks.

    Args:
        n_decoder_layers: number of the decoder's blocks; n_layers, those of the encoder, by default.
        source_vocab_size: number of the source's tokens, with an embedding of their own; by default source and target
            have one vocabulary and one embedding.
    """

    n_decoder_layers: int | None = None
    source_vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_directed(self)
        for name in ("n_decoder_layers", "source_vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"network.{name} is {value}; wanted at least 1, or null for the default")


class TranslationState(NamedTuple):
    """What decoding goes on from.

    Attributes:
        context: of each decoder layer, what its cross-attention keeps of the source; the same at every step.
        decoder: what the decoder remembers of the target so far; None before its first token.
    """

    context: tuple[ContextState, ...]
    decoder: DecoderState | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that both hold."""
        return sum(layer.nbytes for layer in self.context) + (0 if self.decoder is None else self.decoder.nbytes)

    def select(self, rows: Tensor) -> "TranslationState":
        """The state of the sequences of some rows, (R,) int64, in that order, each as often as it is named."""
        decoder = self.decoder
        if decoder is not None:
            layers = tuple(_select(layer, rows) for layer in decoder.layers)
            decoder = DecoderState(layers, decoder.lengths[rows], decoder.length)
        return TranslationState(tuple(_select(layer, rows) for layer in self.context), decoder)


def _select(state: State, rows: Tensor) -> State:
    """Rows of each tensor of a layer's state; they all have the batch as their first axis."""
    parts: Any = (part[rows] if isinstance(part, Tensor) else part for part in state)
    return type(state)(*parts)


class EncoderDecoder(nn.Module):
    """Source and target tokens to hidden states of the target; `head` takes those to logits."""

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config, vocab_size=config.source_vocab_size)
        self.decoder = Decoder(
            replace(config, n_layers=config.n_decoder_layers or config.n_layers), cross_attention=True
        )
        if config.source_vocab_size is None:
            self.encoder.embedding = self.decoder.embedding
        self.head = self.decoder.head

    def read(self, source: Tensor, source_mask: Tensor | None = None) -> TranslationState:
        """source (B, N) int64, source_mask (B, N) bool → what decoding begins with."""
        return TranslationState(self.decoder.read(self.encoder(source, source_mask), source_mask))

    def forward(
        self, target: Tensor, target_mask: Tensor | None, state: TranslationState
    ) -> tuple[Tensor, TranslationState]:
        """target (B, M) int64, target_mask (B, M) bool → hidden states (B, M, E) and the state after these tokens."""
        hidden, decoder = self.decoder(target, target_mask, state.decoder, state.context)
        return hidden, TranslationState(state.context, decoder)


def check_fits(name: str, mask: Tensor | None, tokens: Tensor) -> None:
    """Raises ValueError for a mask that is no bool of the tokens' shape."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ValueError(f"{name} is {mask.dtype} of shape {tuple(mask.shape)}; wanted bool {tuple(tokens.shape)}")
