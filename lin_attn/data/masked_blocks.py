"""Blocks of a token stream with masks, and the places whose masks they are.

A block is [CLS] text [SEP], or text alone. Its masks are a function of (seed, epoch, place), where the place is that of
the block in the epoch's order over all processes: a run that is resumed, or goes on with other processes, sees the same
masks; a block that comes again, in the next epoch or, in a mixture, in the same one, has others.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lin_attn.data.blocks import IGNORED, Batch, BlockDataset, BlockSampler
from lin_attn.data.masking import Masking
from lin_attn.data.special_tokens import SpecialTokens

MASKS = 0x6D61736B  # sets the seeds of masks apart from those of orders


class Draw(NamedTuple):
    """A block as it is drawn: in which epoch, at which place of its order."""

    epoch: int
    place: int
    block: int


class DrawSampler(BlockSampler):
    """A BlockSampler that says of each block where it was drawn. An order of the text is the same in all epochs."""

    def __iter__(self) -> Iterator[Draw]:  # type: ignore[override]
        epoch = self.epoch if self.order.shuffle else 0
        places = range(self.rank + self.skip * self.num_replicas, self.total_size, self.num_replicas)
        return map(Draw, repeat(epoch), places, super().__iter__())


class MaskedBlocks(Dataset[Batch]):
    """The blocks of one split with masks.

    A batch has
        tokens    (B, N) int64   the text with masks
        targets   (B, N) int64   what stood in the masked places, -100 elsewhere
        key_mask  (B, N) bool    False for padding; only in a batch that has any

    An index is a `Draw`, or a block, which has the masks of epoch 0 then.

    Args:
        text: Blocks of text; every token of the stream but its first, an end token, is in one block.
        tokenizer: Has the pad token, and the class and separator tokens where blocks are framed.
        masking: What is done to the text.
        seed: Of the masks.
        framed: Put the class token before each block and the separator behind it.
    """

    def __init__(
        self, text: BlockDataset, tokenizer: SpecialTokens, masking: Masking, *, seed: int, framed: bool
    ) -> None:
        self.text, self.masking, self.seed = text, masking, seed
        self._pad = tokenizer.ids["pad"]
        self._frame = (tokenizer.ids["class"], tokenizer.ids["separator"]) if framed else None

    def __len__(self) -> int:
        """Number of blocks, the last partial one included."""
        return len(self.text)

    def __getitem__(self, index: "Draw | int") -> Batch:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: "Sequence[Draw | int]") -> Batch:
        """Reads a whole batch at once, as `BlockDataset` does."""
        draws = [index if isinstance(index, Draw) else Draw(0, index, index) for index in indices]
        texts = self.text.__getitems__([draw.block for draw in draws])["targets"].numpy()
        frame = 0 if self._frame is None else 1
        shape = (len(draws), texts.shape[1] + 2 * frame)
        tokens = np.full(shape, self._pad, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        real = np.zeros(shape, dtype=bool)
        for row, (draw, padded) in enumerate(zip(draws, texts, strict=True)):
            text = padded[padded != IGNORED]
            n = len(text)
            if not n:  # a block that fills uneven ranks
                continue
            seeds = np.random.SeedSequence([MASKS, self.seed, draw.epoch, draw.place])
            places = slice(frame, frame + n)
            tokens[row, places], targets[row, places] = self.masking(text, np.random.Generator(np.random.PCG64(seeds)))
            if self._frame is not None:
                tokens[row, 0], tokens[row, n + 1] = self._frame
            real[row, : n + 2 * frame] = True
        batch = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
        return batch if real.all() else batch | {"key_mask": torch.from_numpy(real)}
