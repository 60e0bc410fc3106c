"""`RankingData`: triples of texts, of which B or C belongs nearer to A (CAIL2019-SCM, Xiao et al. 2019, 1911.08962)."""

from typing import Any, ClassVar

import datasets
import numpy as np

from lin_attn.data.arguments import Need
from lin_attn.data.blocks import Batch, BlockSampler
from lin_attn.data.classification import need_max
from lin_attn.data.example_module import ExampleData
from lin_attn.data.examples import Columns
from lin_attn.data.formats import joined, padded
from lin_attn.data.order import BlockOrder
from lin_attn.data.stdlib_examples import package_triples

NAMES = ("A", "B", "C")


class RankingData(ExampleData):
    """Triples (A, B, C) of texts, for `PairRanker`.

    A batch is a dict of first_tokens (B, N) and second_tokens (B, N′) int64: A with the text that is nearer to it, and
    A with the other one; first_mask and second_mask, bool, where there is padding; first_types and second_types int64.

    Source "stdlib" makes triples up: snippets of code, of which two are of one package of the standard library. Files
    are dealt out whole to the splits.

    Args:
        source: See `ExampleData`; or "stdlib".
        batch_size: Triples a batch has in training, on each device.
        text_columns: Columns of A, B and C.
        label_column: Column that tells which is nearer to A, by "B" or "C"; null where it is B throughout.
        token_types: Batches have types, for networks with n_token_types.

    Raises:
        ValueError: An argument cannot be meant; or later, a source cannot be read, or has other labels.
    """

    special = ("pad", "class", "separator")
    made_up: ClassVar = {"stdlib": (4000, package_triples)}

    def __init__(
        self,
        source: str = "stdlib",
        *,
        batch_size: int = 32,
        text_columns: list[str] | None = None,
        label_column: str | None = "label",
        token_types: bool = True,
        **options: Any,
    ) -> None:
        need = Need({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        need.integer("batch_size", least=1)
        need.text("label_column", optional=True)
        columns = list(NAMES) if text_columns is None else list(text_columns)
        need("text_columns", len(set(columns)) == len(NAMES), "three columns, those of A, B and C, or None for these")
        super().__init__(source, **options)
        need_max(self.max_length, 5)
        self.batch_size, self.token_types = batch_size, token_types
        self._texts, self._label = dict(zip(NAMES, columns, strict=True)), label_column

    @property
    def text_columns(self) -> dict[str, str]:
        """A, B and C."""
        return self._texts

    @property
    def label_column(self) -> str | None:
        """The column of labels."""
        return self._label

    def prepared(self, rows: datasets.Dataset, split: str, name: str) -> datasets.Dataset:
        """Checks that labels are B or C."""
        if self._label is not None and self._label in rows.column_names:
            labels = np.array(rows[self._label][:], dtype=object)
            wrong = np.flatnonzero((labels != "B") & (labels != "C"))
            if len(wrong):
                raise ValueError(
                    f"column {self._label!r} of {split} ({name}) holds {labels[wrong[0]]!r} in row {wrong[0]}; "
                    'wanted "B" or "C"'
                )
        return rows

    def collate(self, columns: Columns) -> Batch:
        """Two sequences an example, the pair that belongs above first; without a label, (A, B)."""
        labels = columns.get("label", ["B"] * len(columns["A"]))
        triples = zip(*(columns[name] for name in NAMES), labels, strict=True)
        ordered = [(a, b, c) if label == "B" else (a, c, b) for a, b, c, label in triples]
        batch: Batch = {}
        special = self.special_tokens
        for which, place in (("first", 1), ("second", 2)):
            rows = [joined(special, triple[0], triple[place], self.max_length) for triple in ordered]
            batch[f"{which}_tokens"], mask = padded([row for row, _ in rows], special.ids["pad"])
            if mask is not None:
                batch[f"{which}_mask"] = mask
            if self.token_types:
                batch[f"{which}_types"], _ = padded([types for _, types in rows], 0)
        return batch

    def train_sampler(self, rows: datasets.Dataset, rank: int, world_size: int) -> tuple[BlockSampler, int]:
        """Rows in a permutation of each epoch's own."""
        order = BlockOrder((0, len(rows)), self.seed)
        return BlockSampler(order, rank=rank, world_size=world_size), self.batch_size
