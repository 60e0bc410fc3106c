"""From files and tables to documents: a name and the bytes, in pieces.

Bytes are never decoded: Latin-1, a byte order mark and CRLF stay as they are. Files are read piece by
piece, so that memory does not grow with the size of a text file.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from lin_attn.data.files import SourceFile

PIECE = 1 << 20
BINARY_PROBE = 8 << 10


class Document(NamedTuple):
    """A document.

    Attributes:
        name: Unlike those of the other documents of its source.
        pieces: Its bytes; read once, before the next document is asked for.
        source: Which of the sources it is of, from 0.
        ends: Whether its end is here; not so where a split was cut through it and the rest is in the next one.
    """

    name: str
    pieces: Iterable[bytes]
    source: int = 0
    ends: bool = True


def read_documents(file: SourceFile, text_column: str, row_separator: str | None) -> Iterator[Document]:
    """Reads the documents of one file.

    Args:
        file: Its ending says how it is read: .parquet and .jsonl hold rows, the rest is text; .gz is
            unpacked first.
        text_column: Where a row has its text.
        row_separator: None makes every row a document, a string joins all rows of the file by it.

    Raises:
        ValueError: The file cannot be read; the message names it, what came and what was wanted.
    """
    kind = _kind(file.path)
    if kind == "text":
        return iter([Document(file.name, _text_pieces(file.path))])
    rows = _json_rows(file.path, text_column) if kind == "jsonl" else _parquet_rows(file.path, text_column)
    return rows_to_documents(file.name, rows, row_separator)


def rows_to_documents(name: str, rows: Iterator[tuple[int, bytes]], row_separator: str | None) -> Iterator[Document]:
    """Makes each numbered row a document "name:number", or all rows one document "name"."""
    if row_separator is None:
        return (Document(f"{name}:{number}", [text]) for number, text in rows)
    return iter([Document(name, _joined(rows, row_separator.encode("utf-8", "surrogatepass")))])


def column_bytes(array: pa.Array, where: str) -> list[bytes]:
    """Bytes of each row of a text column; null is an empty row.

    Raises:
        ValueError: The column holds something else than text.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not (pa.types.is_null(array.type) or _is_text(array.type)):
        raise ValueError(f"{where} holds {array.type}, wanted text (string or binary)")
    return [value or b"" for value in array.cast(pa.large_binary()).to_pylist()]


def is_binary(path: str) -> bool:
    """Whether a text file has a NUL byte in its first 8 KiB (unpacked)."""
    if _kind(path) != "text":
        return False
    with reading(path), _open(path) as stream:
        return b"\0" in stream.read(BINARY_PROBE)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns what the libraries raise on a bad file into a ValueError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        kind = {"text": "a readable file", "jsonl": "a JSON Lines file"}.get(_kind(path), "a Parquet file")
        kind = f"{kind} packed by gzip" if path.lower().endswith(".gz") else kind
        reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        raise ValueError(f"cannot read {path!r}: {reason}. Wanted {kind}") from None


def _kind(path: str) -> str:
    path = path.lower()
    if path.endswith(".parquet"):
        return "parquet"
    return "jsonl" if path.endswith((".jsonl", ".jsonl.gz")) else "text"


def _is_text(kind: pa.DataType) -> bool:
    names = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
    return str(kind) in names


def _open(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.lower().endswith(".gz") else open(path, "rb")


def _text_pieces(path: str) -> Iterator[bytes]:
    with reading(path), _open(path) as stream:
        while piece := stream.read(PIECE):
            yield piece


def _json_rows(path: str, column: str) -> Iterator[tuple[int, bytes]]:
    with reading(path), _open(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _json_text(line, column, f"{path}:{number}")


def _json_text(line: bytes, column: str, where: str) -> bytes:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no valid JSON ({error}), wanted one JSON object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: came a JSON {type(row).__name__}, wanted an object with {column!r}")
    if column not in row:
        raise ValueError(f"{where}: no column {column!r}, there are {sorted(row)}; choose with text_column")
    text = row[column]
    if not (text is None or isinstance(text, str)):
        raise ValueError(f"{where}: {column!r} holds a {type(text).__name__}, wanted text")
    return (text or "").encode("utf-8", "surrogatepass")


def _parquet_rows(path: str, column: str) -> Iterator[tuple[int, bytes]]:
    with reading(path), pq.ParquetFile(path) as table:
        if column not in table.schema_arrow.names:
            raise ValueError(
                f"{path!r} has no column {column!r}, there are {table.schema_arrow.names}; choose with text_column"
            )
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for text in column_bytes(batch.column(column), f"{path!r}: column {column!r}"):
                yield number, text
                number += 1


def _joined(rows: Iterator[tuple[int, bytes]], separator: bytes) -> Iterator[bytes]:
    for index, (_, text) in enumerate(rows):
        if index and separator:
            yield separator
        yield text
