"""`TextCorpus`: text as a LightningDataModule of packed blocks of tokens."""

import os
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lin_attn.data.arguments import check_arguments
from lin_attn.data.blocks import Batch
from lin_attn.data.cache import Corpus, build_corpus, corpus_key, default_cache_dir, open_corpus
from lin_attn.data.loader import BlockLoader
from lin_attn.data.module import BlockDataModule
from lin_attn.data.order import BlockOrder
from lin_attn.data.sources import Source, SourceOptions, entries, open_sources, weights_of
from lin_attn.data.splits import SplitRule


class TextCorpus(BlockDataModule):
    """Text from this machine or the Hugging Face hub, for language modelling.

    A batch is as `BlockDataModule` says.

    Args:
        source: "stdlib" (the source of Python's standard library), a file, a folder, a glob such as
            "books/**/*.txt", or "hub:OWNER/NAME"; or a list of these. Files are text, .jsonl or .parquet,
            and text and .jsonl may be packed by gzip. An entry of a list may be a dict, with a path and
            options of its own: text_column, row_separator, config_name, data_dir, revision, the three
            splits, and weight. Where one has a weight (1 where the others have none), an epoch takes blocks
            of the sources in proportion to weights, and none twice before all of its source came once.
        block_length: Tokens a block has, and so the context length.
        batch_size: Blocks a batch has in training, on each device.
        eval_batch_size: Blocks a batch has elsewhere; by default as in training.
        validation_source: Validation text, in the forms of source. Its files are left out of training.
        test_source: Test text, in the forms of source. Its files are left out of training.
        tokenizer: "bytes"; "bpe" to train one on the training text; "words" or, for Chinese, "jieba" for a
            vocabulary of its commonest words, "words:FILE" or "jieba:FILE" for a given one, a token a line;
            or a tokenizer.json, a folder with one or with another tokenizer of transformers,
            "hub:OWNER/NAME", or a checkpoint (.ckpt), which carries its own.
        vocab_size: Of a tokenizer that is trained, special tokens included; by default 8192.
        special_tokens: Of a tokenizer that is trained: text that is one token wherever it stands.
        end_token: The token that ends a document, of a BPE or a given tokenizer. By default "<|endoftext|>",
            and the end-of-sequence token that a given tokenizer names.
        split: How validation and test are cut from source where they do not come with it: "document" takes
            whole documents by a hash of their name, "tail" the last bytes.
        validation_fraction: Share of the documents, or of the bytes, that is for validation.
        test_fraction: Share of the documents, or of the bytes, that is for test.
        text_column: Column of .jsonl, .parquet and hub rows that has the text.
        row_separator: What joins the rows of a file or hub split to one document ("" for wikitext, "\\n"
            where rows are lines); by default each row is a document.
        config_name: Configuration of the hub set.
        data_dir: Folder of the hub set to read, where it has several without naming configurations.
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
        source: str | list[str | dict[str, Any]] = "stdlib",
        block_length: int = 256,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        validation_source: str | list[str | dict[str, Any]] | None = None,
        test_source: str | list[str | dict[str, Any]] | None = None,
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        special_tokens: list[str] | None = None,
        end_token: str | None = None,
        split: str = "document",
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
        text_column: str = "text",
        row_separator: str | None = None,
        config_name: str | None = None,
        data_dir: str | None = None,
        revision: str | None = None,
        train_split: str = "train",
        validation_split: str | None = "validation",
        test_split: str | None = "test",
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(arguments)
        super().__init__(arguments)
        self.save_hyperparameters()
        options = SourceOptions(
            text_column, row_separator, config_name, data_dir, revision, train_split, validation_split, test_split
        )
        self._entries = entries(source, options)
        self._validation = None if validation_source is None else entries(validation_source, options)
        self._test = None if test_source is None else entries(test_source, options)
        self._options = options
        self._rule = SplitRule(split, validation_fraction, test_fraction)
        self._cache_dir = os.path.expanduser(cache_dir) if cache_dir else default_cache_dir()

    def setup(self, stage: str | None = None) -> None:
        """Opens the token cache, and builds it if it is missing or damaged.

        Raises:
            ValueError: A source or the cache is at fault, or there is too little text to fit on.
        """
        super().setup(stage)
        if stage == "fit":
            self._check_that_there_is_a_block()

    def _open(self) -> Corpus:
        sources = open_sources(self._entries, self._validation, self._test, os.path.join(self._cache_dir, "files.json"))
        self._warn_of_what_is_left_out(sources)
        rule = SplitRule(
            self._rule.split,
            0.0 if "validation" in sources else self._rule.validation_fraction,
            0.0 if "test" in sources else self._rule.test_fraction,
        )
        tokenizer = self._spec.recipe if self._tokenizer is None else self._tokenizer.fingerprint
        folder = os.path.join(self._cache_dir, "corpora", corpus_key(sources, tokenizer, rule))
        corpus = open_corpus(folder)
        if corpus is None:
            corpus = build_corpus(folder, sources, self._spec, rule)
        rank_zero_info(f"TextCorpus: {_summary(corpus.meta)}; {folder}")
        return corpus

    def train_dataloader(self) -> DataLoader[Batch]:
        """Every block of train once an epoch, or by weights, ordered by seed and epoch; resumes within an epoch.

        Raises:
            ValueError: There is too little text for one block.
        """
        self._check_that_there_is_a_block()
        order = BlockOrder(self.source_blocks(), self.seed, weights_of(self._entries))
        return self._loader(BlockLoader, self.blocks("train"), order, self.batch_size)

    def source_blocks(self) -> tuple[int, ...]:
        """Bounds of the training blocks of each source: source i has the blocks bounds[i] .. bounds[i+1] - 1.

        A block is of the source in which it begins.
        """
        store, n_blocks = self.stores["train"], len(self.blocks("train"))
        first = np.searchsorted(store.column("source"), np.arange(len(self._entries)))
        starts = np.append(store.column("start"), len(store))[first]
        bounds = np.minimum(-(-(starts - 1) // self.text_length), n_blocks)
        return (0, *(int(bound) for bound in bounds[1:]), n_blocks)

    def _check_that_there_is_a_block(self) -> None:
        n_tokens, needed = len(self.stores["train"]), self.text_length + 1
        if n_tokens < needed:
            raise ValueError(
                f"too little text to train on: {n_tokens} tokens in train, and one block with "
                f"block_length={self.block_length} needs {needed}"
            )

    def _warn_of_what_is_left_out(self, sources: dict[str, list[Source]]) -> None:
        binary = [path for found in sources.values() for source in found for path in source.binary]
        if binary:
            more = f" and {len(binary) - 5} more" if len(binary) > 5 else ""
            rank_zero_warn(f"TextCorpus left out {len(binary)} binary files: {', '.join(binary[:5])}{more}")
        on_hub = any(
            one.path.startswith("hub:")
            for found in (self._entries, self._validation, self._test)
            for one in found or ()
        )
        for name in ("config_name", "data_dir", "revision"):
            if getattr(self._options, name) is not None and not on_hub:
                rank_zero_warn(f"TextCorpus: {name} has no effect, as no source is a hub set")


def _summary(meta: dict[str, Any]) -> str:
    sizes = ", ".join(
        f"{split} {known['tokens']:,} tokens of {known['documents']:,} documents"
        for split, known in meta["splits"].items()
    )
    empty = f"; {meta['empty']} empty documents left out" if meta["empty"] else ""
    return f"split: {meta['rule']}; {sizes}{empty}"
