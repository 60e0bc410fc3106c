"""The token store: one split's tokens and documents as two Arrow streams.

    tokens.arrow     token     uint16 (int32 above 65536 ids)   end d0 d0 d0 end d1 d1 end ...
                     n_bytes   int32, only where the tokenizer has no token_bytes
    documents.arrow  name, start, n_tokens, n_bytes, source     one row a document

The leading end token is the first document's beginning. So every token of every document, and the end
after it, is predicted from what stands before it exactly once.

Tokens are read by offset in the file, not through a memory map: of a map every page that was touched counts as resident
memory, and an epoch in random order touches all of them.
"""

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lin_attn.data.documents import Document
from lin_attn.data.tokenizer import Tokenizer, Tokens

TOKENS_FILE = "tokens.arrow"
DOCUMENTS_FILE = "documents.arrow"
BATCH_TOKENS = 1 << 20
BATCH_DOCUMENTS = 1 << 16

_DOCUMENTS_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("start", pa.int64()),
        ("n_tokens", pa.int64()),
        ("n_bytes", pa.int64()),
        ("source", pa.int32()),
    ]
)


class StoreWriter:
    """Writes a store in bounded memory; a context manager.

    Args:
        folder: Made if need be.
        tokenizer: Gives the token type, the end token and the bytes of each token.
    """

    def __init__(self, folder: str, tokenizer: Tokenizer) -> None:
        os.makedirs(folder, exist_ok=True)
        self._token_bytes = tokenizer.token_bytes
        # Where every token but the end is one byte, counting is faster than looking up.
        self._one_byte_each = self._token_bytes is not None and bool(
            (np.delete(self._token_bytes, tokenizer.end_id) == 1).all()
        )
        self._types: list[type[np.integer[Any]]] = [np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32]
        if self._token_bytes is None:
            self._types.append(np.int32)
        self._names = ["token", "n_bytes"][: len(self._types)]
        fields = zip(self._names, map(pa.from_numpy_dtype, self._types), strict=True)
        self._tokens_sink = pa.OSFile(os.path.join(folder, TOKENS_FILE), "wb")
        self._documents_sink = pa.OSFile(os.path.join(folder, DOCUMENTS_FILE), "wb")
        self._tokens = pa.ipc.new_stream(self._tokens_sink, pa.schema(list(fields)))
        self._documents = pa.ipc.new_stream(self._documents_sink, _DOCUMENTS_SCHEMA)
        self._end = np.array([tokenizer.end_id], dtype=self._types[0])
        self._pending: list[tuple[Tokens, ...]] = []
        self._n_pending = 0
        self._rows: list[tuple[str, int, int, int, int]] = []
        self.n_tokens = 0
        self.n_bytes = 0
        self.add_tokens(self._end, np.zeros(1, np.int32))

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._flush_tokens()
        self._flush_documents()
        for stream in (self._tokens, self._documents, self._tokens_sink, self._documents_sink):
            stream.close()

    def add_document(self, document: Document, tokenizer: Tokenizer) -> bool:
        """Adds a document and the end after it; one without tokens is left out, and False comes back."""
        start, start_bytes = self.n_tokens, self.n_bytes
        for piece in tokenizer.encode_pieces(document.pieces):
            self.add_tokens(piece.tokens, piece.n_bytes)
        if self.n_tokens == start:
            return False
        self.add_row(document.name, start, self.n_tokens - start, self.n_bytes - start_bytes, document.source)
        if document.ends:
            self.add_tokens(self._end, np.zeros(1, np.int32))
        return True

    def add_tokens(self, tokens: Tokens, n_bytes: Tokens | None = None) -> None:
        """Appends (n,) tokens to the stream, and the bytes that they stand for where only the text tells."""
        if not len(tokens):
            return
        self.n_tokens += len(tokens)
        if self._one_byte_each:
            self.n_bytes += int(np.count_nonzero(tokens != self._end))
            self._pending.append((tokens,))
        elif self._token_bytes is not None:
            self.n_bytes += int(self._token_bytes[tokens].sum())
            self._pending.append((tokens,))
        else:
            assert n_bytes is not None, "the tokenizer has neither token_bytes nor counts"
            self.n_bytes += int(n_bytes.sum())
            self._pending.append((tokens, n_bytes))
        self._n_pending += len(tokens)
        if self._n_pending >= BATCH_TOKENS:
            self._flush_tokens()

    def add_row(self, name: str, start: int, n_tokens: int, n_bytes: int, source: int) -> None:
        """Appends a document to the table, whose tokens are in the stream."""
        # Names of files need not be UTF-8, Arrow's strings must be.
        clean = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        self._rows.append((clean, start, n_tokens, n_bytes, source))
        if len(self._rows) >= BATCH_DOCUMENTS:
            self._flush_documents()

    def _flush_tokens(self) -> None:
        if self._pending:
            columns = [
                pa.array(np.concatenate(parts).astype(kind, copy=False))
                for parts, kind in zip(zip(*self._pending, strict=True), self._types, strict=True)
            ]
            self._tokens.write_batch(pa.record_batch(columns, names=self._names))
            self._pending, self._n_pending = [], 0

    def _flush_documents(self) -> None:
        if self._rows:
            columns = [
                pa.array(column, field.type)
                for column, field in zip(zip(*self._rows, strict=True), _DOCUMENTS_SCHEMA, strict=True)
            ]
            self._documents.write_batch(pa.record_batch(columns, schema=_DOCUMENTS_SCHEMA))
            self._rows = []


