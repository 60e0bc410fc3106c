"""What data modules of examples have in common: rows, a tokenizer, tables of tokens and their loaders.

The training order is a function of (seed, epoch); the loader's state counts its batches, as with text.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import ClassVar

import datasets
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lin_attn.data.blocks import Batch, BlockSampler
from lin_attn.data.cache import default_cache_dir
from lin_attn.data.example_arguments import check_example_arguments
from lin_attn.data.examples import Columns, ExampleDataset, encode_rows
from lin_attn.data.loader import BlockLoader, build_loader, place_of
from lin_attn.data.order import BlockOrder
from lin_attn.data.rows import MakeUp, Part, RowSource
from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import Tokenizer
from lin_attn.data.tokenizer_spec import TokenizerSpec
from lin_attn.data.trained_tokenizers import train_on_rows


class ExampleData(LightningDataModule):
    """A data module whose batches are examples, padded to the longest of the batch.

    Args:
        source: "hub:OWNER/NAME"; or a file, a folder or a glob of files of one kind: .jsonl, .json, .csv, .tsv (without
            quoting) or .parquet; or a name of what the module makes up.
        validation_source: Validation examples, in the forms of source, but none made up.
        test_source: Test examples, likewise.
        config_name: Configuration of the hub set.
        data_dir: Folder of the hub set to read, where it has several without naming configurations.
        revision: Branch, tag or commit of the hub set.
        train_split: Split of the hub set to train on, such as "train" or "train[:10%]".
        validation_split: Split of the hub set for validation, or a list of several, which are judged apart.
            "validation" may be missing, then it is cut from train; null cuts it in any case.
        test_split: Split of the hub set for test, likewise. It may lack labels, and is then for predict alone.
        validation_fraction: Share of the examples that is for validation where no source or split is; by a hash of
            their first text.
        test_fraction: Share of the examples that is for test, likewise.
        n_examples: Of a source that is made up: how many examples, those of validation and test included.
        eval_batch_size: Examples a batch has in validation and test; by default 32.
        max_length: Tokens of a sequence at most, special ones included.
        tokenizer: As with `TextCorpus`: "bytes"; "bpe" to train one on the training texts; or one that is there.
        vocab_size: Of the BPE that is trained; by default 8192.
        end_token: The token that ends a document, as with `TextCorpus`.
        seed: Of the training order, and of what is made up.
        num_workers: Processes that read ahead; 0 reads in the training process.
        cache_dir: Where a trained tokenizer is kept. By default as with `TextCorpus`.

    Raises:
        ValueError: An argument cannot be meant; or later, a source cannot be read.
    """

    special: ClassVar[tuple[str, ...]] = ()  # the special tokens that its examples need
    made_up: ClassVar[Mapping[str, tuple[int, MakeUp]]] = {}  # source → how many by default, and what makes it up

    def __init__(
        self,
        source: str,
        *,
        validation_source: str | None = None,
        test_source: str | None = None,
        config_name: str | None = None,
        data_dir: str | None = None,
        revision: str | None = None,
        train_split: str = "train",
        validation_split: str | list[str] | None = "validation",
        test_split: str | list[str] | None = "test",
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
        n_examples: int | None = None,
        eval_batch_size: int | None = None,
        max_length: int = 512,
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        end_token: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_example_arguments(arguments)
        super().__init__()
        # Not for the logger: what a model and a data module both call by one name would have to be equal there.
        self.save_hyperparameters(logger=False)
        self.source, self.seed, self.num_workers = source, seed, num_workers
        self.eval_batch_size, self.max_length = eval_batch_size or 32, max_length
        self._arguments = arguments
        self._spec = TokenizerSpec(tokenizer, vocab_size, (), end_token)
        self._cache_dir = os.path.expanduser(cache_dir) if cache_dir else default_cache_dir()
        self._tokenizer: Tokenizer | None = None if self._spec.is_trained else self._with_special(self._spec.open())
        self._parts: dict[str, list[Part]] | None = None

    # What a data module says

    @property
    def text_columns(self) -> dict[str, str]:
        """Column of tokens → the column of their text. The first is the key that cuts splits."""
        raise NotImplementedError

    @property
    def label_column(self) -> str | None:
        """The column of labels, which a test split may lack; None where there are none."""
        return None

    def collate(self, columns: Columns) -> Batch:
        """The batch of some encoded rows."""
        raise NotImplementedError

    def train_sampler(self, rows: datasets.Dataset, rank: int, world_size: int) -> tuple[BlockSampler, int]:
        """Which rows this process trains on, and how many of the sampler's items a batch has."""
        raise NotImplementedError

    def prepared(self, rows: datasets.Dataset, split: str, name: str) -> datasets.Dataset:
        """Rows as they are to be encoded, checked."""
        return rows

    def encoded(self, rows: datasets.Dataset, split: str) -> datasets.Dataset:
        """Rows as tokens, which `collate` takes."""
        label = self.label_column
        keep = {"label": label} if label is not None and label in rows.column_names else {}
        return encode_rows(
            rows, self.tokenizer, self.text_columns, keep, limit=self.max_length, workers=self.num_workers
        )

    # Reading

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns text into tokens and back. One that is trained on the examples is there once they are read."""
        if self._tokenizer is None:
            self.setup()
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def special_tokens(self) -> SpecialTokens:
        """The tokenizer, of a module that needs special tokens."""
        tokenizer = self.tokenizer
        assert isinstance(tokenizer, SpecialTokens)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids; of a tokenizer that is still to be trained, the most that there can be."""
        if self._tokenizer is None:
            return self._spec.trained_size + len(self.special)
        return self._tokenizer.vocab_size

    @property
    def parts(self) -> dict[str, list[Part]]:
        """The encoded tables of "train" (one), "validation" and "test"."""
        if self._parts is None:
            self.setup()
        assert self._parts is not None
        return self._parts

    @property
    def val_names(self) -> list[str]:
        """The names of the validation loaders, by which figures of all but the first are logged."""
        return [part.name for part in self.parts["validation"]]

    @property
    def test_names(self) -> list[str]:
        """The names of the test loaders."""
        return [part.name for part in self.parts["test"]]

    def prepare_data(self) -> None:
        """Fills the caches; Lightning calls it in one process of each machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Reads rows and makes tokens of them.

        Raises:
            ValueError: A source is at fault.
        """
        if self._parts is not None:
            return
        label = (self.label_column,) if self.label_column else ()
        given = dict(self._arguments)
        for name in ("validation_split", "test_split"):
            value = given[name]
            given[name] = (value,) if isinstance(value, str) else tuple(value or ())
        known = {item.name for item in fields(RowSource)}
        rows = RowSource(
            columns=(*self.text_columns.values(), *label),
            optional=label,
            made_up=self.made_up,
            **{name: value for name, value in given.items() if name in known},
        ).open()
        rows = {
            split: [Part(part.name, self.prepared(part.rows, split, part.name)) for part in found]
            for split, found in rows.items()
        }
        if self._tokenizer is None:
            texts = list(self.text_columns.values())
            trained = train_on_rows(self._spec, rows["train"][0].rows, texts, self._cache_dir)
            self._tokenizer = self._with_special(trained)
        self._parts = {
            split: [Part(part.name, self.encoded(part.rows, split)) for part in found] for split, found in rows.items()
        }

    def _with_special(self, tokenizer: Tokenizer) -> Tokenizer:
        return SpecialTokens(tokenizer, self.special) if self.special else tokenizer

    # Loaders

    def train_dataloader(self) -> DataLoader[Batch]:
        """Every example once an epoch, in an order by seed and epoch; resumes within an epoch."""
        rows = self.parts["train"][0].rows
        sampler, batch_size = self.train_sampler(rows, *place_of(self.trainer))
        return build_loader(BlockLoader, ExampleDataset(rows, self.collate), sampler, batch_size, self.num_workers)

    def val_dataloader(self) -> list[DataLoader[Batch]]:
        """Every validation example in order, a loader each part; in training none where there are no examples."""
        return self._evaluation_loaders("validation")

    def test_dataloader(self) -> list[DataLoader[Batch]]:
        """Every test example in order, a loader each part.

        Raises:
            ValueError: They have no labels to judge by.
        """
        return self._evaluation_loaders("test")

    def predict_dataloader(self) -> DataLoader[Batch]:
        """Every test example in order, all parts one after the other, with labels or without.

        Raises:
            ValueError: There are none.
        """
        parts = self._judged("test")
        return self._in_order(datasets.concatenate_datasets([part.rows for part in parts]))

    def _judged(self, split: str) -> list[Part]:
        parts = self.parts[split]
        if not parts and not (self.trainer and self.trainer.state.fn == "fit"):
            raise ValueError(
                f"there are no {split} examples; wanted {split}_source, {split}_split or a {split}_fraction"
            )
        return parts

    def _evaluation_loaders(self, split: str) -> list[DataLoader[Batch]]:
        parts = self._judged(split)
        for part in parts:
            if self.label_column and "label" not in part.rows.column_names:
                raise ValueError(
                    f"the {split} examples {part.name!r} have no labels to judge by; predict writes what a model makes "
                    "of them, and figures are to be had of the validation examples"
                )
        return [self._in_order(part.rows) for part in parts]

    def _in_order(self, rows: datasets.Dataset) -> DataLoader[Batch]:
        rank, world_size = place_of(self.trainer)
        sampler = BlockSampler(BlockOrder((0, len(rows)), shuffle=False), rank=rank, world_size=world_size)
        dataset = ExampleDataset(rows, self.collate)
        return build_loader(DataLoader, dataset, sampler, self.eval_batch_size, self.num_workers)
