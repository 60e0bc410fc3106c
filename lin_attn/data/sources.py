"""What the user names as source, opened: anything with a fingerprint and documents."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lin_attn.data.documents import PIECE, Document, is_binary, read_documents, reading
from lin_attn.data.files import SourceFile, find_files
from lin_attn.data.hub import PREFIX, HubSet


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
    revision: str | None = None
    splits: tuple[str | None, str | None, str | None] = ("train", "validation", "test")


@dataclass(frozen=True)
class FileSource:
    """Files on this machine."""

    label: str
    files: tuple[SourceFile, ...]
    binary: tuple[str, ...]
    options: SourceOptions

    def fingerprint(self) -> str:
        """Hash of the names and bytes of all files, and of how rows become documents."""
        total = hashlib.blake2b(digest_size=16)
        for file in self.files:
            content = hashlib.blake2b(digest_size=16)
            with reading(file.path), open(file.path, "rb") as stream:
                while piece := stream.read(PIECE):
                    content.update(piece)
            name = file.name.encode("utf-8", "surrogateescape")
            total.update(len(name).to_bytes(8, "little") + name + content.digest())
        return f"{total.hexdigest()} {self.options.text_column!r} {self.options.row_separator!r}"

    def documents(self) -> Iterator[Document]:
        """Reads the files in order of their names."""
        for file in self.files:
            yield from read_documents(file, self.options.text_column, self.options.row_separator)


def open_sources(
    source: str | Sequence[str],
    validation_source: str | Sequence[str] | None,
    test_source: str | Sequence[str] | None,
    options: SourceOptions,
) -> dict[str, list[Source]]:
    """Opens the sources of each split.

    Args:
        source: What to train on. Hub sets bring their own validation and test splits, where all of them
            have one.
        validation_source: Takes the place of any other validation text.
        test_source: Takes the place of any other test text.
        options: How to read them.

    Returns:
        Sources of "train", and of "validation" and "test" where they do not have to be cut from train.

    Raises:
        ValueError: A source does not exist or is no text; see `find_files`, `HubSet`.
    """
    seen: set[str] = set()
    # Validation and test come first: a file named for them is left out of training.
    given = {
        role: [_open(spec, options, seen) for spec in _as_list(specs)]
        for role, specs in (("validation", validation_source), ("test", test_source))
        if specs is not None
    }
    train = [_open(spec, options, seen) for spec in _as_list(source)]
    train_split = options.splits[0]
    assert train_split is not None
    sources = {"train": [_pick(one, train_split) for one in train]}
    for role, split in zip(("validation", "test"), options.splits[1:], strict=True):
        if role in given:
            sources[role] = [_pick(one, split if _has(one, split) else train_split) for one in given[role]]
        elif split is None:
            continue
        elif all(_has(one, split) for one in train):
            sources[role] = [_pick(one, split) for one in train]
        elif split != role:  # the default name may be missing, a chosen one may not
            for one in train:
                _pick(one, split)
    return sources


def _as_list(source: str | Sequence[str]) -> Sequence[str]:
    return [source] if isinstance(source, str) else source


def _open(spec: str, options: SourceOptions, seen: set[str]) -> HubSet | FileSource:
    if spec.startswith(PREFIX):
        return HubSet(
            spec,
            config_name=options.config_name,
            revision=options.revision,
            text_column=options.text_column,
            row_separator=options.row_separator,
        )
    files, binary = [], []
    for file in find_files(spec):
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
    return FileSource(spec, tuple(files), tuple(binary), options)


def _has(opened: HubSet | FileSource, split: str | None) -> bool:
    return split is not None and isinstance(opened, HubSet) and opened.has_split(split)


def _pick(opened: HubSet | FileSource, split: str | None) -> Source:
    if isinstance(opened, HubSet):
        assert split is not None
        return opened.split(split)
    return opened
