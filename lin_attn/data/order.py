"""The order in which blocks are trained on: a function of (seed, epoch) alone, so that nothing of it has to be kept.

Without weights an epoch has every block once. With weights w_i an epoch of n blocks has n · w_i / Σ w_j of source i:
the next ones of an endless row of permutations of its blocks, so that none comes a second time before all others of its
source have come once, over the ends of epochs too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class BlockOrder:
    """The blocks of each epoch.

    Args:
        bounds: Source i has the blocks bounds[i] .. bounds[i+1] − 1; (0, n) for one source.
        seed: Of the order.
        weights: One a source, or None for every block once.
        shuffle: False keeps the order of the text; only without weights.

    Raises:
        ValueError: A source with a weight has no block.
    """

    bounds: tuple[int, ...]
    seed: int = 0
    weights: tuple[float, ...] | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert self.shuffle or self.weights is None, "an order of the text has no weights"
        for index, weight in enumerate(self.weights or ()):
            if weight > 0 and self.bounds[index] == self.bounds[index + 1]:
                raise ValueError(
                    f"source {index} has the weight {weight:g}, but too little training text for a block of its own; "
                    "wanted more text, a shorter block_length, or weight 0"
                )

    def __len__(self) -> int:
        """Number of blocks an epoch has."""
        return self.bounds[-1] - self.bounds[0]

    def epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """(len,) int64: the blocks of an epoch, counted from 0."""
        if not self.shuffle:
            return np.arange(self.bounds[0], self.bounds[-1])
        if self.weights is None:
            return self.bounds[0] + self._permutation(len(self), epoch)
        counts = shares(self.weights, len(self))
        drawn = np.concatenate([self._drawn(i, epoch * n, (epoch + 1) * n) for i, n in enumerate(counts) if n])
        return drawn[self._permutation(len(drawn), epoch)]

    def _drawn(self, source: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Elements start..stop-1 of the endless row of permutations of a source's blocks."""
        first, n = self.bounds[source], self.bounds[source + 1] - self.bounds[source]
        rounds = range(start // n, (stop - 1) // n + 1)
        row = np.concatenate([self._permutation(n, which, source + 1) for which in rounds])
        skipped = start - rounds[0] * n
        return first + row[skipped : skipped + stop - start]

    def _permutation(self, n: int, *names: int) -> npt.NDArray[np.int64]:
        seeds = np.random.SeedSequence([self.seed, *names])
        return np.random.Generator(np.random.Philox(seeds)).permutation(n)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to weights, which sum to total (largest remainders)."""
    wanted = np.array(weights, dtype=np.float64) / sum(weights) * total
    counts = np.floor(wanted).astype(np.int64)
    for index in np.argsort(counts - wanted, kind="stable")[: total - int(counts.sum())]:
        counts[index] += 1
    return [int(count) for count in counts]
