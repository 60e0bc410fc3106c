"""What encoders and decoders begin with, tokens to vectors, and how their weights begin.

    embed(tokens) = P · LayerNorm(word + type + absolute position)      each part but the word an option

where P, the projection from embeddings narrower than the model (ALBERT, Lan et al. 2020, arXiv 1909.11942), comes after
LayerNorm and dropout, as in RoFormer; BERT has no P.

Letters: B batch, N length, E model dim, W width of the embeddings.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lin_attn.positions import LearnedPositions, ScorePositions, sinusoidal
from models.blocks import Block, build_norm
from models.config import NetworkConfig
from models.positions import score_positions

if TYPE_CHECKING:
    from models.decoder import DecoderState


class TokenNetwork(nn.Module):
    """Embeddings with absolute positions, where the config has them, a stack of blocks, and the last norm of pre-norm.

    Args:
        config: of all layers.
        vocab_size: number of tokens, if not the config's.
        causal: the blocks see what came before a token, or all.
        cross_attention: the blocks attend to another sequence too.
    """

    def __init__(
        self,
        config: NetworkConfig,
        *,
        vocab_size: int | None = None,
        causal: bool,
        cross_attention: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.width = config, config.embedding_size or config.d_model
        self.embedding = nn.Embedding(vocab_size or config.vocab_size, self.width)
        self.learned_positions = (
            LearnedPositions(config.max_length, self.width) if config.max_length is not None else None
        )
        self.embedding_norm = build_norm(config, self.width) if config.embedding_norm else nn.Identity()
        narrow = config.embedding_size is not None
        self.projection = nn.Linear(self.width, config.d_model, bias=config.bias) if narrow else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.activation_checkpointing = False

        def block(positions: ScorePositions | None) -> Block:
            return Block(config, positions, causal=causal, cross_attention=cross_attention)

        self.blocks = nn.ModuleList(map(block, score_positions(config, causal=causal)))
        self.norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()

    def run_block(self, block: nn.Module, *inputs: Any) -> Any:
        """The block of these inputs; with activation checkpointing it is computed once more in backward."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def initialize(self) -> None:
        """Normal weights of variance 1/fan-in; with pre-norm less on what is added to the residual stream, by depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.width**-0.5)
        if self.config.norm_position == "post":  # each sum is normalised: nothing adds up
            return
        # Branches add up, 2·n_layers of them: each gets its share of the variance (Radford et al. 2019, GPT-2, §2.3).
        outputs = [output for block in self.blocks if isinstance(block, Block) for output in block.outputs()]
        for output in outputs:
            nn.init.normal_(output.weight, std=(len(outputs) * output.in_features) ** -0.5)

    def embed(
        self, tokens: Tensor, key_mask: Tensor | None, state: "DecoderState | None" = None, added: Tensor | None = None
    ) -> Tensor:
        """What the blocks begin with, (B, N, E); added, (B, N, W) or (W,), goes to the embeddings before the norm."""
        x = self.embed_tokens(tokens, key_mask, state)
        if added is not None:
            x = x + added
        embedded: Tensor = self.projection(self.dropout(self.embedding_norm(x)))
        return embedded

    def embed_tokens(self, tokens: Tensor, key_mask: Tensor | None, state: "DecoderState | None" = None) -> Tensor:
        """Embeddings (B, N, W), with absolute positions, counted over real tokens, where the config has them."""
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
            else:  # embeddings of variance 1/W are brought to the encodings' scale (Vaswani et al. 2017, §3.4)
                x = x * math.sqrt(self.width) + sinusoidal(positions, self.width).to(x.dtype)
        return x


def check_tokens(tokens: Tensor, name: str) -> None:
    """Raises ValueError for anything but integers (B, N)."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"{name} is {tokens.dtype} of shape {tuple(tokens.shape)}; wanted integers (B, N)")
