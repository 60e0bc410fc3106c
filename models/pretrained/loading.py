"""From a name to a model: a shipped checkpoint, a folder, a Lightning checkpoint, or a model of the hub.

    stdlib-linear-rope                  a name of `available()`, always that, whatever lies in the working directory
    path/to/folder, ./stdlib-linear-rope    a folder that is there
    path/to/last.ckpt                   a checkpoint that `lin-attn fit` wrote
    OWNER/NAME, hub:OWNER/NAME          of the Hugging Face hub; without the prefix a folder of that path comes first

A Path is never a name.
"""

import os
import re
import warnings
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from models.checkpoint import load_checkpoint
from models.converters import is_foreign, read_transformers
from models.pretrained.folder import CONFIG, read_folder
from models.pretrained.hub import PREFIX, download
from models.pretrained.weights import dtype_name
from models.training import TrainedModel

Model = TypeVar("Model", bound=TrainedModel)
Device = torch.device | str
ZOO = Path(__file__).resolve().parent.parent / "zoo"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def available() -> list[str]:
    """The names of the checkpoints that come with the package."""
    return sorted(path.parent.name for path in ZOO.glob(f"*/{CONFIG}"))


@overload
def from_pretrained(
    name: str | os.PathLike[str],
    *,
    device: Device = ...,
    dtype: torch.dtype | None = ...,
    revision: str | None = ...,
) -> TrainedModel: ...


@overload
def from_pretrained(
    name: str | os.PathLike[str],
    *,
    device: Device = ...,
    dtype: torch.dtype | None = ...,
    revision: str | None = ...,
    kind: type[Model],
) -> Model: ...


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    device: Device = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    kind: type[TrainedModel] = TrainedModel,
) -> TrainedModel:
    """A trained model, in evaluation mode, with its tokenizer.

    Args:
        name: of a shipped checkpoint, a folder, a .ckpt file, or a model of the hub; see this file's top.
        device: where the model goes.
        dtype: of its weights; by default that of the file, and float32 for what is stored in half of that.
        revision: branch, tag or commit of a model of the hub.
        kind: the class that is wanted, such as CausalLM; any by default.

    Raises:
        ValueError: if there is no such model, it is of another class, or its files are damaged, incomplete, newer than
            this library, or in any way not what they say.
    """
    if not (isinstance(kind, type) and issubclass(kind, TrainedModel)):
        raise ValueError(f"kind is {kind!r}; wanted CausalLM, or another class of models")
    if dtype is not None:
        dtype_name(dtype, "dtype")
    place = _usable(device)
    path = _locate(name, revision)
    if path.suffix == ".ckpt":
        model = load_checkpoint(path, device="cpu", kind=kind)
        return model.to(device=place, dtype=dtype) if dtype is not None else model.to(place)
    if is_foreign(path):
        model, notes = read_transformers(path, device=place, dtype=dtype, kind=kind)
        if notes:
            warnings.warn(f"{path} is read with some of it left behind: {'; '.join(notes)}", stacklevel=2)
        return model
    return read_folder(path, device=place, dtype=dtype, kind=kind)


def _locate(name: Any, revision: str | None) -> Path:
    """The folder, or .ckpt file, that a name stands for."""
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ValueError(f"name is {name!r}; wanted the name of a model, a folder, or OWNER/NAME of the hub")
    text, path = os.fspath(name), Path(name).expanduser()
    is_name = isinstance(name, str)
    hub_id = text.removeprefix(PREFIX)
    if is_name and (text.startswith(PREFIX) or (_HUB_ID.fullmatch(text) and not path.exists())):
        if not _HUB_ID.fullmatch(hub_id):
            raise ValueError(f"name is {text!r}; wanted {PREFIX}OWNER/NAME")
        if not text.endswith(".ckpt"):
            return download(hub_id, revision)
    if revision is not None:
        raise ValueError(f"revision is {revision!r}, and {text!r} is not of the hub; leave it out")
    if is_name and text in available():
        if path.exists():
            warnings.warn(
                f"{text!r} is the checkpoint that comes with lin-attn; for what lies here say ./{text}", stacklevel=3
            )
        return ZOO / text
    if path.exists() or path.suffix == ".ckpt":
        return path
    shipped = ", ".join(available()) or "none"
    raise ValueError(
        f"there is no model {text!r}; wanted a folder, a .ckpt file, OWNER/NAME of the hub, or one of those that come "
        f"with lin-attn: {shipped}"
    )


def _usable(device: Device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"device is {device!r}, which this torch cannot use; `lin-attn env` lists what it can"
        ) from error
    return found
