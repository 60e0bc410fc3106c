"""The training loader, which goes on in the middle of an epoch after a restart.

Its state is the epoch and how many batches it has given. As the order is a function of (seed, epoch), that
is enough, and it is the same on every rank.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lin_attn.data.blocks import Batch, BlockSampler


class BlockLoader(DataLoader[Batch]):
    """A DataLoader over a `BlockSampler` whose state Lightning keeps in its checkpoints.

    A state fits loaders of the same batch size and number of ranks.
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
                self._given = state["batches"]
            self.sampler.skip = self._given * (self.batch_size or 1)
        for batch in super().__iter__():
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """{"epoch", "batches"}: plain integers."""
        return self._resume or {"epoch": getattr(self.sampler, "epoch", 0), "batches": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration, if it is of the same epoch, begin after the batches already given."""
        self._resume = {"epoch": int(state["epoch"]), "batches": int(state["batches"])}
