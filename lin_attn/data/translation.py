"""`TranslationData`: pairs of a source and its translation, in batches of about the same length."""

from itertools import islice
from typing import Any, ClassVar

import datasets
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lin_attn.data.arguments import Need
from lin_attn.data.batches import TokenBatches, TokenBatchSampler
from lin_attn.data.blocks import Batch, BlockSampler
from lin_attn.data.example_module import ExampleData
from lin_attn.data.examples import Columns, Lengths, encode_rows, token_counts
from lin_attn.data.formats import padded
from lin_attn.data.made_up_languages import LanguagePair
from lin_attn.data.splits import SPLITS

Tables = dict[str, dict[str, list[object]]]


def made_up_pairs(n: int, seed: int, validation_fraction: float, test_fraction: float) -> Tables:
    """n pairs of `LanguagePair`: columns source and target, of train alone, which is cut as all sources are."""
    pairs = list(islice(LanguagePair(seed).pairs(), n))
    return {SPLITS[0]: {"source": [source for source, _ in pairs], "target": [target for _, target in pairs]}}


class TranslationData(ExampleData):
    """Pairs of texts, for `Seq2Seq`.

    A batch is a dict of source (B, N) int64: text, end token; target (B, M) int64: end token, text, end token, so that
    the model's begin_token and end_token are both the tokenizer's end; source_mask and target_mask, bool, where there
    is padding. A training batch has as many pairs of about the same length as fit in batch_tokens.

    Of training, pairs with more than max_length tokens on a side are left out, and a warning says how many. In
    evaluation a longer source is cut, and a target never.

    Source "made-up" makes up two languages, see `lin_attn.data.made_up_languages`. A BPE that is trained is one for
    both sides.

    Args:
        source: See `ExampleData`; or "made-up".
        batch_tokens: Tokens that neither the sources nor the targets of a training batch exceed, padding included, on
            each device.
        source_column: Column of the source; "a.b" is field b of a column a.
        target_column: Column of the target.

    Raises:
        ValueError: An argument cannot be meant; or later, a source cannot be read.
    """

    made_up: ClassVar = {"made-up": (20000, made_up_pairs)}

    def __init__(
        self,
        source: str = "made-up",
        *,
        batch_tokens: int = 4096,
        source_column: str = "source",
        target_column: str = "target",
        **options: Any,
    ) -> None:
        need = Need({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        need.integer("batch_tokens", least=1)
        need.text("source_column", "target_column")
        super().__init__(source, **options)
        if self.max_length > batch_tokens:
            raise ValueError(f"batch_tokens must be at least max_length = {self.max_length}, got {batch_tokens}")
        if self.max_length < 3:
            raise ValueError(f"max_length must be at least 3, begin, a token and end, got {self.max_length}")
        self.batch_tokens = batch_tokens
        self._texts = {"source": source_column, "target": target_column}

    @property
    def text_columns(self) -> dict[str, str]:
        """Source and target."""
        return self._texts

    def encoded(self, rows: datasets.Dataset, split: str) -> datasets.Dataset:
        """Rows as tokens; of training those that are not too long."""
        found = encode_rows(rows, self.tokenizer, self._texts, {}, limit=None, workers=self.num_workers)
        if split != "train":
            return found
        fits = _lengths(found).max(axis=1) <= self.max_length
        if not fits.all():
            rank_zero_warn(
                f"TranslationData leaves out {np.count_nonzero(~fits)} of {len(fits)} training pairs, of more than "
                f"max_length = {self.max_length} tokens"
            )
        if not fits.any():
            raise ValueError(f"all {len(fits)} training pairs are longer than max_length = {self.max_length} tokens")
        return found if fits.all() else found.select(np.flatnonzero(fits))

    def collate(self, columns: Columns) -> Batch:
        """Sources and targets."""
        end = self.tokenizer.end_id
        sources = [np.array([*row[: self.max_length - 1], end], dtype=np.int64) for row in columns["source"]]
        targets = [np.array([end, *row, end], dtype=np.int64) for row in columns["target"]]
        batch: Batch = {}
        for name, rows in (("source", sources), ("target", targets)):
            batch[name], mask = padded(rows, end)
            if mask is not None:
                batch[f"{name}_mask"] = mask
        return batch

    def train_sampler(self, rows: datasets.Dataset, rank: int, world_size: int) -> tuple[BlockSampler, int]:
        """Batches of about the same length, each one item."""
        batches = TokenBatches(_lengths(rows), self.batch_tokens, self.seed)
        return TokenBatchSampler(batches, rank=rank, world_size=world_size), 1


def _lengths(rows: datasets.Dataset) -> Lengths:
    """(n, 2): tokens of each source and target, special ones included."""
    return token_counts(rows, ("source", "target")) + np.array([1, 2], dtype=np.int64)
