"""Examples as rows of a table: from a set of the hub, from files, or made up; and which of them are for what.

hub:OWNER/NAME                    read as `datasets.load_dataset` does, with its splits
file, folder or glob              .jsonl, .json, .csv, .tsv (no quoting) or .parquet, all of one kind: one table
a name such as "stdlib"           made up by the data module

Rows that no source sets apart for validation or test are cut from training by a hash of their key: rows that share the
key's text stay together, so that no text of it is both trained on and judged.
"""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import datasets
import numpy as np

from lin_attn.data.files import find_files
from lin_attn.data.hub import PREFIX, HubSet
from lin_attn.data.sources import SourceOptions
from lin_attn.data.splits import SPLITS, assign, bytes_hash

# ending → the builder of `datasets` and its options. Left alone, it would read the text "NA" as a missing value.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "delimiter": "\t", "quoting": csv.QUOTE_NONE}),
    ".parquet": ("parquet", {}),
}

MakeUp = Callable[[int, int, float, float], Mapping[str, Mapping[str, Sequence[object]]]]


class Part(NamedTuple):
    """One table of a split: a split may have several, each judged apart. `name` is that of its figures."""

    name: str
    rows: datasets.Dataset


@dataclass(frozen=True)
class RowSource:
    """Where rows are from; the fields are those of the data modules.

    Args:
        columns: what is read, those with text first, of which the first is the key; "a.b" is the field b of a column a.
        optional: columns that a test split may lack, such as labels.
        made_up: what a source may be that is made up: (n_examples, seed, two fractions) → columns of each split, or of
            train alone, which is then cut.
    """

    source: str
    columns: tuple[str, ...]
    validation_source: str | None = None
    test_source: str | None = None
    config_name: str | None = None
    data_dir: str | None = None
    revision: str | None = None
    train_split: str = "train"
    validation_split: tuple[str, ...] = ("validation",)
    test_split: tuple[str, ...] = ("test",)
    validation_fraction: float = 0.05
    test_fraction: float = 0.05
    n_examples: int | None = None
    seed: int = 0
    optional: tuple[str, ...] = ()
    made_up: Mapping[str, tuple[int, MakeUp]] = field(default_factory=dict)

    def open(self) -> dict[str, list[Part]]:
        """The tables of "train" (one), "validation" and "test" (none where there are no rows).

        Raises:
            ValueError: A source cannot be read, or lacks a column, or has no rows.
        """
        self._refuse_idle_options()
        if self.source in self.made_up:
            return self._make_up()
        if self.n_examples is not None:
            raise ValueError(
                f"n_examples is {self.n_examples} with source {self.source!r}, which has the examples it has; wanted "
                f"it with a source that is made up: {', '.join(self.made_up)}"
            )
        found: dict[str, list[Part]] = {"train": [], "validation": [], "test": []}
        names = {"validation": self.validation_split, "test": self.test_split}
        opened = self._hub_set(self.source)
        if opened is None:
            train = self._checked(read_files(self.source), self.source, self.columns)
        else:
            train = self._split(opened, self.train_split, self.columns)
            for role, splits in names.items():
                missing = [split for split in splits if not opened.has_split(split)]
                if missing in ([], [role]):  # the default name may be missing, a chosen one may not
                    wanted = self._needed(role)
                    found[role] = [Part(_short(s, role), self._split(opened, s, wanted)) for s in splits if not missing]
                else:
                    self._split(opened, missing[0], self.columns)
        for role, source in (("validation", self.validation_source), ("test", self.test_source)):
            if source is not None:
                found[role] = self._given(role, source, names[role])
        fractions = [
            0.0 if found[role] else fraction
            for role, fraction in (("validation", self.validation_fraction), ("test", self.test_fraction))
        ]
        parts = cut(train, self.columns[:1], *fractions) if any(fractions) else {"train": train}
        for role, rows in parts.items():
            found[role] = [Part(role, rows)]
        return found

    def _refuse_idle_options(self) -> None:
        """An option that the sources give nothing to do is a mistake."""
        sources = (self.source, self.validation_source, self.test_source)
        if any(source is not None and source.startswith(PREFIX) for source in sources):
            return
        defaults = {item.name: item.default for item in fields(self)}
        idle = ["config_name", "data_dir", "revision", "train_split", "validation_split", "test_split"]
        idle += ["validation_source", "test_source"] if self.source in self.made_up else []
        for name in idle:
            if (value := getattr(self, name)) not in (defaults[name], ()):
                raise ValueError(f"{name} is {value!r}, which has no effect with source {self.source!r}; leave it out")

    def _make_up(self) -> dict[str, list[Part]]:
        default, make = self.made_up[self.source]
        fractions = (self.validation_fraction, self.test_fraction)
        tables = make(self.n_examples or default, self.seed, *fractions)
        rows = {split: datasets.Dataset.from_dict(dict(columns)) for split, columns in tables.items()}
        if set(rows) == {"train"}:
            rows = cut(rows["train"], self.columns[:1], *fractions)
        return {split: [Part(split, rows[split])] if len(rows.get(split, ())) else [] for split in SPLITS}

    def _given(self, role: str, source: str, splits: tuple[str, ...]) -> list[Part]:
        """The parts of a validation_source or test_source."""
        opened = self._hub_set(source)
        if opened is None:
            return [Part(role, self._checked(read_files(source), source, self._needed(role)))]
        splits = tuple(split for split in splits if opened.has_split(split)) or (self.train_split,)
        return [Part(_short(split, role), self._split(opened, split, self._needed(role))) for split in splits]

    def _needed(self, role: str) -> tuple[str, ...]:
        """The columns that a split cannot lack."""
        return tuple(name for name in self.columns if role != "test" or name not in self.optional)

    def _hub_set(self, source: str) -> HubSet | None:
        if source.startswith(PREFIX):
            column = self.columns[0].partition(".")[0]
            return HubSet(source, SourceOptions(column, None, self.config_name, self.data_dir, self.revision))
        return None

    def _split(self, opened: HubSet, split: str, wanted: tuple[str, ...]) -> datasets.Dataset:
        return self._checked(opened.table(split), f"{opened.label}, split {split!r}", wanted)

    def _checked(self, rows: datasets.Dataset, label: str, wanted: tuple[str, ...]) -> datasets.Dataset:
        if any("." in name for name in self.columns):
            rows = rows.flatten()
        missing = [name for name in wanted if name not in rows.column_names]
        if missing:
            raise ValueError(f"{label} has no column {missing[0]!r}, there are {rows.column_names}")
        if not len(rows):
            raise ValueError(f"{label} has no rows; wanted at least one example")
        return rows


