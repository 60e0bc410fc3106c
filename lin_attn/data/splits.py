"""Train, validation and test cut from one token stream.

"document" puts whole documents by a hash of their name: u = blake2b(name) / 2^64 in [0, 1), validation
below v, test below v + t, train above. Adding a document moves no other. "tail" cuts the last bytes off.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lin_attn.data.store import StoreWriter, TokenStore
from lin_attn.data.tokenizer import Tokenizer

SPLITS = ("train", "validation", "test")
Range = tuple[int, int]


@dataclass(frozen=True)
class SplitRule:
    """How to cut; a fraction of 0 leaves its split empty."""

    split: str
    validation_fraction: float
    test_fraction: float

    def ranges(self, store: TokenStore, tokenizer: Tokenizer) -> tuple[str, dict[str, list[Range]]]:
        """Token ranges [start, stop) of each split, and the rule in words.

        Fewer than three documents cannot fill three splits, so they are cut by bytes.
        """
        percent = f"{self.validation_fraction:.3g} validation, {self.test_fraction:.3g} test"
        if self.split == "document" and store.n_documents >= 3:
            return f"documents by hash of name ({percent})", self._by_document(store)
        few = f", as there are only {store.n_documents} documents" if self.split == "document" else ""
        return f"tail of the bytes ({percent}{few})", self._by_tail(store, tokenizer)

    def _by_document(self, store: TokenStore) -> dict[str, list[Range]]:
        assigned = assign(store.names(), self.validation_fraction, self.test_fraction)
        starts = store.column("start")
        stops = starts + store.column("n_tokens") + 1
        # Neighbours of one split are one range: a corpus has many more documents than changes of split.
        first = np.flatnonzero(np.diff(assigned, prepend=-1))
        last = np.append(first[1:], len(assigned)) - 1
        ranges: dict[str, list[Range]] = {split: [] for split in SPLITS}
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            ranges[SPLITS[assigned[a]]].append((int(starts[a]), int(stops[b])))
        return ranges

    def _by_tail(self, store: TokenStore, tokenizer: Tokenizer) -> dict[str, list[Range]]:
        total = int(store.column("n_bytes").sum())
        n_validation, n_test = (
            max(round(fraction * total), min(1, total // 3)) if fraction else 0
            for fraction in (self.validation_fraction, self.test_fraction)
        )
        cuts = [1]
        for n_bytes in (total - n_validation - n_test, total - n_test, total):
            cuts.append(max(cuts[-1], _after_bytes(store, tokenizer, n_bytes)))
        return {split: [(cuts[i], cuts[i + 1])] for i, split in enumerate(SPLITS)}


def name_hash(name: str) -> float:
    """A number in [0, 1) from a document's name, the same on every machine."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53  # 53 bits: a float64 below 1


def assign(names: list[str], validation_fraction: float, test_fraction: float) -> npt.NDArray[np.int8]:
    """(n,) int8 for n >= 3 names: 0 for train, 1 for validation, 2 for test.

    By order of the hash, the lowest are validation, the next test. This is the rule by thresholds, but for
    a split that would be left empty, which takes the document with the lowest hash that it can have.
    """
    hashes = np.array([name_hash(name) for name in names])
    n = len(names)
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


def copy_ranges(store: TokenStore, ranges: list[Range], folder: str, tokenizer: Tokenizer) -> None:
    """Writes token ranges of a store as a store of its own; a document that was cut keeps its name."""
    starts, lengths, sizes = (store.column(name) for name in ("start", "n_tokens", "n_bytes"))
    with StoreWriter(folder, tokenizer) as writer:
        for start, stop in ranges:
            shift = writer.n_tokens - start
            first, past = store.document_range(start, stop - start)
            for index, name in enumerate(store.names(first, past), start=first):
                a = max(int(starts[index]), start)
                b = min(int(starts[index] + lengths[index]), stop)
                whole = b - a == lengths[index]
                n_bytes = int(sizes[index]) if whole else _count_bytes(store, tokenizer, a, b)
                if b > a:
                    writer.add_row(name, a + shift, b - a, n_bytes)
            for piece in store.pieces(start, stop):
                writer.add_tokens(piece)


def _after_bytes(store: TokenStore, tokenizer: Tokenizer, n_bytes: int) -> int:
    """The token index before which n_bytes bytes stand; an end token at the cut goes to the left."""
    if n_bytes <= 0 or not store.n_documents:
        return 1
    sums = np.cumsum(store.column("n_bytes"))
    document = int(np.searchsorted(sums, n_bytes, side="left"))
    start, length = (int(store.column(name)[document]) for name in ("start", "n_tokens"))
    if sums[document] == n_bytes:
        return start + length + 1
    missing = n_bytes - (int(sums[document - 1]) if document else 0)
    for piece in store.pieces(start, start + length):
        inside = np.cumsum(tokenizer.token_bytes[piece])
        if inside[-1] >= missing:
            return start + int(np.searchsorted(inside, missing, side="left")) + 1
        start, missing = start + len(piece), missing - int(inside[-1])
    raise AssertionError("the documents table counts more bytes than the tokens have")


def _count_bytes(store: TokenStore, tokenizer: Tokenizer, start: int, stop: int) -> int:
    return sum(int(tokenizer.token_bytes[piece].sum()) for piece in store.pieces(start, stop))
