"""Beginning a run with the weights of another: of a stage before, or of pre-training, without its optimizer and steps.

Of a model of the same class all weights are taken. Of one of another class (a classifier from a masked language model)
those of the body are, under the name that the body has here; what lies around it, the heads, is left there, and begins
anew here. Everything that is taken has to be there, in the same shape, and nothing may be left over, but for the parts
that are named as replaced.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lin_attn.data.special_tokens import agree
from lin_attn.data.tokenizer import Tokenizer
from models.pretrained import from_pretrained
from models.pretrained.weights import listed
from models.training import TrainedModel


@dataclass(frozen=True)
class Weights:
    """What a run begins with.

    Attributes:
        kind: the class of the model that it is of.
        network: the fields of its network.
        state: its weights by name.
        tokenizer: if it has one.
    """

    kind: type[TrainedModel]
    network: Mapping[str, Any]
    state: Mapping[str, Tensor]
    tokenizer: Tokenizer | None


def read_weights(path: str | Path) -> Weights:
    """Those of a model by any name that `from_pretrained` takes.

    Raises:
        ValueError: if it cannot be read.
    """
    model = from_pretrained(path)
    return Weights(type(model), model.hparams["network"], model.state_dict(), model.tokenizer)


def take_weights(model: TrainedModel, weights: Weights, replaced: Iterable[str] = ()) -> list[str]:
    """Puts weights into a model.

    Args:
        model: is changed in place.
        weights: of the same class, or with the same body.
        replaced: parts of the model, such as "head" or "network.output", that are not taken; there need be none.

    Returns:
        The names of the model's weights that stay as they are.

    Raises:
        ValueError: if a weight is missing, left over or of another shape, or a replaced part is nowhere.
    """
    given, wanted = _renamed(weights, type(model)), model.state_dict()
    around = () if weights.kind is type(model) else _outside(wanted, type(model).body)
    for part in (replaced := list(replaced)):
        if not _within([part], (*given, *wanted)):
            parts = list(dict.fromkeys(name.rpartition(".")[0] for name in wanted))
            raise ValueError(f"replaced_weights has {part!r}; wanted a part of the model, such as {listed(parts)}")
    new = [*around, *_within(replaced, wanted)]
    taken = {name: value for name, value in given.items() if not _within(replaced, [name])}
    missing = [name for name in wanted if name not in taken and name not in new]
    left_over = [name for name in taken if name not in wanted]
    misshapen = [
        f"{name} {tuple(value.shape)} for {tuple(wanted[name].shape)}"
        for name, value in taken.items()
        if name in wanted and value.shape != wanted[name].shape
    ]
    for what, names in (("does not have", missing), ("has besides", left_over), ("has in another shape", misshapen)):
        if names:
            raise ValueError(
                f"initial_weights is of a {weights.kind.__name__} that {what} {listed(names)}; wanted the weights of "
                f"this {type(model).__name__}'s network, or replaced_weights to name the parts that begin anew"
            )
    with torch.no_grad():
        for name, value in taken.items():
            wanted[name].copy_(value)
    return new


class InitialWeights(Callback):
    """Lets a run begin with the weights of another model; those of one that it is resumed from take their place again.

    Args:
        path: a .ckpt file, or what else `from_pretrained` takes.
        replaced: parts of the model that begin anew all the same.

    Raises:
        ValueError: when the run begins: as `take_weights`, or if the data have another tokenizer.
    """

    def __init__(self, path: str | Path, replaced: Iterable[str] = ()) -> None:
        self.path, self.replaced = path, tuple(replaced)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Loads them, before the model is arranged for its devices."""
        if stage != "fit":
            return
        assert isinstance(pl_module, TrainedModel)
        weights = read_weights(self.path)
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is not None and weights.tokenizer is not None and not agree(tokenizer, weights.tokenizer):
            raise ValueError(
                f"data.tokenizer is {tokenizer.fingerprint}, and initial_weights are of "
                f"{weights.tokenizer.fingerprint}; wanted the same: with data.tokenizer={self.path} the text is read "
                "with what the checkpoint carries"
            )
        new = take_weights(pl_module, weights, self.replaced)
        here = pl_module.hparams["network"]
        for name in here.keys() & weights.network.keys():
            if here[name] != weights.network[name]:
                rank_zero_info(f"network.{name} is {here[name]}; it was {weights.network[name]} in {self.path}")
        anew = f"; new: {listed(new)}" if new else ""
        rank_zero_info(f"begins with the weights of {self.path}{anew}")


def _renamed(weights: Weights, kind: type[TrainedModel]) -> dict[str, Tensor]:
    """The weights under the names that they have in another class; of another class those of the body alone."""
    if weights.kind is kind:
        return dict(weights.state)
    body = f"{weights.kind.body}."
    return {f"{kind.body}.{name[len(body) :]}": value for name, value in weights.state.items() if name.startswith(body)}


def _outside(names: Iterable[str], part: str) -> list[str]:
    return [name for name in names if not _within([part], [name])]


def _within(parts: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that are, or begin with, one of the parts."""
    return [name for name in names if any(f"{name}.".startswith(f"{part}.") for part in parts)]
