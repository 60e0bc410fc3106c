"""Train, validation and test cut from one token stream.

"document" puts whole documents by a hash of their name: u = blake2b(name) / 2^64 in [0, 1), validation
below v, test below v + t, train above. Adding a document moves no other. "tail" cuts the last bytes off.

What is cut is the text as bytes, one token each, whatever tokenizer reads it afterwards: figures of two tokenizers are
of the same bytes.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lin_attn.data.documents import Document
from lin_attn.data.store import StoreWriter, TokenStore
from lin_attn.data.tokenizer import ByteTokenizer, Tokens

SPLITS = ("train", "validation", "test")
Range = tuple[int, int]
NAMES_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class SplitRule:
    """How to cut; a fraction of 0 leaves its split empty."""

    split: str
    validation_fraction: float
    test_fraction: float

    def ranges(self, store: TokenStore) -> tuple[str, dict[str, list[Range]]]:
        """Token ranges [start, stop) of each split of a store of bytes, and the rule in words.

        Fewer than three documents cannot fill three splits, so they are cut by bytes.
        """
        percent = f"{self.validation_fraction:.3g} validation, {self.test_fraction:.3g} test"
        if self.split == "document" and store.n_documents >= 3:
            return f"documents by hash of name ({percent})", self._by_document(store)
        few = f", as there are only {store.n_documents} documents" if self.split == "document" else ""
        return f"tail of the bytes ({percent}{few})", self._by_tail(store)

    def _by_document(self, store: TokenStore) -> dict[str, list[Range]]:
        hashes = name_hashes(store)
        assigned = assign(hashes, self.validation_fraction, self.test_fraction)
        starts = store.column("start")
        stops = starts + store.column("n_tokens") + 1
        # Neighbours of one split are one range: a corpus has many more documents than changes of split.
        first = np.flatnonzero(np.diff(assigned, prepend=-1))
        last = np.append(first[1:], len(assigned)) - 1
        ranges: dict[str, list[Range]] = {split: [] for split in SPLITS}
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            ranges[SPLITS[assigned[a]]].append((int(starts[a]), int(stops[b])))
        return ranges

    def _by_tail(self, store: TokenStore) -> dict[str, list[Range]]:
        total = int(store.column("n_bytes").sum())
        n_validation, n_test = (
            max(round(fraction * total), min(1, total // 3)) if fraction else 0
            for fraction in (self.validation_fraction, self.test_fraction)
        )
        cuts = [1]
        for n_bytes in (total - n_validation - n_test, total - n_test, total):
            cuts.append(max(cuts[-1], _after_bytes(store, n_bytes)))
        return {split: [(cuts[i], cuts[i + 1])] for i, split in enumerate(SPLITS)}


def name_hash(name: str) -> float:
    """A number in [0, 1) from a document's name, the same on every machine."""
    return bytes_hash(name.encode("utf-8", "surrogateescape"))


def bytes_hash(text: bytes) -> float:
    """A number in [0, 1) from bytes, the same on every machine."""
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53  # 53 bits: a float64 below 1


def name_hashes(store: TokenStore) -> npt.NDArray[np.float64]:
    """(n_documents,) hashes of a store's names, of which there may be more than fit in memory."""
    hashes = np.empty(store.n_documents)
    for first in range(0, len(hashes), NAMES_AT_ONCE):
        names = store.names(first, first + NAMES_AT_ONCE)
        hashes[first : first + len(names)] = [name_hash(name) for name in names]
    return hashes


def assign(hashes: npt.NDArray[np.float64], validation_fraction: float, test_fraction: float) -> npt.NDArray[np.int8]:
    """(n,) int8 for n >= 3 hashes of names: 0 for train, 1 for validation, 2 for test.

    By order of the hash, the lowest are validation, the next test. This is the rule by thresholds, but for
    a split that would be left empty, which takes the document with the lowest hash that it can have.
    """
    n = len(hashes)
    n_validation = int((hashes < validation_fraction).sum())
    n_test = int((hashes < validation_fraction + test_fraction).sum()) - n_validation
    least_test = int(test_fraction > 0)
    n_validation = min(max(n_validation, int(validation_fraction > 0)), n - 1 - least_test)
    n_test = min(max(n_test, least_test), n - 1 - n_validation)
    order = np.argsort(hashes, kind="stable")
    assigned = np.zeros(n, dtype=np.int8)
    assigned[order[:n_validation]] = 1
    assigned[order[n_validation : n_validation + n_test]] = 2
    return assigned


def copy_ranges(store: TokenStore, ranges: list[Range], folder: str) -> None:
    """Writes token ranges of a store of bytes as a store of its own; a document that was cut keeps its name."""
    with StoreWriter(folder, ByteTokenizer()) as writer:
        for start, stop in ranges:
            shift = writer.n_tokens - start
            for name, a, b, source, _ in _parts(store, [(start, stop)]):
                writer.add_row(name, a + shift, b - a, b - a, source)
            for piece in store.pieces(start, stop):
                writer.add_tokens(piece)


def read_ranges(store: TokenStore, ranges: list[Range]) -> Iterator[Document]:
    """The documents in token ranges of a store of bytes, for another tokenizer to read."""
    for name, a, b, source, ends in _parts(store, ranges):
        yield Document(name, (_raw(piece) for piece in store.pieces(a, b)), source, ends)


def _parts(store: TokenStore, ranges: list[Range]) -> Iterator[tuple[str, int, int, int, bool]]:
    """Name, first and past-the-last token, source of each document in the ranges, and whether its end is in them."""
    starts, lengths, sources = (store.column(name) for name in ("start", "n_tokens", "source"))
    for start, stop in ranges:
        first, past = store.document_range(start, stop - start)
        for batch in range(first, past, NAMES_AT_ONCE):
            for index, name in enumerate(store.names(batch, min(batch + NAMES_AT_ONCE, past)), start=batch):
                end = int(starts[index] + lengths[index])
                a, b = max(int(starts[index]), start), min(end, stop)
                if b > a:
                    yield name, a, b, int(sources[index]), end < stop


def _raw(tokens: Tokens) -> bytes:
    return tokens.astype(np.uint8).tobytes()


def _after_bytes(store: TokenStore, n_bytes: int) -> int:
    """The token index before which n_bytes bytes stand; an end token at the cut goes to the left."""
    if n_bytes <= 0 or not store.n_documents:
        return 1
    sums = np.cumsum(store.column("n_bytes"))
    document = int(np.searchsorted(sums, n_bytes, side="left"))
    start, length = (int(store.column(name)[document]) for name in ("start", "n_tokens"))
    inside = n_bytes - int(sums[document] - length)
    return start + inside + (inside == length)
