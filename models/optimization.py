"""The optimizer and its schedule: AdamW with decay on matrices, linear warm-up, a schedule, one update a step."""

import math

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from models.config import OptimizerConfig


def build_optimizer(module: nn.Module, config: OptimizerConfig, *, fused: bool | None = None) -> AdamW:
    """AdamW over the module's parameters that require a gradient; fused where that works, unless it is said."""
    decayed, plain = split_by_decay(module)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if fused is None:
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in decayed + plain)
    return AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)


def split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with weight decay, which are the matrices, and those without: biases, scales, tables of positions.

    A token embedding decays like the head that it may be tied to. Shared parameters are listed once.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (decayed if parameter.dim() >= 2 and "positions" not in name else plain).append(parameter)
    return decayed, plain


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, max_steps: int) -> LambdaLR:
    """The factor of lr at each step: see `lr_factor`; max_steps matters to schedules that have an end."""

    def factor(step: int) -> float:
        return lr_factor(step, config.warmup_steps, max_steps, config.min_lr_ratio, config.schedule)

    return LambdaLR(optimizer, factor)


def lr_factor(step: int, warmup_steps: int, max_steps: int, min_ratio: float, schedule: str = "cosine") -> float:
    """Rises linearly to 1 over the warm-up; what follows says the schedule.

    "cosine": half a cosine down to min_ratio at max_steps, where it stays; "linear": a line to the same end;
    "inverse_sqrt": √(warmup_steps / (step + 1)), which is 1 at the warm-up's last step; "constant": 1.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(warmup_steps / (step + 1))
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    remaining = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_ratio + (1 - min_ratio) * remaining
