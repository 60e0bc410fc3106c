"""Tokenizers of the `tokenizers` library, made to account for every byte.

A byte-level tokenizer (GPT-2, Llama 3, our own BPE) maps each byte to a letter and merges letters, so that a token
stands for the same bytes wherever it comes up: they are looked up by its id, and any bytes round-trip, valid UTF-8 or
not. Others change the text first (lower case, NFC) or have an unknown token. There a token stands for the bytes of the
original text from the end of the token before it to its own end, by the library's offsets; so the counts of a document
sum to its size all the same.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers.decoders import DecodeStream

from lin_attn.data.chunks import cut
from lin_attn.data.tokenizer import Piece, Tokens, as_bytes, check_ids

# The library warns at each fork unless this is set; worker processes set it to false, as its threads are not in them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

BATCH_CHUNKS = 64
_INVALID = re.compile("([\udc80-\udcff]+)")  # how surrogateescape writes bytes that are no UTF-8


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library.

    The end token is never found in text: what reads like it is text. So are other special tokens, but those that the
    model itself has in its vocabulary; tokens that were added without being special are found. BPE dropout, padding and
    truncation are switched off.

    Args:
        definition: The contents of a tokenizer.json.
        end_token: Which token ends a document.

    Raises:
        ValueError: The definition is none, or has no such token.
    """

    def __init__(self, definition: str, end_token: str) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"cannot read the tokenizer: {error}; wanted the contents of a tokenizer.json") from None
        end_id = self._tokenizer.token_to_id(end_token)
        if end_id is None:
            raise ValueError(
                f"end_token is {end_token!r}, which the tokenizer does not have; "
                f"its special tokens are {special_tokens(self._tokenizer)}"
            )
        self._definition, self._end_token = definition, end_token
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.add_special_tokens([end_token])
        self._tokenizer.encode_special_tokens = True
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        self.end_id: int = end_id
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        self._bytes_of = _bytes_of_tokens(self._tokenizer, end_id)
        if self._bytes_of is not None:
            self._byte_ids = {value: index for index, value in enumerate(self._bytes_of) if len(value) == 1}

    def __reduce__(self) -> tuple[Any, ...]:
        return SubwordTokenizer, (self._definition, self._end_token)

    @property
    def token_bytes(self) -> npt.NDArray[np.int64] | None:
        """(vocab_size,) int64 for a byte-level tokenizer, else None."""
        return None if self._bytes_of is None else np.array([len(value) for value in self._bytes_of], dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Hash of the definition, the end token, and the rules of this file."""
        content = json.dumps([1, json.loads(self._definition), self._end_token], sort_keys=True)
        return f"tokenizers {hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"

    def encode(self, data: bytes | str) -> Tokens:
        """Tokens of `data`: (n,) int32, without an end token or any other special token."""
        return np.concatenate([np.empty(0, np.int32), *(p.tokens for p in self.encode_pieces([as_bytes(data)]))])

    def encode_pieces(self, pieces: Iterable[bytes]) -> Iterator[Piece]:
        """Encodes one document, which is cut as `lin_attn.data.chunks` says."""
        chunks = cut(pieces)
        encode = self._encode_text if self._bytes_of is None else self._encode_bytes
        return encode(iter(lambda: list(islice(chunks, BATCH_CHUNKS)), []))

    def _encode_bytes(self, batches: Iterator[list[bytes]]) -> Iterator[Piece]:
        for batch in batches:
            parts: list[list[int] | None] = []  # None for what the library encodes
            texts = []
            for chunk in batch:
                for i, part in enumerate(_INVALID.split(chunk.decode("utf-8", "surrogateescape"))):
                    if i % 2:  # each byte that is no UTF-8 is the token of that byte
                        parts.append([self._byte_ids[bytes([ord(letter) - 0xDC00])] for letter in part])
                    elif part:
                        parts.append(None)
                        texts.append(part)
            found = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            ids = [next(found).ids if part is None else part for part in parts]
            tokens = np.concatenate([np.array(part, dtype=np.int32) for part in ids])
            # Merges that spell out the end token give its id: there its bytes stand one by one.
            around = np.split(tokens, np.flatnonzero(tokens == self.end_id))
            spelt = [self._byte_ids[bytes([byte])] for byte in self._end_token.encode("utf-8")]
            yield Piece(np.concatenate([around[0], *(part for rest in around[1:] for part in (spelt, rest[1:]))]))

    def _encode_text(self, batches: Iterator[list[bytes]]) -> Iterator[Piece]:
        ids: Tokens = np.empty(0, dtype=np.int32)
        counts: Tokens = np.empty(0, dtype=np.int64)
        before = 0  # bytes ahead of the document's first token, such as blanks that are dropped: they are that token's
        for batch in batches:
            for text, encoding in self._encodings([chunk.decode("utf-8", "surrogateescape") for chunk in batch]):
                places = np.concatenate([[0], np.cumsum(_character_bytes(text))])
                if not encoding.ids:
                    if len(ids):
                        counts[-1] += places[-1]
                    else:
                        before += int(places[-1])
                    continue
                if len(ids):  # held back until it was known whether more bytes would fall to its last token
                    yield Piece(ids, counts.astype(np.int32))
                stops = np.maximum.accumulate(np.array([stop for _, stop in encoding.offsets]))
                ids, counts = np.array(encoding.ids, dtype=np.int32), np.diff(places[stops], prepend=0)
                counts[0] += before
                counts[-1] += places[-1] - places[stops[-1]]
                before = 0
        if len(ids):
            yield Piece(ids, counts.astype(np.int32))

    def _encodings(self, texts: list[str]) -> Iterator[tuple[str, Any]]:
        """Texts, in order, and what the library makes of them; a text that gives the end token is cut within it."""
        # The library takes no surrogates; one replacement character for each invalid byte keeps the offsets.
        clean = [_INVALID.sub(_replaced, text) for text in texts]
        found = self._tokenizer.encode_batch(clean, add_special_tokens=False)
        for text, encoding in zip(texts, found, strict=True):
            if self.end_id not in encoding.ids:
                yield text, encoding
                continue
            spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token == self.end_id]
            if any(stop - start < 2 for start, stop in spans):
                start, stop = next(span for span in spans if span[1] - span[0] < 2)
                raise ValueError(
                    f"end_token is {self._end_token!r}, which the tokenizer makes of {text[start:stop]!r} too; "
                    f"choose another of {special_tokens(self._tokenizer)}"
                )
            cuts = [0, *(start + 1 for start, _ in spans), len(text)]
            yield from self._encodings([text[a:b] for a, b in pairwise(cuts)])

    def decode(self, tokens: npt.ArrayLike) -> bytes:
        """Decodes tokens to bytes, exactly for a byte-level tokenizer, else to the text that the library makes of them.

        Args:
            tokens: Integers of any shape, read in C order.

        Raises:
            ValueError: A value is no token id.
        """
        ids = check_ids(tokens, self.vocab_size).tolist()
        if self._bytes_of is not None:
            return b"".join([self._bytes_of[index] for index in ids])
        return self._tokenizer.decode(ids, skip_special_tokens=True).encode("utf-8")

    def stream_decoder(self) -> Callable[[int], bytes]:
        """What each token of a text adds to it; elsewhere than at byte level that depends on the tokens before."""
        if self._bytes_of is not None:
            return self.decode
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: (stream.step(self._tokenizer, token) or "").encode("utf-8")

    def special_id(self, text: str) -> int | None:
        """The id of a token that was added by this text, or that stands so in a vocabulary of words.

        In a byte-level vocabulary what was not added is text, such as the <s> of HTML.
        """
        added = {token.content: index for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        if text in added or self._bytes_of is not None:
            return added.get(text)
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The tokenizer's definition and end token: strings."""
        return {"name": "tokenizers", "json": self._definition, "end_token": self._end_token}


def special_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The special tokens of a tokenizer, by id."""
    added = tokenizer.get_added_tokens_decoder()
    return [added[index].content for index in sorted(added) if added[index].special]


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _bytes_of_tokens(tokenizer: tokenizers.Tokenizer, end_id: int) -> list[bytes] | None:
    """Each token's bytes, or None where they depend on the text or are not all of it."""
    parts = json.loads(tokenizer.to_str())
    model, outer = parts["model"], parts["pre_tokenizer"] or {}
    steps = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    lossless = (
        parts["normalizer"] is None
        and model["type"] == "BPE"
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and bool(steps)
        and steps[-1].get("type") == "ByteLevel"
        and all(step["type"] in ("ByteLevel", "Digits", "Split") for step in steps)
        and not any(step.get("add_prefix_space") or step.get("behavior") == "Removed" for step in steps)
    )
    letters = byte_letters()
    if not lossless or not set(letters) <= set(model["vocab"]):
        return None
    table = [b""] * (max(tokenizer.get_vocab().values()) + 1)
    for token, index in model["vocab"].items():
        if set(token) <= set(letters):
            table[index] = bytes(letters[letter] for letter in token)
    for added in parts["added_tokens"]:
        if added["lstrip"] or added["rstrip"]:  # takes in spaces, now and then
            return None
        table[added["id"]] = b"" if added["special"] else added["content"].encode("utf-8")
    table[end_id] = b""
    return table


def _character_bytes(text: str) -> npt.NDArray[np.int64]:
    """(len(text),) bytes of each character; those that stand for an invalid byte have one."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    counts = np.searchsorted([0x80, 0x800, 0x10000], points, side="right") + 1
    return np.where((points >= 0xDC80) & (points <= 0xDCFF), 1, counts)


def _replaced(invalid: re.Match[str]) -> str:
    return "\ufffd" * len(invalid[0])
