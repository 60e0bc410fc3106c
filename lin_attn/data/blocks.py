"""Blocks of a token stream, and which of them each process reads.

Block i of length N has the inputs stream[iN : (i+1)N] and the targets stream[iN+1 : (i+1)N+1]: every token
but the first is a target once. The last block is filled up with ignored targets, so that nothing is
dropped.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from lin_attn.data.order import BlockOrder
from lin_attn.data.store import TokenStore
from lin_attn.data.tokenizer import Tokenizer

IGNORED = -100  # what torch's cross entropy ignores
EMPTY_BLOCK = -1

Batch = dict[str, Tensor]


class BlockDataset(Dataset[Batch]):
    """The blocks of one split.

    An item, and a batch with B in front, has
        tokens   (N,) int64   inputs; the end token where the stream has ended
        targets  (N,) int64   the token after each input, -100 where there is none
        n_bytes  () int64     bytes that the targets stand for
        start    () int64     index of the first target in the token stream

    Index -1 gives a block without targets, which fills uneven ranks without changing a sum.

    Args:
        store: The tokens.
        tokenizer: Gives the end token and the bytes of each token.
        block_length: N.
    """

    def __init__(self, store: TokenStore, tokenizer: Tokenizer, block_length: int) -> None:
        self.store = store
        self.block_length = block_length
        self._end_id = tokenizer.end_id
        self._token_bytes = tokenizer.token_bytes

    def __len__(self) -> int:
        """Number of blocks, the last partial one included."""
        return -(-max(len(self.store) - 1, 0) // self.block_length)

    def __getitem__(self, index: int) -> Batch:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Reads a whole batch at once; DataLoader calls this, and `as_is` hands it on.

        Raises:
            IndexError: There is no such block.
        """
        shape = (len(indices), self.block_length)
        tokens = np.full(shape, self._end_id, dtype=np.int64)
        targets = np.full(shape, IGNORED, dtype=np.int64)
        n_bytes = np.zeros(len(indices), dtype=np.int64)
        start = np.full(len(indices), len(self.store), dtype=np.int64)
        for row, index in enumerate(indices):
            if index == EMPTY_BLOCK:
                continue
            if not 0 <= index < len(self):
                raise IndexError(f"block {index} of {len(self)}")
            first = index * self.block_length
            stream = self.store.tokens(first, first + self.block_length + 1)
            n = len(stream) - 1
            tokens[row, :n] = stream[:-1]
            targets[row, :n] = stream[1:]
            counts = self.store.byte_counts(first + 1, first + 1 + n, self._token_bytes)
            n_bytes[row] = counts.sum(dtype=np.int64)
            start[row] = first + 1
        arrays = {"tokens": tokens, "targets": targets, "n_bytes": n_bytes, "start": start}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_is(batch: Any) -> Any:
    """Collates nothing: `BlockDataset.__getitems__` gives whole batches."""
    return batch


class BlockSampler(DistributedSampler[Any]):
    """Which blocks a process reads, in which order: a function of (seed, epoch) and the rank alone.

    Ranks take turns: rank r has the places r, r + world_size, ... of one order. So the blocks of n batches are the same
    ones however many processes share them, at one global batch size. Where the blocks do
    not divide, the last ranks get an empty block (EMPTY_BLOCK) and not one twice, as every rank must take
    the same number of steps.

    It is a DistributedSampler so that Lightning leaves it alone: any other sampler it wraps in one of its
    own when there are several processes (use_distributed_sampler), which would divide the blocks twice.
    Lightning calls `set_epoch` at each epoch's start.

    Args:
        order: The blocks of all ranks together.
        rank: This process, from 0.
        world_size: How many processes share the blocks.
    """

    def __init__(self, order: BlockOrder, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(
            range(len(order)),  # type: ignore[arg-type]  # it asks for the length alone
            num_replicas=world_size,
            rank=rank,
            shuffle=order.shuffle,
            seed=order.seed,
            drop_last=False,
        )
        self.order = order
        self.skip = 0  # blocks of this rank that the next iteration leaves out, see `BlockLoader`

    def __iter__(self) -> Iterator[int]:
        order = self.order.epoch(self.epoch)
        filled = np.pad(order, (0, self.total_size - len(order)), constant_values=EMPTY_BLOCK)
        skip, self.skip = self.skip, 0
        return map(int, filled[self.rank :: self.num_replicas][skip:])  # as a list they would take 36 bytes each
