"""`MaskedCorpus`: text as a LightningDataModule of blocks some of whose tokens are masked."""

from typing import Any

import numpy as np

from lin_attn.data.blocks import BlockDataset, BlockSampler
from lin_attn.data.corpus import TextCorpus
from lin_attn.data.masked_blocks import DrawSampler, MaskedBlocks
from lin_attn.data.masking import Masking
from lin_attn.data.order import BlockOrder
from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.whole_words import words_of

SPECIAL = ("pad", "class", "separator", "mask")


class MaskedCorpus(TextCorpus):
    """Text from this machine or the Hugging Face hub, for masked language modelling.

    It is read, cached, split, mixed and ordered as by `TextCorpus`, whose arguments it has; a batch is as
    `MaskedBlocks` says. Pad, class, separator and mask tokens are the tokenizer's own where it has them, else behind
    its vocabulary: bytes make 261 tokens. These and the tokens that end documents are never masked, nor drawn at
    random.

    Args:
        mask_probability: Share of the tokens that are to be guessed.
        mask_share: Of those, the share that is replaced by the mask token.
        random_share: Of those, the share that is replaced by a random token; the rest stays as it is.
        whole_words: Mask whole words, and not tokens one by one.
        framed: Begin each block with the class token and end it with the separator, within block_length.
        **arguments: Of `TextCorpus`.

    Raises:
        ValueError: An argument cannot be meant; or later, a source cannot be read.
    """

    def __init__(
        self,
        mask_probability: float = 0.15,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        whole_words: bool = False,
        framed: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if self.text_length < 1:
            raise ValueError(f"block_length is {self.block_length}; wanted at least 3: two tokens frame each block")
        self._whole_words = whole_words
        self._shares: dict[str, Any] = {
            "probability": mask_probability,
            "mask_share": mask_share,
            "random_share": random_share,
        }
        Masking(np.zeros(0, dtype=bool), 0, **self._shares)  # refuses shares that cannot be meant, before any is read

    @property
    def tokenizer(self) -> SpecialTokens:
        """The corpus's tokenizer with special tokens."""
        return SpecialTokens(super().tokenizer, SPECIAL)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; of a tokenizer that is still to be trained, the most there can be."""
        return super().vocab_size + len(SPECIAL) if self._tokenizer is None else self.tokenizer.vocab_size

    @property
    def text_length(self) -> int:
        """Tokens of text in a block."""
        return self.block_length - 2 * bool(self.hparams["framed"])

    def blocks(self, split: str) -> MaskedBlocks:  # type: ignore[override]
        """The blocks of a split with masks: in validation and test always the same ones, whatever the seed."""
        tokenizer = self.tokenizer
        ordinary = np.ones(tokenizer.vocab_size, dtype=bool)
        ordinary[tokenizer.special_ids] = False
        words = words_of(tokenizer) if self._whole_words else None
        masking = Masking(ordinary, tokenizer.ids["mask"], words=words, **self._shares)
        text = BlockDataset(self.stores[split], tokenizer, self.text_length)
        seed = self.seed if split == "train" else 0
        return MaskedBlocks(text, tokenizer, masking, seed=seed, framed=self.hparams["framed"])

    def _sampler(self, order: BlockOrder) -> BlockSampler:
        rank, world_size = self._place
        return DrawSampler(order, rank=rank, world_size=world_size)
