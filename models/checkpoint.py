"""Reading a Lightning checkpoint, saying in one sentence why one cannot be read, and finding the one before it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

import models
from models.causal_lm import CausalLM
from models.training import TrainedModel

Model = TypeVar("Model", bound=TrainedModel)
CLASSES = ("CausalLM", "MaskedLM", "PairRanker", "Seq2Seq", "SequenceClassifier")


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


def class_of(checkpoint: dict[str, Any]) -> str:
    """The name of the class that a checkpoint is of; the first ones did not say it."""
    return str(checkpoint.get("model_class", "CausalLM"))


@overload
def load_checkpoint(path: str | Path, *, device: torch.device | str = ...) -> CausalLM: ...


@overload
def load_checkpoint(path: str | Path, *, device: torch.device | str = ..., kind: type[Model]) -> Model: ...


def load_checkpoint(
    path: str | Path, *, device: torch.device | str = "cpu", kind: type[TrainedModel] = CausalLM
) -> TrainedModel:
    """The model of a checkpoint that `fit` wrote, in evaluation mode, with its tokenizer.

    Args:
        path: the .ckpt file.
        device: where the model goes.
        kind: the class that is wanted; TrainedModel for any.

    Raises:
        ValueError: if it cannot be read, is of another class, or its weights do not fit its own configuration.
    """
    checkpoint = read_checkpoint(path)
    found = getattr(models, class_of(checkpoint))
    if not issubclass(found, kind):
        raise ValueError(f"{path} is a checkpoint of a {found.__name__}; wanted one of a {kind.__name__}")
    try:
        model: TrainedModel = found(**checkpoint["hyper_parameters"])
    except TypeError as error:
        raise ValueError(f"{path} has arguments that no {found.__name__} takes: {error}") from error
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
    ours = isinstance(groups, dict) and {"network", "optimizer"} <= set(groups) and "state_dict" in checkpoint
    if not ours or class_of(checkpoint) not in CLASSES:
        raise ValueError(f"{path} is no checkpoint of a model of this zoo; wanted one written by lin-attn fit")
    return checkpoint
