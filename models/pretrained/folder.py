"""The format of a pretrained model: a folder that is written at once and read strictly.

config.json holds

    format_version    1; what is newer is refused
    class             CausalLM, MaskedLM, Seq2Seq, SequenceClassifier or PairRanker
    network           all fields of its configuration
    optimizer         what it was trained with, from which a fine-tuning starts
    options           the class's other arguments
    tokenizer         its name, its special tokens, or null; see `lin_attn.data.tokenizer_files`
    dtype             of the weights in the file
    summary           how it was trained and what it reaches; see `models.pretrained.card`
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import models
from lin_attn.data.tokenizer_files import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    entry_of,
    files_of,
    read_tokenizer,
    write_tokenizer,
)
from models.checkpoint import CLASSES
from models.pretrained.card import checked_summary, model_card
from models.pretrained.checksums import CHECKSUMS, checksums, verify
from models.pretrained.place import new_folder
from models.pretrained.weights import DTYPES, WEIGHTS, dtype_name, read_shapes, read_weights, write_weights

if TYPE_CHECKING:
    from models.training import TrainedModel

FORMAT_VERSION = 1
CONFIG, CARD = "config.json", "README.md"
FILES = (CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, CARD, CHECKSUMS)
FIELDS = ("format_version", "class", "network", "optimizer", "options", "tokenizer", "dtype", "summary")
HOW_IT_IS_RUN = ("activation_checkpointing", "torch_compile")  # arguments that are no part of a model


def write_folder(
    model: "TrainedModel",
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    summary: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    name: str | None = None,
) -> None:
    """Writes a model's folder; see `TrainedModel.save_pretrained`. name is what the card calls it."""
    kind = type(model).__name__
    if kind not in CLASSES or getattr(models, kind) is not type(model):
        raise ValueError(f"the model is a {kind}, which could not be found again; wanted one of {', '.join(CLASSES)}")
    if dtype is not None:
        dtype_name(dtype, "dtype")
    known = checked_summary(summary or {})
    with new_folder(folder, overwrite=overwrite, known=FILES) as aside:
        names = [CONFIG, WEIGHTS, *write_tokenizer(model.tokenizer, aside)]
        stored = write_weights(model, aside / WEIGHTS, dtype)
        _write_json(aside / CONFIG, _config_of(model, stored, known))
        (aside / CARD).write_text(model_card(model, known, stored, name or folder.name), encoding="utf-8")
        (aside / CHECKSUMS).write_text(checksums(aside, names), encoding="ascii")


