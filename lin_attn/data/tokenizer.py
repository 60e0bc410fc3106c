"""Tokenizers: bytes to token ids and back.

A tokenizer here takes bytes, never decoded text, so that every file has a token sequence, and it accounts for every one
of those bytes. That count turns a loss per token into bits per byte, which compares across tokenizers.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]


class Piece(NamedTuple):
    """A part of a document's tokens.

    Attributes:
        tokens: (n,) token ids.
        n_bytes: (n,) bytes of the document that each token stands for; None where `Tokenizer.token_bytes` tells.
    """

    tokens: Tokens
    n_bytes: Tokens | None = None


class Tokenizer(Protocol):
    """What the data pipeline and the models need from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end token included."""

    @property
    def end_id(self) -> int:
        """The token that ends a document. Text never encodes to it."""

    @property
    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """(vocab_size,) int64: how many bytes each token stands for, 0 for the end token.

        None where that depends on the text, as with a tokenizer that lower-cases it or has an unknown token; `Piece`
        has the counts then.
        """

    @property
    def fingerprint(self) -> str:
        """Changes whenever `encode` would give different tokens; part of the cache key."""

    def encode(self, data: bytes | str) -> Tokens:
        """Tokens of `data`, without an end token."""

    def encode_pieces(self, pieces: Iterable[bytes]) -> Iterator[Piece]:
        """Tokens of one document that arrives in pieces, cut anywhere, in bounded memory.

        They are those of `encode` on the document as a whole.
        """

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """Bytes of `tokens`; end tokens stand for no bytes."""

    def stream_decoder(self) -> Callable[[int], bytes]:
        """A function that takes the tokens of a text one by one and gives the bytes that each adds."""

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so, such as "[MASK]"; None where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which `tokenizer_from_dict` makes the same tokenizer."""


class ByteTokenizer:
    """Each byte is a token: ids 0..255 are the bytes, 256 ends a document."""

    vocab_size: int = 257
    end_id: int = 256
    fingerprint: str = "bytes-1"

    @property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """(257,) int64: one byte for each token, none for the end token."""
        counts = np.ones(self.vocab_size, dtype=np.int64)
        counts[self.end_id] = 0
        return counts

    def encode(self, data: bytes | str) -> npt.NDArray[np.uint16]:
        """Encodes bytes as they are, or a string as UTF-8.

        Lone surrogates of a string are kept (surrogatepass), since JSON can carry them.

        Args:
            data: The bytes or string.

        Returns:
            (n_bytes,) uint16, without an end token.
        """
        return np.frombuffer(as_bytes(data), dtype=np.uint8).astype(np.uint16)

    def encode_pieces(self, pieces: Iterable[bytes]) -> Iterator[Piece]:
        """Encodes one document piece by piece; for bytes the cuts do not matter."""
        return (Piece(self.encode(piece)) for piece in pieces)

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """Decodes tokens to bytes; end tokens drop out.

        Args:
            tokens: Integers of any shape, read in C order.

        Raises:
            ValueError: A value is no token id.
        """
        ids = check_ids(tokens, self.vocab_size)
        return bytes(ids[ids != self.end_id].astype(np.uint8))

    def stream_decoder(self) -> Callable[[int], bytes]:
        """A token's byte does not depend on those before it."""
        return self.decode

    def special_id(self, text: str) -> int | None:
        """None: its one special token, the end, is written in no way."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Gives {"name": "bytes"}."""
        return {"name": "bytes"}


def as_bytes(data: bytes | str) -> bytes:
    """A string as UTF-8, lone surrogates kept; bytes as they are."""
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data


def check_ids(tokens: npt.ArrayLike, vocab_size: int) -> Tokens:
    """Tokens of any shape as a flat array.

    Raises:
        ValueError: A value is no token id.
    """
    ids = np.asarray(tokens).reshape(-1)
    if ids.size == 0:
        return ids.astype(np.int64)
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"tokens must be integers from 0 to {vocab_size - 1}, got {ids.dtype} from {ids.min()} to {ids.max()}"
        )
    return ids


def tokenizer_from_dict(config: dict[str, Any]) -> Tokenizer:
    """Makes the tokenizer that `Tokenizer.to_dict` described.

    Args:
        config: Plain values with a "name".

    Raises:
        ValueError: The name is unknown, or there are fields that this tokenizer does not have.
    """
    fields = {
        "bytes": {"name"},
        "tokenizers": {"name", "json", "end_token"},
        "special": {"name", "tokenizer", "special"},
    }
    name = config.get("name")
    if name not in fields:
        raise ValueError(f"tokenizer name must be one of {', '.join(fields)}, got {name!r}")
    if set(config) != fields[name]:
        raise ValueError(f'tokenizer "{name}" has the fields {sorted(fields[name])}, got {sorted(config)}')
    if name == "bytes":
        return ByteTokenizer()
    if name == "special":
        from lin_attn.data.special_tokens import SpecialTokens

        return SpecialTokens(tokenizer_from_dict(config["tokenizer"]), config["special"])
    from lin_attn.data.subword import SubwordTokenizer

    return SubwordTokenizer(config["json"], config["end_token"])
