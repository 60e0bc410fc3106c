"""What commands that use a model have in common: the device, and the model by its name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from models.causal_lm import CausalLM

MODEL = (
    "a .ckpt file written by lin-attn fit, a folder of save_pretrained, the name of a checkpoint that comes with "
    "lin-attn, or OWNER/NAME of the Hugging Face hub"
)


def find_device(name: str) -> "torch.device":
    """The device that --device names; auto is the fastest there is.

    Raises:
        ValueError: if this torch cannot use it.
    """
    import torch

    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device is {name}, which this torch cannot use; `lin-attn env` lists what it can"
        ) from error


def open_model(name: str, device: str) -> "CausalLM":
    """A causal language model in evaluation mode, with its tokenizer, on the device that --device names.

    Raises:
        ValueError: if there is none by that name, or the device cannot be used.
    """
    from models import CausalLM, from_pretrained

    model = from_pretrained(name, device=find_device(device), kind=CausalLM)
    if model.tokenizer is None:
        raise ValueError(f"--model is {name}, which has no tokenizer; wanted one that was trained on text")
    return model
