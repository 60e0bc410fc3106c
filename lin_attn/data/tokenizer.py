"""Tokenizers: bytes to token ids and back.

A tokenizer here works on bytes, never on decoded text, so that every file has a token sequence and every
token stands for a known number of bytes. That number turns a loss per token into bits per byte, which
compares across tokenizers.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What the data pipeline needs from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end token included."""

    @property
    def end_id(self) -> int:
        """The token that ends a document."""

    @property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """(vocab_size,) int64: how many bytes each token stands for, 0 for the end token."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever `encode` would give different tokens; part of the cache key."""

    def encode(self, data: bytes | str) -> Tokens:
        """Tokens of `data`, without an end token."""

    def encode_pieces(self, pieces: Iterable[bytes]) -> Iterator[Tokens]:
        """Tokens of one document that arrives in pieces, cut anywhere, in bounded memory."""

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """Bytes of `tokens`; end tokens stand for no bytes."""

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
        raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def encode_pieces(self, pieces: Iterable[bytes]) -> Iterator[npt.NDArray[np.uint16]]:
        """Encodes one document piece by piece; for bytes the cuts do not matter."""
        return (self.encode(piece) for piece in pieces)

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """Decodes tokens to bytes; end tokens drop out.

        Args:
            tokens: Integers of any shape, read in C order.

        Raises:
            ValueError: A value is no token id.
        """
        ids = np.asarray(tokens).reshape(-1)
        if ids.size == 0:
            return b""
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(
                f"tokens must be integers from 0 to {self.vocab_size - 1}, got {ids.dtype} "
                f"from {ids.min()} to {ids.max()}"
            )
        return bytes(ids[ids != self.end_id].astype(np.uint8))

    def to_dict(self) -> dict[str, Any]:
        """Gives {"name": "bytes"}."""
        return {"name": "bytes"}


def tokenizer_from_dict(config: dict[str, Any]) -> Tokenizer:
    """Makes the tokenizer that `Tokenizer.to_dict` described.

    Args:
        config: Plain values with a "name".

    Raises:
        ValueError: The name is unknown, or there are fields that this tokenizer does not have.
    """
    if config.get("name") != "bytes":
        raise ValueError(f'tokenizer name must be "bytes", got {config.get("name")!r}')
    if unknown := sorted(set(config) - {"name"}):
        raise ValueError(f'tokenizer "bytes" has no options, got {unknown}')
    return ByteTokenizer()
