"""Batches of examples of about the same length: which rows each has, and who reads it.

Rows are ordered by length, those of equal lengths by chance, and cut where a batch would grow over its tokens; then the
batches are shuffled. As the ordered lengths are the same in every epoch, so are the cuts, and an epoch has as many
batches as any other; which of equally long rows are together is drawn anew. All of it is a function of (seed, epoch).
"""

from collections.abc import Iterator

import numpy as np

from lin_attn.data.blocks import BlockSampler
from lin_attn.data.examples import Lengths
from lin_attn.data.order import BlockOrder


class TokenBatches:
    """Batches of at most so many tokens.

    Args:
        lengths: (n, k): of the k sequences that row i has, such as source and target.
        batch_tokens: no sequence takes more in a batch, padding included: rows · longest ≤ batch_tokens.
        seed: of which rows are together, and of the order of batches.

    Raises:
        ValueError: A row alone is longer.
    """

    def __init__(self, lengths: Lengths, batch_tokens: int, seed: int) -> None:
        longest = int(lengths.max(initial=0))
        if longest > batch_tokens:
            raise ValueError(
                f"batch_tokens is {batch_tokens}, and an example has {longest} tokens; wanted at least that"
            )
        self._lengths, self.seed = lengths, seed
        widest = np.sort(lengths.max(axis=1))
        cuts = [0]
        for row, width in enumerate(widest.tolist()):
            if (row + 1 - cuts[-1]) * width > batch_tokens:
                cuts.append(row)
        self._cuts = np.array(cuts[1:], dtype=np.int64)

    def __len__(self) -> int:
        """Number of batches an epoch has."""
        return len(self._cuts) + 1

    def epoch(self, epoch: int) -> list[Lengths]:
        """The rows of each batch of an epoch, in the order in which they are trained on."""
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, epoch])))
        chance = draw.permutation(len(self._lengths))
        # By the longest sequence first, since the cuts go by it; lexsort takes its last key first.
        keys = (chance, *self._lengths.T, self._lengths.max(axis=1))
        batches = np.split(np.lexsort(keys), self._cuts)
        return [batches[place] for place in draw.permutation(len(batches))]


class TokenBatchSampler(BlockSampler):
    """Which batches a process reads: ranks take turns, and the last ones get one without rows where it does not divide.

    Args:
        batches: of all ranks together.
        rank: this process, from 0.
        world_size: how many processes share the batches.
    """

    def __init__(self, batches: TokenBatches, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(BlockOrder((0, len(batches)), batches.seed), rank=rank, world_size=world_size)
        self.batches = batches

    def __iter__(self) -> Iterator[Lengths]:  # type: ignore[override]  # an item is the rows of a batch
        batches = self.batches.epoch(self.epoch)
        batches += [np.empty(0, dtype=np.int64)] * (self.total_size - len(batches))
        skip, self.skip = self.skip, 0
        return iter(batches[self.rank :: self.num_replicas][skip:])