def read_config(folder: str | Path) -> dict[str, Any]:
    """What a folder says of its model, its files checked by their checksums: the fields on top of this file.

    Raises:
        ValueError: if the folder is not there, damaged, newer than this library, or of another kind.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG, f"{folder} is no folder of a model") if not _has_sums(folder) else None
    if config is not None and "format_version" not in config:
        raise ValueError(f"{folder / CONFIG} has no format_version; wanted a folder that save_pretrained wrote")
    names = verify(folder)
    config = read_json(folder / CONFIG, f"{folder} is no folder of a model")
    version = config.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ValueError(
            f"{folder / CONFIG} has format_version {version}, and this lin-attn reads {FORMAT_VERSION}; wanted a newer "
            "lin-attn"
        )
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(f"{folder / CONFIG} has format_version {version!r}; wanted {FORMAT_VERSION}")
    _check_fields(config, folder / CONFIG)
    needed = {CONFIG, WEIGHTS} | files_of(config["tokenizer"])
    if set(names) != needed:
        raise ValueError(f"{folder / CHECKSUMS} lists {', '.join(names)}; wanted {', '.join(sorted(needed))}")
    return config


def read_folder(
    folder: Path, *, device: torch.device, dtype: torch.dtype | None, kind: type["TrainedModel"]
) -> "TrainedModel":
    """The model of a folder that `write_folder` wrote, in evaluation mode.

    Raises:
        ValueError: if it is not there, damaged, newer, of another kind than is wanted, or in any way not what it says.
    """
    config = read_config(folder)
    if not issubclass(getattr(models, config["class"]), kind):
        raise ValueError(f"{folder} holds a {config['class']}; wanted a {kind.__name__}")
    tensors = len(read_shapes(folder / WEIGHTS))
    for name in ("n_layers", "n_decoder_layers"):  # before so many layers are made
        layers = config["network"].get(name)
        if isinstance(layers, int) and layers > tensors:
            raise ValueError(f"{folder / CONFIG}: network.{name} is {layers}, and {WEIGHTS} has {tensors} tensors")
    model = build(config, folder / CONFIG)
    stored = DTYPES[config["dtype"]]
    wanted = torch.promote_types(stored, torch.float32) if dtype is None else dtype
    read_weights(model, folder / WEIGHTS, stored=config["dtype"], dtype=wanted, device=device)
    model.tokenizer = read_tokenizer(config["tokenizer"], folder)
    if model.tokenizer is not None and model.tokenizer.vocab_size > model.network_config.vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has {model.tokenizer.vocab_size} tokens; wanted at most network.vocab_size, "
            f"{model.network_config.vocab_size}"
        )
    return model.eval().to(device=device, dtype=wanted)


def build(config: Mapping[str, Any], source: Path) -> "TrainedModel":
    """The model that a config names, without memory for its weights: on the meta device.

    Raises:
        ValueError: if the class does not take the config's fields.
    """
    kind = getattr(models, config["class"])
    options = config["options"]
    unknown = sorted(set(options) - set(_options_of(kind)))
    if unknown:
        raise ValueError(f"{source}: options has unknown fields {', '.join(unknown)}; {kind.__name__} has none such")
    try:
        with torch.device("meta"):
            model: TrainedModel = kind(network=config["network"], optimizer=config["optimizer"], **options)
    except Exception as error:  # a value of a wrong type fails wherever it is used first
        raise ValueError(f"{source} describes no model: {error}") from error
    return model


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """An object in a JSON file.

    Raises:
        ValueError: if there is none; `otherwise` begins the message about a file that is not there.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{otherwise}: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; wanted a JSON object")
    return value


def _has_sums(folder: Path) -> bool:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; wanted one that save_pretrained wrote")
    return (folder / CHECKSUMS).is_file()


def _check_fields(config: dict[str, Any], path: Path) -> None:
    unknown, missing = sorted(set(config) - set(FIELDS)), [name for name in FIELDS if name not in config]
    if unknown or missing:
        told = [f"unknown fields {', '.join(unknown)}"] * bool(unknown) + [f"no {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"{path} has {' and '.join(told)}; wanted {', '.join(FIELDS)}")
    for name in ("network", "optimizer", "options", "summary"):
        if not isinstance(config[name], dict):
            raise ValueError(f"{path}: {name} is {config[name]!r}; wanted an object")
    for name, known in (("class", CLASSES), ("dtype", tuple(DTYPES))):
        if config[name] not in known:
            raise ValueError(f"{path}: {name} is {config[name]!r}; wanted one of {', '.join(known)}")
    try:
        files_of(config["tokenizer"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _config_of(model: "TrainedModel", stored: str, summary: dict[str, Any]) -> dict[str, Any]:
    plain = dict(model.hparams)
    return {
        "format_version": FORMAT_VERSION,
        "class": type(model).__name__,
        "network": plain.pop("network"),
        "optimizer": plain.pop("optimizer"),
        "options": plain,
        "tokenizer": entry_of(model.tokenizer),
        "dtype": stored,
        "summary": summary,
    }


def _options_of(kind: type) -> list[str]:
    arguments = inspect.signature(kind).parameters
    return [name for name in arguments if name not in ("network", "optimizer", *HOW_IT_IS_RUN)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
