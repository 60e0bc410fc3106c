"""From a folder of transformers to a model of ours, strictly: every tensor of both sides is accounted for."""

from functools import reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import models
from lin_attn.data.special_tokens import with_own_names
from lin_attn.data.tokenizer import Tokenizer
from lin_attn.data.tokenizer_spec import TokenizerSpec
from models.converters.fields import Fields
from models.converters.layout import Plan
from models.converters.tensors import Tensors
from models.pretrained.folder import CONFIG, build, read_json
from models.pretrained.weights import assign, listed, named_weights

if TYPE_CHECKING:
    from models.training import TrainedModel

LAYOUTS = {"roformer": "roformer", "bert": "bert", "llama": "llama", "mistral": "llama", "qwen2": "llama"}
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer.model", "vocab.json")
TABLE_TOLERANCE = 2e-2  # absolute; a table of sines may be stored in bfloat16


def is_foreign(folder: Path) -> bool:
    """Whether a folder is of transformers: its config.json has a model_type, and no format of ours."""
    try:
        config = read_json(folder / CONFIG, "")
    except ValueError:
        return False
    return "model_type" in config and "format_version" not in config


def layout_of(model_type: Any, source: Any) -> ModuleType:
    """The layout of a model type.

    Raises:
        ValueError: if there is none for it.
    """
    if not isinstance(model_type, str) or model_type not in LAYOUTS:
        raise ValueError(f"{source}: model_type is {model_type!r}, for which there is no converter; wanted one of "
                         f"{', '.join(LAYOUTS)}")  # fmt: skip
    return import_module(f"models.converters.{LAYOUTS[model_type]}")


def read_transformers(
    folder: Path, *, device: torch.device, dtype: torch.dtype | None, kind: type["TrainedModel"]
) -> tuple["TrainedModel", list[str]]:
    """The model of a folder that transformers saved, in evaluation mode, and notes of what was not carried over.

    Args:
        folder: with config.json and model.safetensors, or files that an index lists.
        device: where the model goes.
        dtype: of its weights; by default float32, or float64 if one of theirs is.
        kind: the class that is wanted.

    Raises:
        ValueError: for a field that cannot be honoured, or a tensor that is missing, unexpected or of another shape.
    """
    path = folder / CONFIG
    fields = Fields(read_json(path, f"{folder} is no folder of a model"), path)
    layout = layout_of(fields.take("model_type", "", str), path)
    tensors = Tensors(folder, layout.PREFIX)
    layers = fields.take("num_hidden_layers", 0)
    if layers > len(tensors.unused):  # before so many are made
        fields.refuse("num_hidden_layers", f"and {tensors.path.name} has {len(tensors.unused)} tensors", "fewer layers")
    plan: Plan = layout.read(fields, _architecture(fields, layout))
    if not issubclass(getattr(models, plan.kind), kind):
        raise ValueError(f"{folder} holds a {plan.kind} in the layout of transformers; wanted a {kind.__name__}")
    plan.notes += [f"config.json has fields that {layout.NAME} does not read: {', '.join(unknown)}"
                   for unknown in [fields.unknown()] if unknown]  # fmt: skip
    model = build({"class": plan.kind, "network": plan.network, "optimizer": {}, "options": plan.options}, path)
    weights = _weights(model, plan, tensors)
    _account(plan, tensors)
    wanted = dtype or reduce(torch.promote_types, (weight.dtype for weight in weights.values()), torch.float32)
    names = named_weights(model)
    assign(model, names, {name: weights.pop(name).to(device, wanted, copy=True) for name in names})
    model.tokenizer = _tokenizer(folder, model.network_config.vocab_size, plan.notes)
    if model.tokenizer is not None and plan.kind != "CausalLM":
        model.tokenizer = with_own_names(model.tokenizer)
    return model.eval().to(device=device, dtype=wanted), plan.notes


