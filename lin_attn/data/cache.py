"""The cache of token stores: found by content, built aside and renamed into place, checked when opened.

CACHE/corpora/<hash>/corpus.json, train/, validation/, test/
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from lin_attn.data.documents import Document
from lin_attn.data.scratch import scratch_folder
from lin_attn.data.sources import Source
from lin_attn.data.splits import SPLITS, SplitRule, copy_ranges, read_ranges
from lin_attn.data.store import DOCUMENTS_FILE, TOKENS_FILE, TokenStore, write_store
from lin_attn.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from_dict
from lin_attn.data.tokenizer_spec import TokenizerSpec

# Raised whenever the files, the stream or the split rules change, so that old caches are not read.
FORMAT = 2
META_FILE = "corpus.json"


class Corpus(NamedTuple):
    """An opened corpus: what is known about it, its tokenizer, and its stores by split."""

    meta: dict[str, Any]
    tokenizer: Tokenizer
    stores: dict[str, TokenStore]


def default_cache_dir() -> str:
    """$LIN_ATTN_CACHE, else $XDG_CACHE_HOME/lin_attn, else ~/.cache/lin_attn."""
    if chosen := os.environ.get("LIN_ATTN_CACHE"):
        return os.path.expanduser(chosen)
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(parent), "lin_attn")


def corpus_key(sources: dict[str, list[Source]], tokenizer: str, rule: SplitRule) -> str:
    """Hash of everything the stores depend on: names and bytes of the sources, tokenizer, split, format.

    Args:
        sources: By split.
        tokenizer: Its fingerprint, or the recipe of one that is to be trained.
        rule: How the rest is split.
    """
    parts = {split: [source.fingerprint() for source in found] for split, found in sources.items()}
    content = json.dumps([FORMAT, tokenizer, asdict(rule), parts], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def open_corpus(folder: str) -> Corpus | None:
    """Opens a corpus; None where it is missing, cut off or of another length than was written."""
    try:
        with open(os.path.join(folder, META_FILE), encoding="utf-8") as file:
            meta: dict[str, Any] = json.load(file)
        # Sizes first: a map of a file that was cut off may end the process when it is read.
        for split in SPLITS:
            for name, size in meta["splits"][split]["files"].items():
                if os.path.getsize(os.path.join(folder, split, name)) != size:
                    return None
        stores = {split: TokenStore(os.path.join(folder, split)) for split in SPLITS}
        tokenizer = tokenizer_from_dict(meta["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    for split, store in stores.items():
        known = meta["splits"][split]
        if (len(store), store.n_documents) != (known["tokens"], known["documents"]):
            return None
    return Corpus(meta, tokenizer, stores)


def build_corpus(folder: str, sources: dict[str, list[Source]], spec: TokenizerSpec, rule: SplitRule) -> Corpus:
    """Builds a corpus in a new folder beside `folder` and renames it there.

    Several processes may do so at once: the first to finish wins, the others open what it made. A folder
    that is there but not whole is moved away, and what killed builds have left behind is removed.

    Raises:
        ValueError: The cache cannot be written, or a source cannot be read or has no text.
    """
    parent = os.path.dirname(folder)
    try:
        with scratch_folder(parent) as scratch:
            new = os.path.join(scratch, "new")
            _write(new, sources, spec, rule)
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
    assert opened is not None, f"the cache {folder} was just written, but is not whole"
    return opened


def _write(folder: str, sources: dict[str, list[Source]], spec: TokenizerSpec, rule: SplitRule) -> None:
    meta: dict[str, Any] = {"format": FORMAT, "rule": "as given", "empty": 0}
    cuts = len(sources) < len(SPLITS)
    if cuts:  # the rule needs all documents
        whole_folder = os.path.join(folder, "whole")
        meta["empty"] += _write_store(whole_folder, "train", sources["train"], ByteTokenizer())
        whole = TokenStore(whole_folder)
        meta["rule"], ranges = rule.ranges(whole)
    if spec.is_trained:
        tokenizer = spec.train(read_ranges(whole, ranges["train"]) if cuts else _documents(sources["train"]))
    else:
        tokenizer = spec.open()
    for split in SPLITS:
        target = os.path.join(folder, split)
        if split in sources and not (cuts and split == "train"):
            meta["empty"] += _write_store(target, split, sources[split], tokenizer)
        elif isinstance(tokenizer, ByteTokenizer):
            copy_ranges(whole, ranges[split], target)
        else:
            write_store(target, read_ranges(whole, ranges[split]), tokenizer)
    if cuts:
        shutil.rmtree(whole_folder)
    meta["tokenizer"] = tokenizer.to_dict()
    meta["splits"] = {split: _describe(os.path.join(folder, split)) for split in SPLITS}
    with open(os.path.join(folder, META_FILE), "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)


def _documents(sources: Iterable[Source]) -> Iterator[Document]:
    for index, source in enumerate(sources):
        for document in source.documents():
            yield document._replace(source=index)


def _write_store(folder: str, split: str, sources: list[Source], tokenizer: Tokenizer) -> int:
    """Writes a store, and gives the number of empty documents."""
    written, empty = write_store(folder, _documents(sources), tokenizer)
    if sources and not written:
        labels = ", ".join(repr(source.label) for source in sources)
        came = f"{empty} empty documents" if empty else "nothing that is not used elsewhere"
        raise ValueError(f"no text for {split} in {labels}: came {came}, wanted a document with text")
    return empty


def _describe(folder: str) -> dict[str, Any]:
    store = TokenStore(folder)
    return {
        "tokens": len(store),
        "documents": store.n_documents,
        "bytes": int(store.column("n_bytes").sum()),
        "files": {name: os.path.getsize(os.path.join(folder, name)) for name in (TOKENS_FILE, DOCUMENTS_FILE)},
    }
