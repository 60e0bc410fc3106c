"""Encoders: every token sees all others (Vaswani et al. 2017, arXiv 1706.03762, §3.1; BERT, Devlin et al. 2019).

    hidden = norm(blocks(embed(tokens)))           the last norm with pre-norm blocks only

BertEncoder has what BERT and RoFormer put before the blocks, each part an option:

    embed(tokens) = P · LayerNorm(word + type + absolute position)

where P, the projection from embeddings narrower than the model (ALBERT, Lan et al. 2020, arXiv 1909.11942), comes after
LayerNorm and dropout, as in RoFormer.

Letters: B batch, N length, E model dim, W width of the embeddings.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from models.blocks import build_norm
from models.config import NetworkConfig
from models.embedding import TokenNetwork, check_tokens


@dataclass(frozen=True)
class EncoderConfig(NetworkConfig):
    """An encoder, a pre-norm one by default, with the options of NetworkConfig that need no direction.

    BERT is norm_position post, norm_eps 1e-12, bias, embedding_norm, n_token_types 2, attention softmax, position
    learned with max_length 512; RoFormer is the same with position rope.

    Args:
        n_token_types: number of kinds of tokens, such as those of a first and a second text; 0 for no such embedding.
        embedding_norm: a norm on the embeddings.
        embedding_size: width of the embeddings, projected to d_model; d_model without a projection by default.
    """

    n_token_types: int = 0
    embedding_norm: bool = False
    embedding_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_directed(self)
        if self.n_token_types < 0:
            raise ValueError(f"network.n_token_types is {self.n_token_types}; wanted a number ≥ 0")
        if self.embedding_size is not None and self.embedding_size < 1:
            raise ValueError(f"network.embedding_size is {self.embedding_size}; wanted at least 1, or null for d_model")


def refuse_directed(config: NetworkConfig) -> None:
    """Raises ValueError for options that make sense only where a token sees nothing but those before it."""
    if config.position == "xpos":
        raise ValueError(
            "network.position is 'xpos' in an encoder; it grows without bound ahead of a token, and is for causal "
            "networks: wanted rope, or another position"
        )
    if config.memory_length is not None:
        raise ValueError(
            f"network.memory_length is {config.memory_length} in an encoder; only a causal network has a memory"
        )


class Encoder(TokenNetwork):
    """Tokens to hidden states that know of all other tokens."""

    def __init__(self, config: NetworkConfig, *, vocab_size: int | None = None, width: int | None = None) -> None:
        super().__init__(config, vocab_size=vocab_size, width=width, causal=False)
        self.initialize()

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """tokens (B, N) int64, key_mask (B, N) bool → hidden states (B, N, E)."""
        return self.encode(self.dropout(self.embed_tokens(tokens, key_mask)), key_mask)

    def encode(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Embeddings (B, N, E) through all blocks.

        Raises:
            ValueError: for padding on the left with rope before the feature map.
        """
        before = self.config.rotates_features and self.config.rope == "before"
        if before and key_mask is not None and bool((~key_mask[:, :1].all(1) & key_mask.any(1)).any()):
            raise ValueError(
                "key_mask hides the first token and network.rope is 'before': its weights depend on the positions "
                "themselves, which padding on the left moves; wanted padding on the right"
            )
        for block in self.blocks:
            x, _ = self.run_block(block, x, key_mask, None)
        out: Tensor = self.norm(x)
        return out


class BertEncoder(Encoder):
    """An encoder with token types, a norm on its embeddings and a projection of them, where the config has them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, width=config.embedding_size)
        width = self.width
        self.token_types = nn.Embedding(config.n_token_types, width) if config.n_token_types else None
        self.embedding_norm = build_norm(config, width) if config.embedding_norm else nn.Identity()
        narrow = config.embedding_size is not None
        self.projection = nn.Linear(width, config.d_model, bias=config.bias) if narrow else nn.Identity()
        self.initialize()

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """tokens (B, N) int64, key_mask (B, N) bool, token_types (B, N) int64 → hidden states (B, N, E).

        Without token_types all are of type 0.

        Raises:
            ValueError: for tokens, or for token_types that the network has not, or that do not fit the tokens.
        """
        check_tokens(tokens, "tokens")
        x = self.embed_tokens(tokens, key_mask)
        if token_types is not None:
            check_tokens(token_types, "token_types")
            if self.token_types is None:
                raise ValueError("token_types are given and network.n_token_types is 0; wanted None, or a number there")
            if token_types.shape != tokens.shape:
                raise ValueError(f"token_types has shape {tuple(token_types.shape)}; wanted {tuple(tokens.shape)}")
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        return self.encode(self.projection(self.dropout(self.embedding_norm(x))), key_mask)
