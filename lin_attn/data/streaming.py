"""`StreamingCorpus`: hub data sets that are read while they train, for those too large to keep."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from datasets.distributed import split_dataset_by_node
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lin_attn.data.arguments import check_arguments
from lin_attn.data.blocks import Batch
from lin_attn.data.cache import Corpus, build_corpus, corpus_key, default_cache_dir, open_corpus
from lin_attn.data.documents import Document
from lin_attn.data.hub import PREFIX, HubSet
from lin_attn.data.module import BlockDataModule
from lin_attn.data.sources import Source, SourceOptions, entries, weights_of
from lin_attn.data.splits import SplitRule
from lin_attn.data.stream_blocks import Share, Stream, StreamBlocks, row_bytes
from lin_attn.data.stream_loader import StreamLoader


@dataclass(frozen=True)
class StreamHead:
    """The first documents of a stream's share, kept in the cache to evaluate on or to learn a vocabulary from."""

    hub: HubSet
    split: str
    share: Share
    n_documents: int

    binary: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The data set."""
        return self.hub.label

    def fingerprint(self) -> str:
        """What the stream and the choice of its documents depend on."""
        return f"{self.hub.fingerprint()} {self.split} {self.hub.text_column!r} {self.share} {self.n_documents}"

    def documents(self) -> Iterator[Document]:
        """Reads the stream until there are enough."""
        found = 0
        for number, row in enumerate(self.hub.rows(self.split)):
            text = row_bytes(row, self.hub.text_column)
            if text and self.share.has(text):
                yield Document(f"{self.split}:{number}", [text])
                found += 1
                if found == self.n_documents:
                    return


class StreamingCorpus(BlockDataModule):
    """Data sets of the Hugging Face hub, tokenized while they train: nothing of the training text is kept.

    Each row is a document. The stream has no end: every reader passes over its share of the rows again and again, so
    give the trainer max_steps. Rows come in the order of the set, and blocks are shuffled within windows only.
    Evaluation is on the first documents of each split, which are kept; so is the beginning of train, from which a
    BPE vocabulary is learned. A batch is as `BlockDataModule` says, but that start has no meaning in training.

    Args:
        source: "hub:OWNER/NAME" or "hub:" and a folder, or a list of these; or of dicts with a path and options of
            their own: text_column, config_name, data_dir, revision, the three splits, and weight, the share of a source
            in the training blocks (1 where it has none).
        block_length: Tokens a block has, and so the context length.
        batch_size: Blocks a batch has in training, on each device.
        eval_batch_size: Blocks a batch has elsewhere; by default as in training.
        tokenizer: As for `TextCorpus`.
        vocab_size: As for `TextCorpus`.
        special_tokens: As for `TextCorpus`.
        end_token: As for `TextCorpus`.
        validation_fraction: Where the set has no validation split, the documents of train whose hash is below this
            are for validation and not trained on.
        test_fraction: The same for test.
        kept_documents: How many documents of validation and test are evaluated on at most, and how many of train a
            BPE vocabulary is learned from.
        shuffle_blocks: How many blocks that follow each other are shuffled; 1 keeps their order.
        text_column: Column that has the text.
        config_name: Configuration of the set.
        data_dir: Folder of the set to read, where it has several without naming configurations.
        revision: Branch, tag or commit of the set.
        train_split: Split to train on.
        validation_split: Split for validation; "validation" may be missing, null takes from train in any case.
        test_split: Split for test, likewise.
        seed: Of the order of training blocks.
        num_workers: Processes that read and tokenize ahead; at most the number of the set's files for each device.
        cache_dir: As for `TextCorpus`.

    Raises:
        ValueError: An argument cannot be meant; or later, a set cannot be read.
    """

    def __init__(
        self,
        source: str | list[str | dict[str, Any]],
        block_length: int = 256,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        special_tokens: list[str] | None = None,
        end_token: str | None = None,
        validation_fraction: float = 0.005,
        test_fraction: float = 0.005,
        kept_documents: int = 1000,
        shuffle_blocks: int = 1024,
        text_column: str = "text",
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
        options = SourceOptions(
            text_column, None, config_name, data_dir, revision, train_split, validation_split, test_split
        )
        self._entries = entries(source, options)
        for entry in self._entries:
            if not entry.path.startswith(PREFIX):
                raise ValueError(
                    f"source is {entry.path!r}; wanted hub:…, since only those are streamed (see TextCorpus)"
                )
            if entry.options.row_separator is not None:
                raise ValueError(f"row_separator of {entry.path!r} has no effect: each row of a stream is a document")
        super().__init__(arguments)
        self.save_hyperparameters()
        self._fractions = (validation_fraction, test_fraction)
        self._kept, self._shuffle_blocks = kept_documents, shuffle_blocks
        self._cache_dir = os.path.expanduser(cache_dir) if cache_dir else default_cache_dir()

    def _open(self) -> Corpus:
        sources: dict[str, list[Source]] = {"train": [], "validation": [], "test": []}
        for entry in self._entries:
            hub = HubSet(entry.path, entry.options, streaming=True)
            shares = self._shares(hub, entry.options)
            for role, (split, share) in shares.items():
                if share.stop > share.start:
                    sources[role].append(StreamHead(hub, split, share, self._kept))
        tokenizer = self._spec.recipe if self._tokenizer is None else self._tokenizer.fingerprint
        folder = os.path.join(self._cache_dir, "corpora", corpus_key(sources, tokenizer, SplitRule("stream", 0, 0)))
        corpus = open_corpus(folder)
        if corpus is None:
            corpus = build_corpus(folder, sources, self._spec, SplitRule("stream", 0, 0))
        kept = ", ".join(f"{split} {known['documents']:,}" for split, known in corpus.meta["splits"].items())
        rank_zero_info(f"StreamingCorpus: documents kept of {kept}; {folder}")
        return corpus

    def _shares(self, hub: HubSet, options: SourceOptions) -> dict[str, tuple[str, Share]]:
        """The split and the documents of it that are for each role."""
        found, taken = {}, 0.0
        named = zip(("validation", "test"), options.splits[1:], self._fractions, strict=True)
        for role, split, fraction in named:
            if split is not None and (hub.has_split(split) or split != role):
                found[role] = (split, Share())
            else:
                found[role] = (options.train_split, Share(taken, taken + fraction))
                taken += fraction
        return {"train": (options.train_split, Share(taken, 1.0)), **found}

    def train_dataloader(self) -> DataLoader[Batch]:
        """Batches of the streams, without end; goes on after a restart.

        Raises:
            ValueError: There are more workers than files to read.
        """
        rank, world_size = self._place
        weights = weights_of(self._entries) or (1.0,) * len(self._entries)
        streams = []
        for entry, weight in zip(self._entries, weights, strict=True):
            if weight == 0:
                continue
            hub = HubSet(entry.path, entry.options, streaming=True)
            split, share = self._shares(hub, entry.options)["train"]
            rows = split_dataset_by_node(hub.rows(split), rank=rank, world_size=world_size)
            if self.num_workers > rows.num_shards:
                raise ValueError(
                    f"num_workers is {self.num_workers}, and {hub.label} has {rows.num_shards} files for this process; "
                    f"wanted at most {rows.num_shards}"
                )
            streams.append(Stream(rows, entry.options.text_column, share, weight))
        blocks = StreamBlocks(
            streams,
            self.tokenizer,
            self.block_length,
            self.batch_size,
            shuffle_blocks=self._shuffle_blocks,
            seed=self.seed,
            rank=rank,
        )
        pin_memory = torch.cuda.is_available()
        return StreamLoader(blocks, num_workers=self.num_workers, world_size=world_size, pin_memory=pin_memory)

    def document_names(self, split: str, start: int, n: int) -> list[str]:
        """Names of the documents in a range of a kept split; of the training stream, the names of its sets."""
        if split == "train":
            return [entry.path for entry in self._entries]
        return super().document_names(split, start, n)
