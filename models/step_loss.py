"""The gradient of a step: of the mean loss over all its targets, however these lie over batches and processes.

    loss = Σ_batches Σ_processes nll / Σ_batches Σ_processes count

A mean of the batches' means would weigh a target of a short batch more than one of a long batch. What a batch weighs is
known only when the last has been read: backward runs on nll / UNIT, and the sum of gradients is scaled once, before
the optimizer's step, by UNIT / count.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from models.loss import exact_dtype

# Targets that backward takes as one: near those of a batch, so that float16's range is used; a power of two, so that
# nothing is rounded by it.
UNIT = 4096


class StepLoss:
    """Sums of the batches of a step that is not finished.

    Attributes:
        batches: how many that are.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._sums: Tensor | None = None  # nll and count, (2,)

    def add(self, nll: Tensor, count: Tensor) -> Tensor:
        """Takes a batch in; returns what to differentiate.

        Args:
            nll: sum of negative log-likelihoods, a scalar.
            count: of targets, a scalar.
        """
        sums = torch.stack((nll.detach().to(exact_dtype(nll.device)), count.to(exact_dtype(nll.device))))
        self._sums = sums if self._sums is None else self._sums + sums
        self.batches += 1
        return nll / UNIT

    def finish(self, parameters: Iterable[nn.Parameter], shares: int) -> Tensor:
        """Makes the gradients those of the mean over the step's targets, and begins the next step.

        Args:
            parameters: whose gradients are the sum of those of nll / UNIT, divided by shares.
            shares: by what the trainer has divided: batches of a full step times processes.

        Returns:
            The mean in nats, a scalar, the same in every process.
        """
        nll, count = self._reduced().tolist()
        scale = UNIT * shares / max(count, 1)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self.batches, self._sums = 0, None
        return torch.tensor(nll / max(count, 1), dtype=torch.float64)

    def state_dict(self, module: nn.Module, shares: int) -> dict[str, Any]:
        """What a checkpoint in the middle of a step has to hold; all processes have to call it.

        Args:
            module: whose gradients are being summed.
            shares: as in `finish`.

        Returns:
            The sums over all processes, and the gradients' mean over them, as plain values.
        """
        sums = self._reduced().tolist()
        gradients = {n: _whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        return {"batches": self.batches, "sums": sums, "shares": shares, "gradients": gradients}

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, shares: int, device: torch.device) -> None:
        """Goes on in the middle of a step.

        Args:
            state: what `state_dict` gave.
            module: which gets the gradients.
            shares: as in `finish`; another number than in the state is made up for.
            device: of the sums.
        """
        self.batches = state["batches"]
        sums = torch.tensor(state["sums"], dtype=exact_dtype(device), device=device)
        self._sums = sums if _rank() == 0 else torch.zeros_like(sums)
        factor = state["shares"] / shares
        for name, parameter in module.named_parameters():
            if name in state["gradients"]:
                gradient = state["gradients"][name].to(parameter.device)
                parameter.grad = _like(gradient * factor, parameter)  # a copy: it will be changed in place

    def _reduced(self) -> Tensor:
        assert self._sums is not None, "a step without a batch"
        sums = self._sums.clone()
        if _is_distributed():
            torch.distributed.all_reduce(sums)
        return sums


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0


def _whole(gradient: Tensor) -> Tensor:
    """A gradient as a tensor on the CPU: sharded ones are put together, those of replicas averaged."""
    if hasattr(gradient, "full_tensor"):
        whole: Tensor = gradient.full_tensor()
        return whole.cpu()
    gradient = gradient.detach().clone()
    if _is_distributed():
        torch.distributed.all_reduce(gradient)
        gradient /= torch.distributed.get_world_size()
    return gradient.cpu()


def _like(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """A whole gradient, sharded as its parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return gradient.to(parameter.dtype)
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
