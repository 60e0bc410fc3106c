"""Reading a Lightning checkpoint, and saying in one sentence why one cannot be read."""

from pathlib import Path
from typing import Any

import torch

from models.causal_lm import CausalLM


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint that `fit` wrote; nothing is unpickled but tensors and plain values.

    Raises:
        ValueError: if the file is not there, or is no such checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; wanted a .ckpt file written by lin-attn fit")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what the reader makes of arbitrary bytes has no common type
        raise ValueError(f"{path} cannot be read as a checkpoint; it is truncated or of another kind") from error
    groups = checkpoint.get("hyper_parameters") if isinstance(checkpoint, dict) else None
    if not isinstance(groups, dict) or set(groups) != {"network", "optimizer"} or "state_dict" not in checkpoint:
        raise ValueError(f"{path} is no checkpoint of a language model; wanted one written by lin-attn fit")
    return checkpoint


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
