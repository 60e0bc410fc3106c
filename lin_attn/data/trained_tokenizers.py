"""Tokenizers that are learned from rows of text, kept in CACHE/tokenizers/<hash>.json by what they depend on."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence

import datasets

from lin_attn.data.documents import Document
from lin_attn.data.tokenizer import Tokenizer, tokenizer_from_dict
from lin_attn.data.tokenizer_spec import TokenizerSpec


def train_on_rows(spec: TokenizerSpec, rows: datasets.Dataset, columns: Sequence[str], cache_dir: str) -> Tokenizer:
    """One vocabulary of several columns of text; the same rows give the same, which is kept for other processes.

    Args:
        spec: of a tokenizer that is trained.
        rows: the table.
        columns: those with text.
        cache_dir: the folder under which it is kept.

    Raises:
        ValueError: The cache cannot be written.
    """
    content = json.dumps([rows._fingerprint, list(columns), spec.recipe])
    key = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    path = os.path.join(cache_dir, "tokenizers", f"{key}.json")
    try:
        with open(path, encoding="utf-8") as file:
            return tokenizer_from_dict(json.load(file))
    except (OSError, ValueError):  # missing, or cut off
        pass
    tokenizer = spec.train(_documents(rows, columns))
    unfinished = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(tokenizer.to_dict(), file)
        os.replace(unfinished, path)
    except OSError as error:
        raise ValueError(
            f"cannot write the tokenizer {path!r}: {error.strerror}. Choose another folder with cache_dir or the "
            "environment variable LIN_ATTN_CACHE"
        ) from None
    return tokenizer


def _documents(rows: datasets.Dataset, columns: Sequence[str]) -> Iterator[Document]:
    for number, row in enumerate(rows.select_columns(list(columns))):
        # A text that is missing is told of when the rows are encoded.
        yield Document(str(number), [f"{row[column] or ''}\n".encode("utf-8", "surrogatepass") for column in columns])