def _architecture(fields: Fields, layout: ModuleType) -> str:
    names = fields.take("architectures", [], list)
    if len(names) != 1 or names[0] not in layout.ARCHITECTURES:
        fields.refuse(
            "architectures",
            f"of which {layout.NAME} has no counterpart here",
            f"one of {', '.join(layout.ARCHITECTURES)}",
        )
    return str(names[0])


def _weights(model: "TrainedModel", plan: Plan, tensors: Tensors) -> dict[str, Tensor]:
    """Each weight of ours, in its own dtype."""
    wanted = named_weights(model)
    assert set(plan.weights) == set(wanted), set(plan.weights) ^ set(wanted)
    missing = sorted(source.names[0] for source in plan.weights.values()
                     if not source.zeros and not any(name in tensors for name in source.names))  # fmt: skip
    missing += sorted(s.plus[0] for s in plan.weights.values() if s.plus is not None and s.plus[0] not in tensors)
    if missing:
        raise ValueError(f"{tensors.path} lacks {listed(missing)}; wanted all weights that its config.json names")
    weights = {}
    for ours, source in plan.weights.items():
        shape = tuple(model.get_parameter(ours).shape)
        name = next((name for name in source.names if name in tensors), None)
        if name is None:
            weights[ours] = torch.zeros(shape)
            continue
        tensor = _checked(tensors, name, shape)
        if source.plus is not None:
            other, together = source.plus
            tensor = together(tensor, _checked(tensors, other, (None, shape[-1])))
        weights[ours] = source.turn(tensor)
    return weights


def _checked(tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> Tensor:
    tensor = tensors.read(name)
    fits = tensor.dim() == len(shape) and all(w in (None, n) for n, w in zip(tensor.shape, shape, strict=True))
    if not fits:
        wanted = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{tensors.path}: {tensors.original(name)} has shape {tuple(tensor.shape)}; wanted {wanted}")
    if not tensor.is_floating_point():
        raise ValueError(f"{tensors.path}: {tensors.original(name)} is {tensor.dtype}; wanted floating point")
    return tensor


def _account(plan: Plan, tensors: Tensors) -> None:
    """Raises ValueError for tensors that nobody asked for, unless they repeat others, or are known and told."""
    left: dict[str, list[str]] = {}
    for name in sorted(tensors.unused):
        here = f"{tensors.path}: {tensors.original(name)}"
        if name in plan.copies:
            same = plan.copies[name]
            if same in tensors and not torch.equal(tensors.read(name), tensors.read(same)):
                raise ValueError(f"{here} is not the same as {tensors.original(same)}, to which config.json ties it")
        elif name in plan.tables:
            table = tensors.read(name)
            expected = plan.tables[name](tuple(table.shape))
            if expected.shape != table.shape or not torch.allclose(
                table.double(), expected.double(), atol=TABLE_TOLERANCE
            ):
                raise ValueError(f"{here} is not the table of positions that config.json names; it is computed here")
        elif name in plan.left_out:
            left.setdefault(plan.left_out[name], []).append(tensors.original(name))
            tensors.unused.discard(name)
    if tensors.unused:
        unexpected = [tensors.original(name) for name in sorted(tensors.unused)]
        raise ValueError(f"{tensors.path} has {listed(unexpected)} besides; wanted the weights that config.json names")
    plan.notes += [f"left out: {', '.join(names)} ({what})" for what, names in left.items()]


def _tokenizer(folder: Path, vocab_size: int, notes: list[str]) -> Tokenizer | None:
    """The folder's tokenizer, where it has one that can be read; a note where it has not."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        notes.append("there is no tokenizer in the folder")
        return None
    try:
        tokenizer = TokenizerSpec(str(folder)).open()
    except Exception as error:  # the libraries raise many types
        notes.append(f"the tokenizer is not carried over: {str(error).splitlines()[0]}")
        return None
    if tokenizer.vocab_size > vocab_size:
        notes.append(f"the tokenizer is not carried over: it has {tokenizer.vocab_size} tokens, the model {vocab_size}")
        return None
    return tokenizer
