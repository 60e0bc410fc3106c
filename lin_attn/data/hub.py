"""Data sets of the Hugging Face hub, and folders that look like one."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import huggingface_hub.constants

from lin_attn.data.documents import Document, column_bytes, rows_to_documents

if TYPE_CHECKING:
    from lin_attn.data.sources import SourceOptions

PREFIX = "hub:"


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set, as a source of documents "split:row" (rows count from 0)."""

    label: str
    split: str
    rows: datasets.Dataset
    text_column: str
    row_separator: str | None

    binary: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """The fingerprint that `datasets` keeps of content and split, and how rows become documents."""
        content = f"{self.label} {self.split} {self.rows._fingerprint}"
        return f"{content} {self.text_column!r} {self.row_separator!r}"

    def documents(self) -> Iterator[Document]:
        """Reads the split's rows."""
        return rows_to_documents(self.split, self._numbered_rows(), self.row_separator)

    def _numbered_rows(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        where = f"{self.label}, split {self.split!r}: column {self.text_column!r}"
        for table in self.rows.select_columns(self.text_column).with_format("arrow").iter(1000):
            for chunk in table.column(self.text_column).chunks:
                for text in column_bytes(chunk, where):
                    yield number, text
                    number += 1


class HubSet:
    """A data set with its splits, loaded (downloaded at first) by `datasets.load_dataset`.

    Args:
        spec: "hub:OWNER/NAME", "hub:NAME", or "hub:" and a local folder.
        options: Which configuration, folder and revision of it, and how its rows are read.
        streaming: Open it as streams of rows, of which nothing is kept.

    Raises:
        ValueError: The data set cannot be had; the message says what to do.
    """

    def __init__(self, spec: str, options: "SourceOptions", *, streaming: bool = False) -> None:
        self.id = os.path.expanduser(spec.removeprefix(PREFIX))
        self.text_column = options.text_column
        self.row_separator = options.row_separator
        self._streaming = streaming
        self._arguments = {
            "path": self.id,
            "name": options.config_name,
            "data_dir": options.data_dir,
            "revision": options.revision,
        }
        parts = (options.config_name, options.data_dir, options.revision)
        self.label = f"hub:{self.id}" + "".join(f" {part}" for part in parts if part)
        self._splits: dict[str, Any] = self._load(split=None)

    def has_split(self, split: str) -> bool:
        """Whether there is a split of that name; slices such as "train[:1%]" count by their name."""
        return split.split("[")[0] in self._splits

    def split(self, split: str) -> HubSplit:
        """Opens a split.

        Args:
            split: A name, or a slice of one in the notation of `datasets`, "train[:10%]".

        Raises:
            ValueError: There is no such split or column; the message lists those there are.
        """
        return HubSplit(self.label, split, self.rows(split), self.text_column, self.row_separator)

    def rows(self, split: str) -> Any:
        """The rows of a split: a `datasets.Dataset`, or an IterableDataset where they are streamed.

        Raises:
            ValueError: There is no such split or column; the message lists those there are.
        """
        rows = self.table(split)
        names = rows.column_names
        if names is None:  # a stream tells its columns with its first rows
            rows = self._told(lambda: rows._resolve_features())
            names = rows.column_names
        if self.text_column not in names:
            raise ValueError(
                f"{self.label}, split {split!r} has no column {self.text_column!r}, there are {names}; "
                "choose with text_column"
            )
        return rows

    def table(self, split: str) -> Any:
        """As `rows`, whatever its columns are.

        Raises:
            ValueError: There is no such split; the message lists those there are.
        """
        if not self.has_split(split):
            raise ValueError(f"{self.label} has no split {split!r}, there are {list(self._splits)}")
        if split not in self._splits and self._streaming:
            raise ValueError(f"a split is {split!r}, and a stream has no slices; wanted one of {list(self._splits)}")
        return self._splits[split] if split in self._splits else self._load(split=split)

    def fingerprint(self) -> str:
        """What `datasets` keys its cache by: the set, its revision, its files and its options."""
        builder = self._told(lambda: datasets.load_dataset_builder(**self._arguments))
        return f"{self.label} {builder.hash} {builder.config_id}"

    def _load(self, split: str | None) -> Any:
        if not self.id:
            raise ValueError(f'source "{PREFIX}" names no data set, wanted hub:OWNER/NAME')
        return self._told(lambda: datasets.load_dataset(**self._arguments, split=split, streaming=self._streaming))

    def _told(self, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except Exception as error:  # the library raises some twenty types, from six packages
            reason = f"{type(error).__name__}: {str(error).strip()}"
            hint = self._hint(error)
        raise ValueError(f"cannot load the data set {self.label} ({reason}). {hint}")

    def _hint(self, error: Exception) -> str:
        if "scripts are no longer supported" in str(error):
            return (
                "It is made by a script, which datasets no longer runs: try revision=refs/convert/parquet, "
                "or download its files and name them as the source."
            )
        if isinstance(error, OSError):
            return (
                f"The hub was not reached and the cache {datasets.config.HF_DATASETS_CACHE} "
                f"(HF_HOME={huggingface_hub.constants.HF_HOME}) does not have it. Load it once with network "
                "access, or set HF_HOME to a folder that holds it and HF_HUB_OFFLINE=1, or use local files "
                "(.txt, .jsonl, .parquet) as the source."
            )
        return "Check the name, config_name, data_dir, revision and split."
