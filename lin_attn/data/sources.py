"""What the user names as source, opened: anything with a fingerprint and documents."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from lin_attn.data.digests import digests
from lin_attn.data.documents import Document, is_binary, read_documents
from lin_attn.data.files import SourceFile, find_files
from lin_attn.data.hub import PREFIX, HubSet

Specs = str | Sequence[str | Mapping[str, Any]]


class Source(Protocol):
    """Documents, and a fingerprint of them that is much cheaper to have."""

    @property
    def label(self) -> str:
        """What the user called it."""

    @property
    def binary(self) -> tuple[str, ...]:
        """Paths that were left out since they hold no text."""

    def fingerprint(self) -> str:
        """Changes with the names or the bytes."""

    def documents(self) -> Iterator[Document]:
        """Reads the documents, in a fixed order."""


@dataclass(frozen=True)
class SourceOptions:
    """How sources are read; the fields are those of `TextCorpus`."""

    text_column: str = "text"
    row_separator: str | None = None
    config_name: str | None = None
    data_dir: str | None = None
    revision: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    test_split: str | None = "test"

    @property
    def splits(self) -> tuple[str, str | None, str | None]:
        """The splits' names in the order train, validation, test."""
        return self.train_split, self.validation_split, self.test_split


@dataclass(frozen=True)
class Entry:
    """One source of a list: where it is, its weight in training (None where no weight was given), how it is read."""

    path: str
    weight: float | None
    options: SourceOptions


ENTRY_FIELDS = ("path", "weight", *(field.name for field in fields(SourceOptions)))


def entries(specs: Specs, options: SourceOptions) -> list[Entry]:
    """The sources of a list, each with its own options or else those of all."""
    found = []
    for spec in [specs] if isinstance(specs, str) else specs:
        given: dict[str, Any] = {"path": spec} if isinstance(spec, str) else dict(spec)
        path, weight = given.pop("path"), given.pop("weight", None)
        found.append(Entry(path, weight, replace(options, **given)))
    return found


def weights_of(found: Sequence[Entry]) -> tuple[float, ...] | None:
    """The weights of sources, 1 where one of several has none; None where none has any."""
    if all(entry.weight is None for entry in found):
        return None
    return tuple(1.0 if entry.weight is None else float(entry.weight) for entry in found)


@dataclass(frozen=True)
class FileSource:
    """Files on this machine."""

    label: str
    files: tuple[SourceFile, ...]
    binary: tuple[str, ...]
    options: SourceOptions
    memo: str | None = None

    def fingerprint(self) -> str:
        """Hash of the names and bytes of all files, and of how rows become documents."""
        total = hashlib.blake2b(digest_size=16)
        for file, digest in zip(self.files, digests([file.path for file in self.files], self.memo), strict=True):
            name = file.name.encode("utf-8", "surrogateescape")
            total.update(len(name).to_bytes(8, "little") + name + digest)
        return f"{total.hexdigest()} {self.options.text_column!r} {self.options.row_separator!r}"

    def documents(self) -> Iterator[Document]:
        """Reads the files in order of their names."""
        for file in self.files:
            yield from read_documents(file, self.options.text_column, self.options.row_separator)


def open_sources(
    source: Sequence[Entry],
    validation_source: Sequence[Entry] | None,
    test_source: Sequence[Entry] | None,
    memo: str | None = None,
) -> dict[str, list[Source]]:
    """Opens the sources of each split.

    Args:
        source: What to train on. Hub sets bring their own validation and test splits, where all of them
            have one.
        validation_source: Takes the place of any other validation text.
        test_source: Takes the place of any other test text.
        memo: Where hashes of large files are remembered, see `digests`.

    Returns:
        Sources of "train", and of "validation" and "test" where they do not have to be cut from train.

    Raises:
        ValueError: A source does not exist or is no text; see `find_files`, `HubSet`.
    """
    seen: set[str] = set()
    # Validation and test come first: a file named for them is left out of training.
    given = {
        role: [(_open(entry, seen, memo), entry.options) for entry in found]
        for role, found in (("validation", validation_source), ("test", test_source))
        if found is not None
    }
    train = [(_open(entry, seen, memo), entry.options) for entry in source]
    sources = {"train": [_pick(one, options.train_split) for one, options in train]}
    for place, role in enumerate(("validation", "test"), start=1):
        if role in given:
            sources[role] = [
                _pick(one, options.splits[place] if _has(one, options.splits[place]) else options.train_split)
                for one, options in given[role]
            ]
        elif all(_has(one, options.splits[place]) for one, options in train):
            sources[role] = [_pick(one, options.splits[place]) for one, options in train]
        else:
            for one, options in train:
                if options.splits[place] not in (None, role):  # the default name may be missing, a chosen one may not
                    _pick(one, options.splits[place])
    return sources


def _open(entry: Entry, seen: set[str], memo: str | None) -> HubSet | FileSource:
    if entry.path.startswith(PREFIX):
        return HubSet(entry.path, entry.options)
    files, binary = [], []
    for file in find_files(entry.path):
        # A file that two names lead to is read once: it must not be in train and validation both.
        real = os.path.realpath(file.path)
        if real in seen:
            continue
        seen.add(real)
        if not is_binary(file.path):
            files.append(file)
        elif file.explicit:
            raise ValueError(f"{file.path!r} is binary (a NUL byte in its first 8 KiB), wanted text")
        else:
            binary.append(file.path)
    return FileSource(entry.path, tuple(files), tuple(binary), entry.options, memo)


def _has(opened: HubSet | FileSource, split: str | None) -> bool:
    return split is not None and isinstance(opened, HubSet) and opened.has_split(split)


def _pick(opened: HubSet | FileSource, split: str | None) -> Source:
    if isinstance(opened, HubSet):
        assert split is not None
        return opened.split(split)
    return opened
