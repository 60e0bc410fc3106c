"""Tasks made of the source of Python's standard library, which is on every machine: which package is a snippet of?

A snippet is some lines in a row, at least SNIPPET characters of one file. Files are dealt out whole, so that no snippet
that is judged shares a file with one that was trained on; each package has files in every split.
"""

from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import numpy as np

from lin_attn.data.files import STDLIB, SourceFile, find_files
from lin_attn.data.splits import SPLITS, assign, name_hash

# Packages that every Python from 3.10 on has, each of a dozen files and more.
PACKAGES = ("asyncio", "email", "encodings", "importlib", "multiprocessing", "tkinter", "unittest", "xml")
SNIPPET = 240


class Snippet(NamedTuple):
    """A piece of a file, and the package that the file is of, by its place in PACKAGES."""

    file: str
    package: int
    text: str


Tables = dict[str, dict[str, list[object]]]


def package_snippets(n: int, seed: int, validation_fraction: float, test_fraction: float) -> Tables:
    """Snippets with their packages: columns text, label (a place in PACKAGES) and file.

    Args:
        n: about how many there are in all splits together, as many of each package as of any other where it has them.
        seed: of which are taken.
        validation_fraction: share of each package's files.
        test_fraction: share of each package's files.

    Returns:
        The columns of "train", "validation" and "test".
    """
    draw = Random(f"packages {seed}")
    tables: Tables = {}
    for split, snippets in _snippets(validation_fraction, test_fraction).items():
        each = round(n * _share(split, validation_fraction, test_fraction) / len(PACKAGES))
        rows = [row for found in snippets.values() for row in draw.sample(found, min(each, len(found)))]
        tables[split] = {
            "text": [row.text for row in rows],
            "label": [row.package for row in rows],
            "file": [row.file for row in rows],
        }
    return tables


def package_triples(n: int, seed: int, validation_fraction: float, test_fraction: float) -> Tables:
    """Triples of snippets of which the second or the third is of the first one's package: columns A, B, C, label.

    Args:
        n: how many there are in all splits together.
        seed: of which are taken.
        validation_fraction: share of each package's files, and of the triples.
        test_fraction: share of each package's files, and of the triples.

    Returns:
        The columns of "train", "validation" and "test". label is "B" or "C": which of them is of A's package.
    """
    draw = Random(f"triples {seed}")
    tables: Tables = {}
    for split, snippets in _snippets(validation_fraction, test_fraction).items():
        columns: dict[str, list[object]] = {name: [] for name in ("A", "B", "C", "label")}
        packages = sorted(package for package, found in snippets.items() if len(found) > 1)
        for _ in range(round(n * _share(split, validation_fraction, test_fraction)) if packages else 0):
            mine, other = draw.sample(packages, 2)
            anchor, same = draw.sample(snippets[mine], 2)
            texts, label = [same.text, draw.choice(snippets[other]).text], draw.choice("BC")
            for name, value in zip(columns, (anchor.text, *texts[:: 1 if label == "B" else -1], label), strict=True):
                columns[name].append(value)
        tables[split] = columns
    return tables


def _share(split: str, validation_fraction: float, test_fraction: float) -> float:
    shares = {"validation": validation_fraction, "test": test_fraction}
    return shares.get(split, 1 - validation_fraction - test_fraction)


def _snippets(validation_fraction: float, test_fraction: float) -> dict[str, dict[int, list[Snippet]]]:
    """split → package → its snippets."""
    files: dict[int, list[SourceFile]] = defaultdict(list)
    for file in find_files(STDLIB):
        package = file.name.split("/")[0]
        if package in PACKAGES:
            files[PACKAGES.index(package)].append(file)
    found: dict[str, dict[int, list[Snippet]]] = {split: defaultdict(list) for split in SPLITS}
    for number, those in files.items():
        # Files without a line of code, such as an empty __init__, fill no split.
        cut = [(file, list(_cut(file))) for file in those]
        cut = [(file, texts) for file, texts in cut if texts]
        hashes = np.array([name_hash(file.name) for file, _ in cut])
        assigned = assign(hashes, validation_fraction, test_fraction)
        for (file, texts), split in zip(cut, assigned.tolist(), strict=True):
            found[SPLITS[split]][number] += [Snippet(file.name, number, text) for text in texts]
    return found


def _cut(file: SourceFile) -> Iterator[str]:
    """A file's snippets one after the other; what is left at its end is too short to be one."""
    with open(file.path, encoding="utf-8", errors="replace") as opened:
        lines, size = [], 0
        for line in opened:
            lines.append(line)
            size += len(line)
            if size >= SNIPPET:
                yield "".join(lines)[: 2 * SNIPPET]
                lines, size = [], 0
