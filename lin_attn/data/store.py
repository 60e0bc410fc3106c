"""The token store: one split's tokens and documents as two Arrow streams, read by memory map.

    tokens.arrow     token     uint16 (int32 above 65536 ids)   end d0 d0 d0 end d1 d1 end ...
    documents.arrow  name, start, n_tokens, n_bytes             one row a document

The leading end token is the first document's beginning. So every token of every document, and the end
after it, is predicted from what stands before it exactly once.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
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
    [("name", pa.string()), ("start", pa.int64()), ("n_tokens", pa.int64()), ("n_bytes", pa.int64())]
)


class StoreWriter:
    """Writes a store in bounded memory; a context manager.

    Args:
        folder: Made if need be.
        tokenizer: Gives the token type, the end token and the bytes of each token.
    """

    def __init__(self, folder: str, tokenizer: Tokenizer) -> None:
        os.makedirs(folder, exist_ok=True)
        self._type = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
        schema = pa.schema([("token", pa.from_numpy_dtype(self._type))])
        self._tokens_sink = pa.OSFile(os.path.join(folder, TOKENS_FILE), "wb")
        self._documents_sink = pa.OSFile(os.path.join(folder, DOCUMENTS_FILE), "wb")
        self._tokens = pa.ipc.new_stream(self._tokens_sink, schema)
        self._documents = pa.ipc.new_stream(self._documents_sink, _DOCUMENTS_SCHEMA)
        self._token_bytes = tokenizer.token_bytes
        self._end = np.array([tokenizer.end_id], dtype=self._type)
        self._pending: list[Tokens] = []
        self._n_pending = 0
        self._rows: list[tuple[str, int, int, int]] = []
        self.n_tokens = 0
        self.n_bytes = 0
        self.add_tokens(self._end)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._flush_tokens()
        self._flush_documents()
        for stream in (self._tokens, self._documents, self._tokens_sink, self._documents_sink):
            stream.close()

    def add_document(self, name: str, pieces: Iterable[Tokens]) -> bool:
        """Adds a document and the end after it; one without tokens is left out, and False comes back."""
        start, start_bytes = self.n_tokens, self.n_bytes
        for piece in pieces:
            self.add_tokens(piece)
        if self.n_tokens == start:
            return False
        self.add_row(name, start, self.n_tokens - start, self.n_bytes - start_bytes)
        self.add_tokens(self._end)
        return True

    def add_tokens(self, tokens: Tokens) -> None:
        """Appends (n,) tokens to the stream."""
        if len(tokens):
            self.n_tokens += len(tokens)
            self.n_bytes += int(self._token_bytes[tokens].sum())
            self._pending.append(tokens)
            self._n_pending += len(tokens)
            if self._n_pending >= BATCH_TOKENS:
                self._flush_tokens()

    def add_row(self, name: str, start: int, n_tokens: int, n_bytes: int) -> None:
        """Appends a document to the table, whose tokens are in the stream."""
        # Names of files need not be UTF-8, Arrow's strings must be.
        clean = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        self._rows.append((clean, start, n_tokens, n_bytes))
        if len(self._rows) >= BATCH_DOCUMENTS:
            self._flush_documents()

    def _flush_tokens(self) -> None:
        if self._pending:
            tokens = np.concatenate(self._pending).astype(self._type, copy=False)
            self._tokens.write_batch(pa.record_batch([pa.array(tokens)], names=["token"]))
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
            written = writer.add_document(document.name, tokenizer.encode_pieces(document.pieces))
            counts[0 if written else 1] += 1
    return counts[0], counts[1]


class TokenStore:
    """A store on disk, memory-mapped; pickles as its path and opens again in the other process.

    Args:
        folder: Where `StoreWriter` wrote it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        table = datasets.Dataset.from_file(os.path.join(folder, TOKENS_FILE))
        # Views of the map, one a record batch: reading a block costs a search and a copy of its tokens.
        chunks = [chunk.to_numpy(zero_copy_only=True) for chunk in table.data.column("token").chunks]
        self._chunks: list[Tokens] = chunks
        self._ends = np.cumsum([len(chunk) for chunk in chunks])
        self._documents: datasets.Dataset = datasets.Dataset.from_file(os.path.join(folder, DOCUMENTS_FILE))
        self._columns: dict[str, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Number of tokens, all end tokens included."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self._documents)

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """(n_documents,) int64: "start", "n_tokens" or "n_bytes"."""
        if name not in self._columns:
            self._columns[name] = self._documents.data.column(name).to_numpy()
        return self._columns[name]

    def names(self, first: int = 0, stop: int | None = None) -> list[str]:
        """Names of the documents first..stop-1."""
        stop = self.n_documents if stop is None else stop
        return list(self._documents.data.column("name").slice(first, max(stop - first, 0)).to_pylist())

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1 of the stream, fewer at its end: (n,) uint16 or int32, read-only."""
        parts = []
        for chunk in range(int(np.searchsorted(self._ends, start, side="right")), len(self._chunks)):
            offset = int(self._ends[chunk]) - len(self._chunks[chunk])
            if offset >= stop:
                break
            parts.append(self._chunks[chunk][max(start - offset, 0) : stop - offset])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def pieces(self, start: int, stop: int) -> Iterator[Tokens]:
        """The same in pieces of about a million."""
        for piece in range(start, stop, BATCH_TOKENS):
            yield self.tokens(piece, min(piece + BATCH_TOKENS, stop))

    def document_range(self, start: int, n: int) -> tuple[int, int]:
        """First and past-the-last index of the documents that tokens start..start+n-1 touch.

        A document's end token belongs to it, the stream's first token to none.
        """
        starts = self.column("start")
        stop = int(np.searchsorted(starts, start + n, side="left")) if n > 0 else 0
        ends = starts[:stop] + self.column("n_tokens")[:stop]
        return int(np.searchsorted(ends, start, side="left")), stop

    def document_names(self, start: int, n: int) -> list[str]:
        """Names of the documents that tokens start..start+n-1 touch.

        Args:
            start: Index in the token stream, as in a batch's "start".
            n: How many tokens.
        """
        first, stop = self.document_range(start, n)
        return self.names(first, stop)
