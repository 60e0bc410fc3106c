"""Examples as tokens: a table of rows becomes a table of token ids, and batches are read from that.

The table is `datasets`' own: where the rows are files in its cache, so are the tokens, found again by fingerprint, and
memory does not grow with their number.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from torch.utils.data import Dataset

from lin_attn.data.blocks import EMPTY_BLOCK, Batch
from lin_attn.data.tokenizer import Tokenizer

FORMAT = 1  # raised when what is stored changes, so that older tables in the cache are not read
PARALLEL_ROWS = 100_000  # from where on further processes are worth their start
Columns = Mapping[str, Sequence[Any]]
Lengths = npt.NDArray[np.int64]


class ExampleDataset(Dataset[Batch]):
    """The examples of one table.

    Args:
        rows: of token ids, see `encode_rows`.
        collate: makes a batch of the columns of some rows, of none too.
    """

    def __init__(self, rows: datasets.Dataset, collate: Callable[[Columns], Batch]) -> None:
        self.rows = rows
        self._collate = collate

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[Any]) -> Batch:
        """Reads a batch: DataLoader calls this with rows, or with a list of one array of rows.

        EMPTY_BLOCK stands for no row: it fills ranks up, whose batch is then smaller, or has no example at all.
        """
        rows = np.hstack([np.empty(0, dtype=np.int64), *indices]).astype(np.int64)
        return self._collate(self.rows[rows[rows != EMPTY_BLOCK]])


def encode_rows(
    rows: datasets.Dataset,
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    keep: Mapping[str, str],
    *,
    limit: int | None,
    workers: int,
) -> datasets.Dataset:
    """The tokens of rows of text.

    Args:
        rows: the table.
        tokenizer: makes tokens of its texts; no special ones are added.
        texts: new column → the column of its text. The new one has token ids, int32.
        keep: new column → a column that is taken over as it is.
        limit: the most tokens of a text that are kept; all by default.
        workers: processes that share the work where it is much.

    Raises:
        ValueError: A text is missing, or is none.
    """
    for column in texts.values():
        kind = rows.features[column]
        if getattr(kind, "dtype", None) not in ("string", "large_string"):
            raise ValueError(f"column {column!r} holds {kind}; wanted text")
    parts = [FORMAT, rows._fingerprint, tokenizer.fingerprint, dict(texts), dict(keep), limit]
    fingerprint = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()
    features = {name: datasets.Sequence(datasets.Value("int32")) for name in texts}
    features |= {name: rows.features[column] for name, column in keep.items()}
    return rows.map(
        partial(_encode, tokenizer=tokenizer, texts=dict(texts), keep=dict(keep), limit=limit),
        batched=True,
        remove_columns=rows.column_names,
        features=datasets.Features(features),
        new_fingerprint=fingerprint,
        num_proc=workers if workers > 1 and len(rows) > PARALLEL_ROWS else None,
        desc="tokens",
    )


def token_counts(rows: datasets.Dataset, columns: Sequence[str]) -> Lengths:
    """(n, k): how many tokens each row has in each of k columns of `encode_rows`."""
    counts = []
    for name in columns:
        tables = rows.select_columns(name).with_format("arrow").iter(1 << 16)
        parts = [pc.list_value_length(table[name]).to_numpy() for table in tables]
        counts.append(np.concatenate([np.empty(0, dtype=np.int64), *parts]).astype(np.int64))
    return np.stack(counts, axis=1)


def _encode(
    rows: dict[str, list[Any]], tokenizer: Tokenizer, texts: dict[str, str], keep: dict[str, str], limit: int | None
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: rows[column] for name, column in keep.items()}
    for name, column in texts.items():
        missing = next((i for i, text in enumerate(rows[column]) if text is None), None)
        if missing is not None:
            row = {key: values[missing] for key, values in rows.items()}
            raise ValueError(f"column {column!r} has no text in the row {row}; wanted text in every row")
        columns[name] = [tokenizer.encode(text)[:limit].astype(np.int32) for text in rows[column]]
    return columns
