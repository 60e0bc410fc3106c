"""Encoders: every token sees all others (Vaswani et al. 2017, arXiv 1706.03762, §3.1; BERT, Devlin et al. 2019).

    hidden = norm(blocks(embed(tokens)))           the last norm with pre-norm blocks only

BertEncoder adds an embedding of each token's type, such as those of a first and a second text.

Letters: B batch, N length, E model dim.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from models.config import NetworkConfig
from models.embedding import TokenNetwork, check_tokens


@dataclass(frozen=True)
class EncoderConfig(NetworkConfig):
    """An encoder, a pre-norm one by default, with the options of NetworkConfig that need no direction.

    BERT is norm_position post, norm_eps 1e-12, bias, embedding_norm, n_token_types 2, attention softmax, position
    learned with max_length 512; RoFormer is the same with position rope.

    Args:
        n_token_types: number of kinds of tokens, such as those of a first and a second text; 0 for no such embedding.
    """

    n_token_types: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_directed(self)
        if self.n_token_types < 0:
            raise ValueError(f"network.n_token_types is {self.n_token_types}; wanted a number ≥ 0")


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
    if config.head != "linear":
        raise ValueError(f"network.head is {config.head!r}, which is read by a CausalLM only; leave it out")


class Encoder(TokenNetwork):
    """Tokens to hidden states that know of all other tokens."""

    def __init__(self, config: NetworkConfig, *, vocab_size: int | None = None) -> None:
        super().__init__(config, vocab_size=vocab_size, causal=False)
        self.initialize()

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """tokens (B, N) int64, key_mask (B, N) bool → hidden states (B, N, E)."""
        return self.encode(self.embed(tokens, key_mask), key_mask)

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
    """An encoder with token types, where the config has them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.token_types = nn.Embedding(config.n_token_types, self.width) if config.n_token_types else None
        self.initialize()

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """tokens (B, N) int64, key_mask (B, N) bool, token_types (B, N) int64 → hidden states (B, N, E).

        Without token_types all are of type 0.

        Raises:
            ValueError: for tokens, or for token_types that the network has not, or that do not fit the tokens.
        """
        check_tokens(tokens, "tokens")
        types = None
        if token_types is not None:
            check_tokens(token_types, "token_types")
            if self.token_types is None:
                raise ValueError("token_types are given and network.n_token_types is 0; wanted None, or a number there")
            if token_types.shape != tokens.shape:
                raise ValueError(f"token_types has shape {tuple(token_types.shape)}; wanted {tuple(tokens.shape)}")
        if self.token_types is not None:
            types = self.token_types.weight[0] if token_types is None else self.token_types(token_types)
        return self.encode(self.embed(tokens, key_mask, added=types), key_mask)
