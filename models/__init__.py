"""The zoo: language models around the attention of lin_attn, as Lightning modules.

Imported late, name by name: the command line answers before torch and lightning are loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.causal_lm import CausalLM
    from models.config import NetworkConfig, OptimizerConfig

__all__ = ["CausalLM", "NetworkConfig", "OptimizerConfig"]

_HOMES = {"CausalLM": "causal_lm", "NetworkConfig": "config", "OptimizerConfig": "config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    return getattr(import_module(f"models.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