def write_store(folder: str, documents: Iterable[Document], tokenizer: Tokenizer) -> tuple[int, int]:
    """Writes documents to a store.

    Args:
        folder: Where to.
        documents: In the order in which they will stand.
        tokenizer: Makes their tokens.

    Returns:
        How many documents were written, and how many were empty and left out.
    """
    counts = [0, 0]
    with StoreWriter(folder, tokenizer) as writer:
        for document in documents:
            counts[0 if writer.add_document(document, tokenizer) else 1] += 1
    return counts[0], counts[1]


class TokenStore:
    """A store on disk; pickles as its path and opens again in the other process.

    Args:
        folder: Where `StoreWriter` wrote it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        path = os.path.join(folder, TOKENS_FILE)
        with pa.memory_map(path) as source:
            base = source.read_buffer().address
            source.seek(0)
            with pa.ipc.open_stream(source) as stream:
                batches = list(stream)
            # (batch, column) → where in the file its values begin; batches are small and whole, offsets are zero
            columns = [
                [batch.column(i).buffers()[1].address - base for batch in batches] for i in range(len(stream.schema))
            ]
            self._types = [np.dtype(field.type.to_pandas_dtype()) for field in stream.schema]
            self._ends = np.cumsum([0, *(len(batch) for batch in batches)])
            del batches
        self._places = np.array(columns, dtype=np.int64).reshape(len(self._types), -1)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        with pa.memory_map(os.path.join(folder, DOCUMENTS_FILE)) as source, pa.ipc.open_stream(source) as stream:
            self._documents = stream.read_all()
        self._columns: dict[str, npt.NDArray[np.int64]] = {}
        self._document_ends = self.column("start") + self.column("n_tokens")

    def __len__(self) -> int:
        """Number of tokens, all end tokens included."""
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self._documents)

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """(n_documents,) integers: "start", "n_tokens", "n_bytes", or "source", the place in the list of sources."""
        if name not in self._columns:
            self._columns[name] = self._documents.column(name).to_numpy()
        return self._columns[name]

    def names(self, first: int = 0, stop: int | None = None) -> list[str]:
        """Names of the documents first..stop-1."""
        stop = self.n_documents if stop is None else stop
        return list(self._documents.column("name").slice(first, max(stop - first, 0)).to_pylist())

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1 of the stream, fewer at its end: (n,) uint16 or int32, read-only."""
        return self._read(0, start, stop)

    def byte_counts(self, start: int, stop: int, token_bytes: npt.NDArray[np.int64] | None) -> Tokens:
        """(n,) bytes that each of the tokens start..stop-1 stands for.

        Args:
            start: Index in the token stream.
            stop: Past the last.
            token_bytes: `Tokenizer.token_bytes` of the store's tokenizer.
        """
        return self._read(1, start, stop) if token_bytes is None else token_bytes[self.tokens(start, stop)]

    def pieces(self, start: int, stop: int) -> Iterator[Tokens]:
        """Tokens start..stop-1 in pieces of about a million."""
        for piece in range(start, stop, BATCH_TOKENS):
            yield self.tokens(piece, min(piece + BATCH_TOKENS, stop))

    def _read(self, column: int, start: int, stop: int) -> Tokens:
        kind, parts = self._types[column], []
        for batch in range(int(np.searchsorted(self._ends, start, side="right")) - 1, len(self._ends) - 1):
            first = int(self._ends[batch])
            if first >= stop:
                break
            a, b = max(start, first), min(stop, int(self._ends[batch + 1]))
            place = int(self._places[column, batch]) + (a - first) * kind.itemsize
            parts.append(os.pread(self._file, (b - a) * kind.itemsize, place))
        return np.frombuffer(b"".join(parts), dtype=kind)

    def document_range(self, start: int, n: int) -> tuple[int, int]:
        """First and past-the-last index of the documents that tokens start..start+n-1 touch.

        A document's end token belongs to it, the stream's first token to none.
        """
        stop = int(np.searchsorted(self.column("start"), start + n, side="left")) if n > 0 else 0
        return min(int(np.searchsorted(self._document_ends, start, side="left")), stop), stop

    def document_names(self, start: int, n: int) -> list[str]:
        """Names of the documents that tokens start..start+n-1 touch.

        Args:
            start: Index in the token stream, as in a batch's "start".
            n: How many tokens.
        """
        first, stop = self.document_range(start, n)
        return self.names(first, stop)
