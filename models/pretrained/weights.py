"""Tensors of a model to a safetensors file and back, strictly: every one by its name, shape and kind of number.

Tied weights, one tensor with several names in the model, are in the file once, by the first of its names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS = "model.safetensors"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FILE_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LISTED = 5  # names in a message


def dtype_name(dtype: Any, argument: str) -> str:
    """The name of a floating-point dtype.

    Raises:
        ValueError: if it is none of those that weights are kept in.
    """
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise ValueError(f"{argument} is {dtype!r}; wanted one of {', '.join(f'torch.{name}' for name in DTYPES)}")


def named_weights(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by the first of them.

    Raises:
        ValueError: if the model has buffers to keep, which the format has no place for.
    """
    kept = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if kept:
        raise ValueError(
            f"the model has the buffers {', '.join(sorted(kept))}; wanted one whose weights are parameters"
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: group for group in names.values()}


def stored_dtype(model: nn.Module, dtype: torch.dtype | None) -> str:
    """The name of the dtype to store a model's weights in: the one asked for, or their own.

    Raises:
        ValueError: if the weights are spread over processes, are not there, or are of several dtypes.
    """
    for name, weight in model.named_parameters():
        if hasattr(weight, "full_tensor") or weight.is_meta:
            raise ValueError(f"{name} is not whole in this process; load a checkpoint of the run and save that")
    kinds = sorted({str(weight.dtype) for weight in model.parameters()})
    if dtype is None and len(kinds) > 1:
        raise ValueError(f"the weights are of {' and '.join(kinds)}; wanted one, or dtype to store them in")
    return dtype_name(next(model.parameters()).dtype if dtype is None else dtype, "dtype")


def write_weights(model: nn.Module, path: Path, dtype: torch.dtype | None) -> str:
    """Writes a model's weights, in a dtype of theirs or in their own, whose name is returned.

    Raises:
        ValueError: as `stored_dtype`.
    """
    stored = stored_dtype(model, dtype)
    weights = {name: model.get_parameter(name).detach() for name in named_weights(model)}
    # A copy: slices of one storage, as fused projections would be, are told apart in the file.
    whole = {name: weight.to("cpu", DTYPES[stored], copy=True).contiguous() for name, weight in weights.items()}
    save_file(whole, path, metadata={"format": "pt"})
    return stored


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file.

    Raises:
        ValueError: if it cannot be read, or holds anything but floating-point numbers.
    """
    return {name: shape for name, (shape, _) in _header(path).items()}


def read_weights(model: nn.Module, path: Path, *, stored: str, dtype: torch.dtype, device: torch.device) -> None:
    """Gives a model that has no weights yet (on the meta device) those of a file.

    Args:
        model: whose parameters are replaced.
        path: a safetensors file.
        stored: the dtype that the file is in.
        dtype: what the weights become.
        device: where they go.

    Raises:
        ValueError: if a tensor is missing, unexpected, of another shape or of another dtype, by name.
    """
    names, header = named_weights(model), _header(path)
    check_names(header, names, path)
    for name, (shape, found) in header.items():
        wanted = tuple(model.get_parameter(name).shape)
        if shape != wanted:
            raise ValueError(f"{path}: {name} has shape {shape}; wanted {wanted}")
        if found != stored:
            raise ValueError(f"{path}: {name} is {found}; wanted {stored}, as config.json says")
    with open_weights(path) as file:
        assign(model, names, {name: read_tensor(file, name, path).to(device, dtype, copy=True) for name in names})


def assign(model: nn.Module, names: Mapping[str, list[str]], weights: Mapping[str, Tensor]) -> None:
    """Makes each weight the parameter of all its names."""
    for first, group in names.items():
        weight = nn.Parameter(weights[first], requires_grad=model.get_parameter(first).requires_grad)
        for name in group:
            place, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(place), leaf, weight)


def check_names(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError, by name, for tensors that are missing or unexpected."""
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        parts = [f"lacks {listed(missing)}"] * bool(missing) + [f"has {listed(unexpected)} besides"] * bool(unexpected)
        raise ValueError(f"{path} does not fit its config.json: it {' and '.join(parts)}")


def listed(names: list[str]) -> str:
    """The first few of some names, and how many there are more."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor."""
    found = {}
    with open_weights(path) as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            part = file.get_slice(name)
            kind = part.get_dtype()
            if kind not in _FILE_DTYPES:
                raise ValueError(f"{path}: {name} is {kind}; wanted one of {', '.join(_FILE_DTYPES)}")
            found[name] = (tuple(part.get_shape()), _FILE_DTYPES[kind])
    return found


def open_weights(path: Path) -> Any:
    """A safetensors file, for `read_tensor`.

    Raises:
        ValueError: if it is not there, or not whole.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # its own type, OSError and others
        raise ValueError(f"{path} is no whole safetensors file: {error}") from None


def read_tensor(file: Any, name: str, path: Path) -> Tensor:
    """A tensor of an open safetensors file.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        tensor: Tensor = file.get_tensor(name)
    except Exception as error:
        raise ValueError(f"{path}: {name} cannot be read: {error}") from None
    return tensor
