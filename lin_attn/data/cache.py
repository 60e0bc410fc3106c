"""The cache of token stores: found by content, built aside and renamed into place, checked when opened.

CACHE/corpora/<hash>/corpus.json, train/, validation/, test/
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from typing import Any

from lin_attn.data.sources import Source
from lin_attn.data.splits import SPLITS, SplitRule, copy_ranges
from lin_attn.data.store import DOCUMENTS_FILE, TOKENS_FILE, TokenStore, write_store
from lin_attn.data.tokenizer import Tokenizer

# Raised whenever the files, the stream or the split rules change, so that old caches are not read.
FORMAT = 1
META_FILE = "corpus.json"


def default_cache_dir() -> str:
    """$LIN_ATTN_CACHE, else $XDG_CACHE_HOME/lin_attn, else ~/.cache/lin_attn."""
    if chosen := os.environ.get("LIN_ATTN_CACHE"):
        return os.path.expanduser(chosen)
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(parent), "lin_attn")


def corpus_key(sources: dict[str, list[Source]], tokenizer: Tokenizer, rule: SplitRule) -> str:
    """Hash of everything the stores depend on: names and bytes of the sources, tokenizer, split, format."""
    parts = {split: [source.fingerprint() for source in found] for split, found in sources.items()}
    content = json.dumps([FORMAT, tokenizer.fingerprint, asdict(rule), parts], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def open_corpus(folder: str) -> tuple[dict[str, Any], dict[str, TokenStore]] | None:
    """Opens the stores of a corpus.

    Returns:
        What is known about it and its stores by split; None where it is missing, cut off or of another
        length than was written.
    """
    try:
        with open(os.path.join(folder, META_FILE), encoding="utf-8") as file:
            meta: dict[str, Any] = json.load(file)
        # Sizes first: a map of a file that was cut off may end the process when it is read.
        for split in SPLITS:
            for name, size in meta["splits"][split]["files"].items():
                if os.path.getsize(os.path.join(folder, split, name)) != size:
                    return None
        stores = {split: TokenStore(os.path.join(folder, split)) for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    for split, store in stores.items():
        known = meta["splits"][split]
        if (len(store), store.n_documents) != (known["tokens"], known["documents"]):
            return None
    return meta, stores


def build_corpus(
    folder: str, sources: dict[str, list[Source]], tokenizer: Tokenizer, rule: SplitRule
) -> tuple[dict[str, Any], dict[str, TokenStore]]:
    """Builds a corpus in a new folder beside `folder` and renames it there.

    Several processes may do so at once: the first to finish wins, the others open what it made. A folder
    that is there but not whole is moved away.

    Raises:
        ValueError: The cache cannot be written, or a source cannot be read or has no text.
    """
    parent = os.path.dirname(folder)
    scratch = None
    try:
        os.makedirs(parent, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=f".{os.path.basename(folder)}-", dir=parent)
        new = os.path.join(scratch, "new")
        _write(new, sources, tokenizer, rule)
        opened = open_corpus(folder)
        if opened is None:
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, os.path.join(scratch, "broken"))
            try:
                os.rename(new, folder)
            except OSError:  # another process was faster
                if open_corpus(folder) is None:
                    raise
            opened = open_corpus(folder)
    except OSError as error:  # those of the sources are ValueErrors already
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot write the token cache {parent!r}: {reason}. Choose another folder with cache_dir or "
            "the environment variable LIN_ATTN_CACHE"
        ) from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    assert opened is not None, f"the cache {folder} was just written, but is not whole"
    return opened


def _write(folder: str, sources: dict[str, list[Source]], tokenizer: Tokenizer, rule: SplitRule) -> None:
    empty = 0
    for split, found in sources.items():
        # What is cut into three is written whole first: the rule needs all documents.
        target = "whole" if split == "train" and len(sources) < len(SPLITS) else split
        documents = (document for source in found for document in source.documents())
        written, left_out = write_store(os.path.join(folder, target), documents, tokenizer)
        empty += left_out
        if not written:
            labels = ", ".join(repr(source.label) for source in found)
            came = f"{left_out} empty documents" if left_out else "nothing that is not used elsewhere"
            raise ValueError(f"no text for {split} in {labels}: came {came}, wanted a document with text")
    words = "as given"
    whole_folder = os.path.join(folder, "whole")
    if os.path.isdir(whole_folder):
        whole = TokenStore(whole_folder)
        words, ranges = rule.ranges(whole, tokenizer)
        for split in SPLITS:
            if split not in sources or split == "train":
                copy_ranges(whole, ranges[split], os.path.join(folder, split), tokenizer)
        del whole
        shutil.rmtree(whole_folder)
    meta: dict[str, Any] = {"format": FORMAT, "tokenizer": tokenizer.to_dict(), "rule": words, "empty": empty}
    meta["splits"] = {split: _describe(os.path.join(folder, split)) for split in SPLITS}
    with open(os.path.join(folder, META_FILE), "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)


def _describe(folder: str) -> dict[str, Any]:
    store = TokenStore(folder)
    return {
        "tokens": len(store),
        "documents": store.n_documents,
        "bytes": int(store.column("n_bytes").sum()),
        "files": {name: os.path.getsize(os.path.join(folder, name)) for name in (TOKENS_FILE, DOCUMENTS_FILE)},
    }