def read_files(spec: str) -> datasets.Dataset:
    """One table of all rows of the files, in the order of their names.

    Raises:
        ValueError: There are no files, they are of several kinds or of an unknown one, or cannot be read.
    """
    paths = [file.path for file in find_files(spec)]
    endings = {os.path.splitext(path.lower())[1] for path in paths}
    if len(endings) > 1 or not endings <= set(KINDS):
        raise ValueError(
            f"source {spec!r} has files that end in {', '.join(sorted(endings))}; wanted one of {', '.join(KINDS)}"
        )
    empty = [path for path in paths if not os.path.getsize(path)]
    if empty:
        raise ValueError(f"{empty[0]!r} is empty; wanted rows")
    builder, options = KINDS[endings.pop()]
    try:
        return datasets.load_dataset(builder, data_files=paths, split="train", **options)
    except Exception as error:  # the library raises many types, and has the cause underneath
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {str(cause).strip()}"
    raise ValueError(f"cannot read the rows of {spec!r} ({reason}); wanted {builder} with the same columns everywhere")


def cut(
    rows: datasets.Dataset, key: Sequence[str], validation_fraction: float, test_fraction: float
) -> dict[str, datasets.Dataset]:
    """Cuts a table in train, validation and test by a hash of the key columns; a fraction of 0 gives no such split.

    Raises:
        ValueError: There are too few different keys.
    """
    columns = [rows[name] for name in key]
    hashes = np.array([bytes_hash("\0".join(map(str, values)).encode()) for values in zip(*columns, strict=True)])
    kinds, where = np.unique(hashes, return_inverse=True)
    wanted = 1 + (validation_fraction > 0) + (test_fraction > 0)
    if len(kinds) < wanted:
        raise ValueError(f"there are {len(kinds)} different texts to cut {wanted} splits from; wanted as many at least")
    assigned = assign(kinds, validation_fraction, test_fraction)[where]
    fractions = (1.0, validation_fraction, test_fraction)
    return {
        split: rows.select(np.flatnonzero(assigned == index))
        for index, split in enumerate(SPLITS)
        if fractions[index] > 0
    }


def _short(split: str, role: str) -> str:
    """validation_matched → matched."""
    name = split.partition("[")[0]
    return name.removeprefix(f"{role}_") or name
