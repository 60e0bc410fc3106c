"""What a layout says of a model: its class and network, and where each of its weights is in the file of transformers.

ours     network.blocks.0.attention.query.weight
theirs   encoder.layer.0.attention.self.query.weight      without the prefix that their classes put before it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from models.training import TrainedModel

HEADS = ("cls.", "classifier.", "lm_head.")  # their names that take no prefix


@dataclass(frozen=True)
class Source:
    """Where one of our weights is on their side.

    Attributes:
        names: the first of these that is there; the first of all when writing.
        turn: their tensor → ours, of one shape.
        back: our tensor → theirs.
        zeros: all zero where none is there, as a bias that they leave out.
        plus: a second tensor of theirs, and what the two make together.
    """

    names: tuple[str, ...]
    turn: Callable[[Tensor], Tensor] = lambda tensor: tensor
    back: Callable[[Tensor], Tensor] = lambda tensor: tensor
    zeros: bool = False
    plus: tuple[str, Callable[[Tensor, Tensor], Tensor]] | None = None


@dataclass
class Plan:
    """How a model is read. Names in copies, tables and left_out may be in the file or not.

    Attributes:
        kind: the name of our class.
        network: fields of its configuration.
        options: its other arguments.
        weights: where each of our weights is, by the first of our names.
        copies: tensors that are there twice: a name, and whose tensor it has to equal.
        tables: tensors that are computed here: a name, and what it has to be, given its shape.
        left_out: tensors that are not read: a name, and what it is.
        notes: what else is not carried over.
    """

    kind: str
    network: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Source] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    tables: dict[str, Callable[[tuple[int, ...]], Tensor]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Export:
    """How a model is written.

    Attributes:
        config: their config.json.
        weights: where each of our weights goes.
        extra: tensors that we have no weight for, by their names.
        notes: what is not carried over.
    """

    config: dict[str, Any]
    weights: dict[str, Source]
    extra: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def renamed(names: Mapping[str, str], *parts: str) -> dict[str, Source]:
    """Weights, biases or both of modules that are the same on both sides but for their names."""
    return {f"{ours}.{part}": Source((f"{theirs}.{part}",)) for ours, theirs in names.items() for part in parts}


def require(model: "TrainedModel", layout: str, **allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field of the network has a value that the layout has no place for."""
    for name, values in allowed.items():
        value = getattr(model.network_config, name)
        if value not in values:
            wanted = " or ".join(map(repr, values))
            raise ValueError(
                f"network.{name} is {value!r}, for which {layout} of transformers has no place; wanted {wanted}"
            )
