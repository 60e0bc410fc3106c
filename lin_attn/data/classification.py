"""`ClassificationData`: texts or pairs of texts with a class or a number, as in GLUE (Wang et al. 2018, 1804.07461)."""

from typing import Any, ClassVar

import datasets
import numpy as np
import torch

from lin_attn.data.arguments import Need
from lin_attn.data.blocks import Batch, BlockSampler
from lin_attn.data.example_module import ExampleData
from lin_attn.data.examples import Columns
from lin_attn.data.formats import joined, padded
from lin_attn.data.order import BlockOrder
from lin_attn.data.stdlib_examples import package_snippets

MISSING = -1  # the class of an example that has none, as the hub has it


class ClassificationData(ExampleData):
    """Texts, or pairs of texts, with a class or a number each, for `SequenceClassifier`.

    A batch is a dict of tokens (B, N) int64, see `lin_attn.data.formats`; labels (B,), int64 or float32, where the
    examples have them; key_mask (B, N) bool where there is padding; token_types (B, N) int64, of pairs.

    Source "stdlib" makes up 8 classes: the package of the standard library that a snippet of code is of. Files are
    dealt out whole to the splits.

    Args:
        source: See `ExampleData`; or "stdlib".
        batch_size: Examples a batch has in training, on each device.
        text_column: Column of the text, or of a pair's first text; "a.b" is field b of a column a.
        pair_column: Column of a pair's second text.
        label_column: Column of the labels: classes as integers from 0 or as texts, which are numbered in the order of
            the alphabet; -1 is none.
        numbers: Labels are numbers, for a regression.
        token_types: Batches of pairs have token_types, for networks with n_token_types.

    Raises:
        ValueError: An argument cannot be meant; or later, a source cannot be read, or has other labels.
    """

    special = ("pad", "class", "separator")
    made_up: ClassVar = {"stdlib": (4000, package_snippets)}

    def __init__(
        self,
        source: str = "stdlib",
        *,
        batch_size: int = 32,
        text_column: str = "text",
        pair_column: str | None = None,
        label_column: str = "label",
        numbers: bool = False,
        token_types: bool = True,
        **options: Any,
    ) -> None:
        need = Need({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        need.integer("batch_size", least=1)
        need.text("text_column", "label_column")
        need.text("pair_column", optional=True)
        super().__init__(source, **options)
        need_max(self.max_length, 3 if pair_column is None else 5)
        self.batch_size, self.numbers, self.token_types = batch_size, numbers, token_types
        self._texts = {"first": text_column} | ({} if pair_column is None else {"second": pair_column})
        self._label = label_column
        self.class_names: list[str] | None = None  # of classes that are texts

    @property
    def text_columns(self) -> dict[str, str]:
        """One text, or two."""
        return self._texts

    @property
    def label_column(self) -> str:
        """The column of labels."""
        return self._label

    def prepared(self, rows: datasets.Dataset, split: str, name: str) -> datasets.Dataset:
        """Labels that are texts become classes; those that are none are refused, or in a test split dropped."""
        if self._label not in rows.column_names:
            return rows
        labels = rows[self._label][:]
        kind = rows.features[self._label]
        where = f"column {self._label!r} of {split} ({name})"
        if isinstance(kind, datasets.Value) and kind.dtype in ("string", "large_string", "bool"):
            if self.numbers:
                raise ValueError(f"{where} holds {kind.dtype}; wanted numbers, or numbers=false for classes")
            rows, labels = self._numbered(rows, list(map(str, labels)), where)
        array = np.array([np.nan if label is None else label for label in labels], dtype=np.float64)
        # A column without a label is one value throughout: -1, or nothing.
        absent = np.isnan(array) if self.numbers else np.isnan(array) | (array == MISSING)
        if split == "test" and (absent.all() or (self.numbers and len(array) > 1 and len(set(array.tolist())) == 1)):
            return rows.remove_columns(self._label)
        if absent.any():
            raise ValueError(f"{where} has no label in row {int(absent.argmax())}; wanted one in every row")
        if not self.numbers and (array < 0).any() | (array != np.floor(array)).any():
            wrong = array[(array < 0) | (array != np.floor(array))][0]
            raise ValueError(f"{where} holds {wrong:g}; wanted classes from 0, or numbers=true for a regression")
        return rows.cast_column(self._label, datasets.Value("float32" if self.numbers else "int64"))

    def _numbered(self, rows: datasets.Dataset, labels: list[str], where: str) -> tuple[datasets.Dataset, list[int]]:
        if self.class_names is None:  # training rows come first
            self.class_names = sorted(set(labels))
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if unknown := sorted(set(labels) - set(numbers)):
            raise ValueError(f"{where} has the class {unknown[0]!r}; wanted those of training, {self.class_names}")
        found = [numbers[label] for label in labels]
        return rows.remove_columns(self._label).add_column(self._label, found), found

    def collate(self, columns: Columns) -> Batch:
        """One sequence an example."""
        pairs = columns.get("second", [None] * len(columns["first"]))
        special = self.special_tokens
        rows = [joined(special, a, b, self.max_length) for a, b in zip(columns["first"], pairs, strict=True)]
        tokens, mask = padded([row for row, _ in rows], special.ids["pad"])
        batch = {"tokens": tokens}
        if mask is not None:
            batch["key_mask"] = mask
        if self.token_types and "second" in columns:
            batch["token_types"], _ = padded([types for _, types in rows], 0)
        if "label" in columns:
            batch["labels"] = torch.tensor(columns["label"], dtype=torch.float32 if self.numbers else torch.int64)
        return batch

    def train_sampler(self, rows: datasets.Dataset, rank: int, world_size: int) -> tuple[BlockSampler, int]:
        """Rows in a permutation of each epoch's own."""
        order = BlockOrder((0, len(rows)), self.seed)
        return BlockSampler(order, rank=rank, world_size=world_size), self.batch_size


def need_max(max_length: int, least: int) -> None:
    """Raises ValueError where max_length has no room for a text among the special tokens."""
    if max_length < least:
        raise ValueError(
            f"max_length must be at least {least}, special tokens and a token of each text, got {max_length}"
        )
