"""The training loader of streams, which goes on after a restart with the batch after the last one that it gave."""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lin_attn.data.blocks import Batch, as_is
from lin_attn.data.stream_blocks import State, StreamBlocks

# A stream has no end, and Lightning reads one batch ahead where a loader has no length, which would be lost.
ENDLESS = 1 << 31


class StreamLoader(DataLoader[Batch]):
    """A DataLoader over `StreamBlocks` whose state Lightning keeps in its checkpoints.

    The state holds that of every worker of every process, and fits the same numbers of both and the same batch size.

    Args:
        blocks: The batches of this process.
        num_workers: Processes that read.
        world_size: How many processes share the streams.
        pin_memory: Put batches where a GPU reads them faster.
    """

    def __init__(
        self, blocks: StreamBlocks, *, num_workers: int, world_size: int = 1, pin_memory: bool = False
    ) -> None:
        super().__init__(
            blocks,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=as_is,
            pin_memory=pin_memory,
            worker_init_fn=_in_worker,
            generator=torch.Generator(),  # without, an iterator takes one of the numbers that dropout goes by
        )
        self._blocks, self._world_size = blocks, world_size
        self._given = 0
        self._states: list[State | None] = [None] * max(num_workers, 1)

    def __len__(self) -> int:
        """2³¹ batches, which no training reaches."""
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._blocks.states = list(self._states)
        self._blocks.next_worker = self._given % len(self._states)
        for batch in super().__iter__():
            if batch:
                worker: Any = batch.pop("worker")
                self._states[worker] = batch.pop("state")
                self._given += 1
                yield batch

    @property
    def _layout(self) -> dict[str, int]:
        return {"num_workers": self.num_workers, "processes": self._world_size, "batch_size": self._blocks.batch_size}

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Every process has to ask, where there are several: they tell each other their states."""
        states: list[Any] = [list(self._states)]
        if self._world_size > 1:
            states = [None] * self._world_size
            dist.all_gather_object(states, self._states)
        return {"batches": self._given, "layout": self._layout, "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration begin after the batches already given.

        Raises:
            ValueError: The checkpoint is of another number of workers, of processes, or of blocks a batch.
        """
        if state.get("layout") != self._layout:
            raise ValueError(
                f"the checkpoint's stream was read with {state.get('layout')}, now it is {self._layout}; "
                "wanted the same, or documents would be lost or doubled"
            )
        rank = dist.get_rank() if self._world_size > 1 else 0
        self._given, self._states = state["batches"], list(state["states"][rank])


def _in_worker(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the process that forked are not here
