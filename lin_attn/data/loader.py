"""The training loader, which goes on in the middle of an epoch after a restart.

Its state is the epoch and how many batches it has given. As the order is a function of (seed, epoch), that
is enough, and it is the same on every rank, for any number of workers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset

from lin_attn.data.blocks import Batch, BlockSampler, as_is


class BlockLoader(DataLoader[Batch]):
    """A DataLoader over a `BlockSampler` whose state Lightning keeps in its checkpoints.

    A state fits any number of processes, with the same number of blocks in the batches of all of them together.
    """

    _given = 0
    _resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        # A generator starts at the first batch. Lightning asks for the iterator before it sets the epoch, and
        # workers would by then have read ahead in the wrong order.
        state, self._resume = self._resume, None
        self._given = 0
        if isinstance(self.sampler, BlockSampler):  # overfit_batches puts another in its place
            # Of another epoch is the state of a checkpoint from an epoch's end.
            if state and state["epoch"] == self.sampler.epoch:
                self._check(state)
                self._given = state["batches"]
            self.sampler.skip = self._given * (self.batch_size or 1)
        for batch in super().__iter__():
            self._given += 1
            yield batch

    @property
    def _global_batch(self) -> int:
        return (self.batch_size or 1) * getattr(self.sampler, "num_replicas", 1)

    def _check(self, state: dict[str, int]) -> None:
        was = state.get("global_batch", self._global_batch)
        if state["batches"] and was != self._global_batch:
            raise ValueError(
                f"the checkpoint is of the middle of an epoch with batches of {was} blocks over all processes, and "
                f"batch_size times processes is now {self._global_batch}; wanted {was}, or blocks would be lost"
            )

    def state_dict(self) -> dict[str, Any]:
        """{"epoch", "batches", "global_batch"}: plain integers."""
        epoch = getattr(self.sampler, "epoch", 0)
        return self._resume or {"epoch": epoch, "batches": self._given, "global_batch": self._global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration, if it is of the same epoch, begin after the batches already given."""
        self._resume = {name: int(value) for name, value in state.items()}


def place_of(trainer: Trainer | None) -> tuple[int, int]:
    """This process's rank, and how many share the data.

    Not the global rank: processes that share one replica of the data get the same examples.
    """
    place = (trainer.distributed_sampler_kwargs if trainer else None) or {}
    return place.get("rank", 0), place.get("num_replicas", 1)


def build_loader(
    kind: type[DataLoader[Batch]], dataset: Dataset[Batch], sampler: BlockSampler, batch_size: int, num_workers: int
) -> DataLoader[Batch]:
    """A loader of a dataset whose `__getitems__` gives whole batches."""
    return kind(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=as_is,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=num_workers > 0,
        generator=torch.Generator(),  # without, each iterator takes one of the numbers that dropout goes by
    )
