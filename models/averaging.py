"""The mean of several checkpoints' weights (Vaswani et al. 2017, arXiv 1706.03762, §6.1: the last 5 of a run).

w = (w_1 + … + w_n) / n      in float64, rounded once
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import class_of, read_checkpoint


def last_checkpoints(folder: str | Path, count: int) -> list[Path]:
    """The checkpoints of a folder with the greatest steps, in the order of steps, each step once.

    Raises:
        ValueError: if there are fewer.
    """
    if count < 1:
        raise ValueError(f"last is {count}; wanted at least 1")
    by_step: dict[int, Path] = {}
    for path in sorted(Path(folder).glob("*.ckpt")):
        by_step[int(read_checkpoint(path)["global_step"])] = path
    if len(by_step) < count:
        raise ValueError(f"{folder} has checkpoints of {len(by_step)} steps; wanted {count}")
    return [by_step[step] for step in sorted(by_step)[-count:]]


def average_checkpoints(paths: Sequence[str | Path]) -> dict[str, Any]:
    """A checkpoint whose weights are the mean of several ones', all else as in the last.

    It is for validate, test, predict and for loading; of the optimizer, whose state has no mean, it has nothing.

    Args:
        paths: .ckpt files of one run, or of runs of one configuration.

    Returns:
        The checkpoint, for `torch.save`.

    Raises:
        ValueError: if there are none, one cannot be read, or they are not of one class and one network.
    """
    if not paths:
        raise ValueError("paths is empty; wanted checkpoints to average")
    total: dict[str, torch.Tensor] = {}
    first: dict[str, Any] | None = None
    for path in paths:
        checkpoint = read_checkpoint(path)
        state = checkpoint["state_dict"]
        if first is None:
            first = checkpoint
            total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
        for what, mine, others in (
            ("class", class_of(checkpoint), class_of(first)),
            ("network", checkpoint["hyper_parameters"]["network"], first["hyper_parameters"]["network"]),
            ("weights", {n: w.shape for n, w in state.items()}, {n: w.shape for n, w in first["state_dict"].items()}),
        ):
            if mine != others:
                raise ValueError(f"{path} has another {what} than {paths[0]}; wanted checkpoints of one model")
        for name, value in state.items():
            total[name] += value
    mean = {name: (total[name] / len(paths)).to(value.dtype) for name, value in state.items()}
    left_out = ("optimizer_states", "lr_schedulers", "random_states", "step")
    rest = {name: value for name, value in checkpoint.items() if name not in left_out}
    return rest | {"state_dict": mean, "optimizer_states": [], "lr_schedulers": []}
