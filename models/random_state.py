"""The random numbers of a process as plain values, so that a run that is resumed draws what it would have drawn."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of torch's generators on the CPU and on a device, of numpy's global one and of Python's.

    Args:
        device: of this process.

    Returns:
        Tensors, lists, strings and numbers only, which torch.load(weights_only=True) reads.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(words), gauss],
    }
    if device.type in ("cuda", "mps"):
        state["device"] = getattr(torch, device.type).get_rng_state(*[device][: device.type == "cuda"])
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Takes up what `random_state` gave; a device of another kind keeps its own."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"])


def random_states(device: torch.device) -> list[dict[str, Any]]:
    """`random_state` of every process, by rank; all processes have to call it."""
    own = random_state(device)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, own)
    return states
