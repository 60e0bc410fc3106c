"""What data modules of blocks have in common: a tokenizer, stores to evaluate on, and their loaders."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lin_attn.data.blocks import Batch, BlockDataset, BlockSampler
from lin_attn.data.cache import Corpus
from lin_attn.data.loader import BlockLoader, build_loader, place_of
from lin_attn.data.order import BlockOrder
from lin_attn.data.store import TokenStore
from lin_attn.data.tokenizer import Tokenizer
from lin_attn.data.tokenizer_spec import MadeTokenizer, TokenizerSpec


class BlockDataModule(LightningDataModule):
    """A data module whose batches are blocks of a token stream.

    A batch is a dict of int64 tensors: tokens (B, N), targets (B, N) with -100 where there is none,
    n_bytes (B,) that the targets stand for, and start (B,), the first target's place in its split.

    Args:
        options: The arguments that all such modules have, by name; they are documented there.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.block_length: int = options["block_length"]
        self.batch_size: int = options["batch_size"]
        self.eval_batch_size: int = options["eval_batch_size"] or self.batch_size
        self.seed: int = options["seed"]
        self.num_workers: int = options["num_workers"]
        self._spec = TokenizerSpec(
            options["tokenizer"], options["vocab_size"], tuple(options["special_tokens"] or ()), options["end_token"]
        )
        self._tokenizer: Tokenizer | None = None if self._spec.is_trained else self._spec.open()
        self._corpus: Corpus | None = None

    def _open(self) -> Corpus:
        raise NotImplementedError

    def read_with(self, tokenizer: Tokenizer) -> None:
        """Takes a tokenizer that is there as an object, such as that of a model, in place of the one that is named.

        Raises:
            ValueError: The corpus has been opened already.
        """
        if self._corpus is not None:
            raise ValueError("tokenizer comes after the corpus was opened; wanted it before")
        self._spec, self._tokenizer = MadeTokenizer(made=tokenizer), tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns bytes into tokens and back. One that is trained on the corpus is there once that is read."""
        if self._tokenizer is None:
            self.setup()
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids; of a tokenizer that is still to be trained, the number that was asked for."""
        return self._spec.trained_size if self._tokenizer is None else self._tokenizer.vocab_size

    @property
    def text_length(self) -> int:
        """How many tokens of text a block has."""
        return self.block_length

    @property
    def stores(self) -> dict[str, TokenStore]:
        """The token stores of "train", "validation" and "test", opened (and built) when first asked for."""
        return self.corpus.stores

    @property
    def corpus(self) -> Corpus:
        """The cached corpus, opened (and built) when first asked for."""
        if self._corpus is None:
            self._corpus = self._open()
            self._tokenizer = self._corpus.tokenizer
        return self._corpus

    def blocks(self, split: str) -> BlockDataset:
        """The blocks of a split."""
        return BlockDataset(self.stores[split], self.tokenizer, self.text_length)

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
            ValueError: A source or the cache is at fault.
        """
        assert self.corpus

    def val_dataloader(self) -> "DataLoader[Batch] | list[Any]":
        """Every block of validation, in order; in training, no loader where there is no validation text."""
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> "DataLoader[Batch] | list[Any]":
        """Every block of test, in order."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> "DataLoader[Batch] | list[Any]":
        """The same as test."""
        return self.test_dataloader()

    def _evaluation_loader(self, split: str) -> "DataLoader[Batch] | list[Any]":
        if len(self.stores[split]) > 1:
            blocks = self.blocks(split)
            order = BlockOrder((0, len(blocks)), shuffle=False)
            return self._loader(DataLoader, blocks, order, self.eval_batch_size)
        if self.trainer and self.trainer.state.fn != "fit":
            raise ValueError(f"there is no {split} text to evaluate on; wanted {split}_source or a {split}_fraction")
        return []

    @property
    def _place(self) -> tuple[int, int]:
        return place_of(self.trainer)

    def _loader(
        self,
        kind: "type[DataLoader[Batch]] | type[BlockLoader]",
        blocks: BlockDataset,
        order: BlockOrder,
        batch_size: int,
    ) -> DataLoader[Batch]:
        return build_loader(kind, blocks, self._sampler(order), batch_size, self.num_workers)

    def _sampler(self, order: BlockOrder) -> BlockSampler:
        rank, world_size = self._place
        return BlockSampler(order, rank=rank, world_size=world_size)
