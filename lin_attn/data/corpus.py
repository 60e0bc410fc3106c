"""`TextCorpus`: text as a LightningDataModule of packed blocks of tokens."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lin_attn.data.arguments import check_arguments
from lin_attn.data.blocks import Batch, BlockDataset, BlockSampler, as_is
from lin_attn.data.cache import build_corpus, corpus_key, default_cache_dir, open_corpus
from lin_attn.data.loader import BlockLoader
from lin_attn.data.sources import Source, SourceOptions, open_sources
from lin_attn.data.splits import SplitRule
from lin_attn.data.store import TokenStore
from lin_attn.data.tokenizer import ByteTokenizer, Tokenizer


class TextCorpus(LightningDataModule):
    """Text from this machine or the Hugging Face hub, for language modelling.

    A batch is a dict of int64 tensors: tokens (B, N), targets (B, N) with -100 where there is none,
    n_bytes (B,) that the targets stand for, and start (B,), the first target's place in its split.

    Args:
        source: "stdlib" (the source of Python's standard library), a file, a folder, a glob such as
            "books/**/*.txt", or "hub:OWNER/NAME"; or a list of these. Files are text, .jsonl or .parquet,
            and text and .jsonl may be packed by gzip.
        block_length: Tokens a block has, and so the context length.
        batch_size: Blocks a batch has in training, on each device.
        eval_batch_size: Blocks a batch has elsewhere; by default as in training.
        validation_source: Validation text, in the forms of source. Its files are left out of training.
        test_source: Test text, in the forms of source. Its files are left out of training.
        split: How validation and test are cut from source where they do not come with it: "document" takes
            whole documents by a hash of their name, "tail" the last bytes.
        validation_fraction: Share of the documents, or of the bytes, that is for validation.
        test_fraction: Share of the documents, or of the bytes, that is for test.
        text_column: Column of .jsonl, .parquet and hub rows that has the text.
        row_separator: What joins the rows of a file or hub split to one document ("" for wikitext, "\\n"
            where rows are lines); by default each row is a document.
        config_name: Configuration of the hub set.
        revision: Branch, tag or commit of the hub set.
        train_split: Split of the hub set to train on, such as "train" or "train[:10%]".
        validation_split: Split of the hub set for validation. "validation" may be missing, then train is
            split; null splits train in any case.
        test_split: Split of the hub set for test, likewise.
        seed: Of the order of training blocks.
        num_workers: Processes that read ahead; 0 reads in the training process.
        cache_dir: Where tokens are kept. By default $LIN_ATTN_CACHE, else $XDG_CACHE_HOME/lin_attn, else
            ~/.cache/lin_attn.

    Raises:
        ValueError: An argument cannot be meant; or later, a source cannot be read.
    """

    def __init__(
        self,
        source: str | list[str] = "stdlib",
        block_length: int = 256,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        validation_source: str | list[str] | None = None,
        test_source: str | list[str] | None = None,
        split: str = "document",
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
        text_column: str = "text",
        row_separator: str | None = None,
        config_name: str | None = None,
        revision: str | None = None,
        train_split: str = "train",
        validation_split: str | None = "validation",
        test_split: str | None = "test",
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_arguments(self.hparams)
        self.block_length = block_length
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self._sources = (source, validation_source, test_source)
        self._options = SourceOptions(
            text_column, row_separator, config_name, revision, (train_split, validation_split, test_split)
        )
        self._rule = SplitRule(split, validation_fraction, test_fraction)
        self._cache_dir = os.path.expanduser(cache_dir) if cache_dir else default_cache_dir()
        self._tokenizer: Tokenizer = ByteTokenizer()
        self._stores: dict[str, TokenStore] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns bytes into tokens and back."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids, known before any text is read."""
        return self._tokenizer.vocab_size

    @property
    def stores(self) -> dict[str, TokenStore]:
        """The token stores of "train", "validation" and "test", opened (and built) when first asked for."""
        self.setup()
        return self._stores

    def document_names(self, split: str, start: int, n: int) -> list[str]:
        """Names of the documents that tokens start..start+n-1 of a split touch.

        Args:
            split: "train", "validation" or "test".
            start: As in a batch's "start".
            n: How many tokens, such as block_length.
        """
        return self.stores[split].document_names(start, n)

    def prepare_data(self) -> None:
        """Builds the token cache; Lightning calls it in one process of each machine."""
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        """Opens the token cache, and builds it if it is missing or damaged.

        Raises:
            ValueError: A source or the cache is at fault, or there is too little text to fit on.
        """
        if not self._stores:
            self._stores = self._open()
        if stage == "fit":
            self._check_that_there_is_a_block()

    def _open(self) -> dict[str, TokenStore]:
        sources = open_sources(*self._sources, self._options)
        self._warn_of_what_is_left_out(sources)
        rule = SplitRule(
            self._rule.split,
            0.0 if "validation" in sources else self._rule.validation_fraction,
            0.0 if "test" in sources else self._rule.test_fraction,
        )
        folder = os.path.join(self._cache_dir, "corpora", corpus_key(sources, self._tokenizer, rule))
        opened = open_corpus(folder)
        if opened is None:
            opened = build_corpus(folder, sources, self._tokenizer, rule)
        meta, stores = opened
        rank_zero_info(f"TextCorpus: {_summary(meta)}; {folder}")
        return stores

    def train_dataloader(self) -> DataLoader[Batch]:
        """Every block of train once an epoch, ordered by seed and epoch; resumes within an epoch.

        Raises:
            ValueError: There is too little text for one block.
        """
        self._check_that_there_is_a_block()
        return self._loader("train", self.batch_size, shuffle=True)

    def val_dataloader(self) -> "DataLoader[Batch] | list[Any]":
        """Every block of validation, in order; in training, no loader where there is no validation text."""
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> "DataLoader[Batch] | list[Any]":
        """Every block of test, in order."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> "DataLoader[Batch] | list[Any]":
        """The same as test."""
        return self.test_dataloader()

    def _check_that_there_is_a_block(self) -> None:
        n_tokens, needed = len(self.stores["train"]), self.block_length + 1
        if n_tokens < needed:
            raise ValueError(
                f"too little text to train on: {n_tokens} tokens in train, and one block with "
                f"block_length={self.block_length} needs {needed}"
            )

    def _evaluation_loader(self, split: str) -> "DataLoader[Batch] | list[Any]":
        if len(self.stores[split]) > 1:
            return self._loader(split, self.eval_batch_size)
        if self.trainer and self.trainer.state.fn != "fit":
            raise ValueError(f"there is no {split} text to evaluate on; wanted {split}_source or a {split}_fraction")
        return []

    def _loader(self, split: str, batch_size: int, shuffle: bool = False) -> DataLoader[Batch]:
        blocks = BlockDataset(self.stores[split], self._tokenizer, self.block_length)
        # Not the global rank: processes that share one replica of the data get the same blocks.
        place = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {}
        sampler = BlockSampler(
            len(blocks),
            seed=self.seed,
            rank=place.get("rank", 0),
            world_size=place.get("num_replicas", 1),
            shuffle=shuffle,
        )
        # Only training goes on where it stopped; a stateful loader elsewhere would be of no use.
        loader: type[DataLoader[Batch]] = BlockLoader if shuffle else DataLoader
        return loader(
            blocks,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=as_is,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
        )

    def _warn_of_what_is_left_out(self, sources: dict[str, list[Source]]) -> None:
        binary = [path for found in sources.values() for source in found for path in source.binary]
        if binary:
            more = f" and {len(binary) - 5} more" if len(binary) > 5 else ""
            rank_zero_warn(f"TextCorpus left out {len(binary)} binary files: {', '.join(binary[:5])}{more}")
        on_hub = any(str(spec).startswith("hub:") for specs in self._sources for spec in _flat(specs))
        for name in ("config_name", "revision"):
            if getattr(self._options, name) is not None and not on_hub:
                rank_zero_warn(f"TextCorpus: {name} has no effect, as no source is a hub set")


def _flat(specs: str | list[str] | None) -> list[str]:
    return [specs] if isinstance(specs, str) else list(specs or [])


def _summary(meta: dict[str, Any]) -> str:
    sizes = ", ".join(
        f"{split} {known['tokens']:,} tokens of {known['documents']:,} documents"
        for split, known in meta["splits"].items()
    )
    empty = f"; {meta['empty']} empty documents left out" if meta["empty"] else ""
    return f"split: {meta['rule']}; {sizes}{empty}"
