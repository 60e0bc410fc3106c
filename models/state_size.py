"""How large the state of a language model is, by measuring it."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from models.generation import in_evaluation_mode

if TYPE_CHECKING:
    from models.causal_lm import CausalLM


class StateSize(NamedTuple):
    """Bytes that are carried from token to token: so many at any length, and so many more a token."""

    fixed: int
    per_token: int


def state_size(model: "CausalLM") -> StateSize:
    """The state of one sequence; with a segment's memory, once that is full."""
    length = (model.network_config.memory_length or 0) + 1
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with in_evaluation_mode(model), torch.no_grad():
        _, state = model.network(token.expand(1, length))
        _, after = model.network(token, None, state)
    per_token = int(after.nbytes - state.nbytes)
    return StateSize(int(state.nbytes) - length * per_token, per_token)
