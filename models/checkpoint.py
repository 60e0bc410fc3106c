"""Reading a Lightning checkpoint, saying in one sentence why one cannot be read, and finding the one before it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from models.causal_lm import CausalLM


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint that `fit` wrote; nothing is unpickled but tensors and plain values.

    The file is mapped, so that of a large one no more is read than is used; do not write to the tensors.

    Raises:
        ValueError: if the file is not there, or is no such checkpoint; it names the one before, if there is one.
    """
    path = Path(path)
    try:
        return _read(path)
    except ValueError as error:
        before = checkpoint_before(path)
        raise ValueError(f"{error}; {before} is whole, to go back to" if before else str(error)) from error


def checkpoint_before(path: str | Path) -> Path | None:
    """The newest whole checkpoint beside another, or else in the folders of the runs beside its own."""
    path = Path(path)
    groups = [path.parent.glob("*.ckpt")]
    if path.parent.name == "checkpoints":  # ROOT/version_N/checkpoints
        groups.append(path.parent.parent.parent.glob("version_*/checkpoints/*.ckpt"))
    found = (newest_checkpoint(other for other in group if other.absolute() != path.absolute()) for group in groups)
    return next((other for other in found if other is not None), None)


def newest_checkpoint(paths: Iterable[Path]) -> Path | None:
    """The whole checkpoint that was written last; None if there is none."""
    for path in sorted(dict.fromkeys(paths), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            _read(path)
        except ValueError:
            continue
        return path
    return None


def load_checkpoint(path: str | Path, *, device: torch.device | str = "cpu") -> CausalLM:
    """The model of a checkpoint that `fit` wrote, in evaluation mode, with its tokenizer.

    Args:
        path: the .ckpt file.
        device: where the model goes.

    Raises:
        ValueError: if it cannot be read, or its weights do not fit its own configuration.
    """
    checkpoint = read_checkpoint(path)
    model = CausalLM(**checkpoint["hyper_parameters"])
    try:
        model.load_state_dict(checkpoint["state_dict"], strict=True)
    except RuntimeError as error:
        raise ValueError(f"the weights of {path} do not fit its own configuration: {error}") from error
    model.on_load_checkpoint(checkpoint)
    return model.eval().to(device)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; wanted a .ckpt file written by lin-attn fit")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what the reader makes of arbitrary bytes has no common type
        raise ValueError(f"{path} cannot be read as a checkpoint; it is truncated or of another kind") from error
    groups = checkpoint.get("hyper_parameters") if isinstance(checkpoint, dict) else None
    if not isinstance(groups, dict) or set(groups) != {"network", "optimizer"} or "state_dict" not in checkpoint:
        raise ValueError(f"{path} is no checkpoint of a language model; wanted one written by lin-attn fit")
    return checkpoint
