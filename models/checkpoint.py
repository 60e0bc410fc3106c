"""Loading a Lightning checkpoint as a model to use, and saying in one sentence why one cannot be loaded."""

from pathlib import Path

import torch

from models.causal_lm import CausalLM


def load_checkpoint(path: str | Path, *, device: torch.device | str = "cpu") -> CausalLM:
    """The model of a checkpoint that `fit` wrote, in evaluation mode, with its tokenizer.

    Nothing is unpickled but tensors and plain values.

    Args:
        path: the .ckpt file.
        device: where the model goes.

    Raises:
        ValueError: if the file is not there, or is no such checkpoint, or its weights do not fit its own configuration.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; wanted a .ckpt file written by lin-attn fit")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what the reader makes of arbitrary bytes has no common type
        raise ValueError(f"{path} cannot be read as a checkpoint; it is truncated or of another kind") from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "hyper_parameters"} <= set(checkpoint):
        raise ValueError(f"{path} has no state_dict and hyper_parameters; wanted a checkpoint written by lin-attn fit")
    model = CausalLM(**checkpoint["hyper_parameters"])
    try:
        model.load_state_dict(checkpoint["state_dict"], strict=True)
    except RuntimeError as error:
        raise ValueError(f"the weights of {path} do not fit its own configuration: {error}") from error
    model.on_load_checkpoint(checkpoint)
    return model.eval().to(device)
