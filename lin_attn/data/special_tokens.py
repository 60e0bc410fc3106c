"""Tokens that stand for no text, by name, on top of any tokenizer.

pad        fills a row up                                     [PAD] <pad>
class      opens a text that is classified                    [CLS] <cls> <s>
separator  ends a text or one of a pair                       [SEP] <sep> </s>
mask       stands where a token is to be guessed              [MASK] <mask>
begin      opens what a decoder writes                        [BOS] <bos> <s> <|begin_of_text|>

A tokenizer that has one of these texts keeps its own id for it; the others get ids behind its vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lin_attn.data.tokenizer import Piece, Tokenizer, Tokens, check_ids

# How tokenizers write them; the first that is there is taken.
WRITTEN = {
    "pad": ("[PAD]", "<pad>"),
    "class": ("[CLS]", "<cls>", "<s>"),
    "separator": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "begin": ("[BOS]", "<bos>", "<s>", "<|begin_of_text|>"),
}


class SpecialTokens:
    """A tokenizer with special tokens.

    Text is encoded as by the tokenizer itself; the tokens that are added never come of it, and decode to nothing.

    Args:
        tokenizer: Any tokenizer. One that is a SpecialTokens already is extended by what it lacks.
        names: Of pad, class, separator, mask, begin; those that are added get their ids in this order.

    Attributes:
        tokenizer: The one underneath, without special tokens by name.
        names: As given, after those that the tokenizer had.
        ids: The id of each name.
        vocab_size: Number of token ids, those that are added included.
        end_id: The token that ends a document, which is the tokenizer's own, and may be its separator too.

    Raises:
        ValueError: A name is unknown or comes twice.
    """

    def __init__(self, tokenizer: Tokenizer, names: Iterable[str] = tuple(WRITTEN)) -> None:
        wanted = list(names)
        unknown = [name for name in wanted if name not in WRITTEN]
        if unknown or len(set(wanted)) < len(wanted):
            raise ValueError(f"names of special tokens are {wanted}; wanted some of {list(WRITTEN)}, each once")
        if isinstance(tokenizer, SpecialTokens):
            wanted = [*tokenizer.names, *(name for name in wanted if name not in tokenizer.names)]
            tokenizer = tokenizer.tokenizer
        self.tokenizer, self.names = tokenizer, tuple(wanted)
        self.end_id: int = tokenizer.end_id
        self.vocab_size: int = tokenizer.vocab_size
        self.ids: dict[str, int] = {}
        for name in wanted:
            own = next((found for text in WRITTEN[name] if (found := tokenizer.special_id(text)) is not None), None)
            self.ids[name] = self.vocab_size if own is None else own
            self.vocab_size += own is None

    def __repr__(self) -> str:
        return f"SpecialTokens({self.tokenizer!r}, {self.ids})"

    @property
    def special_ids(self) -> Tokens:
        """All ids that have a name, and that of the end token, in rising order: (n,) int64."""
        return np.unique(np.array([*self.ids.values(), self.end_id], dtype=np.int64))

    @property
    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """(vocab_size,) int64, 0 for the tokens that are added; None where the tokenizer's depend on the text."""
        counts = self.tokenizer.token_bytes
        return None if counts is None else np.pad(counts, (0, self.vocab_size - len(counts)))

    @property
    def fingerprint(self) -> str:
        """The tokenizer's own, and the ids by name."""
        return f"{self.tokenizer.fingerprint} with {' '.join(f'{name}={index}' for name, index in self.ids.items())}"

    def special_id(self, text: str) -> int | None:
        """The tokenizer's own special tokens by their text, and those that are added by the first text they have."""
        added = (self.ids[name] for name in self.names if WRITTEN[name][0] == text)
        return next(added, self.tokenizer.special_id(text))

    def encode(self, data: bytes | str) -> Tokens:
        """Tokens of `data`, as the tokenizer gives them: no special token is added."""
        return self.tokenizer.encode(data)

    def encode_pieces(self, pieces: Iterable[bytes]) -> Iterator[Piece]:
        """Tokens of one document that arrives in pieces."""
        return self.tokenizer.encode_pieces(pieces)

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """Bytes of `tokens`; those that were added drop out.

        Args:
            tokens: Integers of any shape, read in C order.

        Raises:
            ValueError: A value is no token id.
        """
        ids = check_ids(tokens, self.vocab_size)
        return self.tokenizer.decode(ids[ids < self.tokenizer.vocab_size])

    def stream_decoder(self) -> Callable[[int], bytes]:
        """What each token of a text adds to it; nothing, for those that were added."""
        decoder, known = self.tokenizer.stream_decoder(), self.tokenizer.vocab_size
        return lambda token: decoder(token) if token < known else self.decode([token])

    def to_dict(self) -> dict[str, Any]:
        """The tokenizer underneath and the names."""
        return {"name": "special", "tokenizer": self.tokenizer.to_dict(), "special": list(self.names)}
