"""From a model of ours to a folder that transformers loads, where it has a layout for it."""

import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import Tokenizer
from lin_attn.data.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG
from models.converters.layout import HEADS, Export
from models.pretrained.folder import CONFIG
from models.pretrained.place import new_folder
from models.pretrained.weights import DTYPES, WEIGHTS, stored_dtype

if TYPE_CHECKING:
    from models.training import TrainedModel

FILES = (CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG)


def write_transformers(
    model: "TrainedModel",
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Writes a model in the layout of transformers that fits it: RoFormer's, BERT's or Llama's.

    Args:
        model: a CausalLM, MaskedLM or SequenceClassifier with softmax attention.
        folder: new or empty.
        dtype: to store the weights in; their own by default.
        overwrite: replace a folder that holds nothing but such files.

    Returns:
        Notes of what is not carried over.

    Raises:
        ValueError: if no layout fits, naming the option that is in the way, or the folder has files already.
    """
    layout = import_module(f"models.converters.{_layout_of(model)}")
    export: Export = layout.write(model)
    stored = stored_dtype(model, dtype)
    tensors = {}
    for ours, source in export.weights.items():
        for name in source.names:
            tensors[_prefixed(name, layout.PREFIX)] = source.back(model.get_parameter(ours).detach())
    tensors |= {_prefixed(name, layout.PREFIX): tensor for name, tensor in export.extra.items()}
    whole = {name: tensor.to("cpu", DTYPES[stored], copy=True).contiguous() for name, tensor in tensors.items()}
    place = Path(folder).expanduser().resolve()
    with new_folder(place, overwrite=overwrite, known=FILES) as aside:
        end = None if model.tokenizer is None else model.tokenizer.end_id
        special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
        config = export.config | special | {"dtype": stored}
        (aside / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(whole, aside / WEIGHTS, metadata={"format": "pt"})
        notes = [*export.notes, *_write_tokenizer(model.tokenizer, aside)]
    return notes


def _layout_of(model: "TrainedModel") -> str:
    config, kind = model.network_config, type(model).__name__
    if kind not in ("CausalLM", "MaskedLM", "SequenceClassifier"):
        raise ValueError(f"the model is a {kind}, for which transformers has no layout; wanted a CausalLM, MaskedLM or "
                         "SequenceClassifier")  # fmt: skip
    if config.attention != "softmax":
        raise ValueError(
            f"network.attention is {config.attention!r}, which no layout of transformers has; wanted softmax"
        )
    if kind == "CausalLM":
        return "llama" if config.norm_position == "pre" else "roformer"
    return "bert" if config.position == "learned" else "roformer"


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(HEADS) else prefix + name


def _write_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> Sequence[str]:
    if isinstance(tokenizer, SpecialTokens) and tokenizer.vocab_size == tokenizer.tokenizer.vocab_size:
        tokenizer = tokenizer.tokenizer  # its special tokens are its own
    plain = {} if tokenizer is None else tokenizer.to_dict()
    if plain.get("name") == "special":
        return ["the tokenizer is not written: it has special tokens that its definition lacks"]
    if plain.get("name") != "tokenizers":
        return ["there is no tokenizer to write" if tokenizer is None else
                "the tokenizer is not written: transformers has none whose tokens are bare bytes"]  # fmt: skip
    (folder / TOKENIZER).write_bytes(plain["json"].encode("utf-8"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": plain["end_token"]}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return []
