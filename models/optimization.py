"""The optimizer and its schedule: AdamW with decay on matrices, linear warm-up, cosine decay, one update a step."""

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
    """The factor of lr at each step: see `lr_factor`."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, config.warmup_steps, max_steps, config.min_lr_ratio))


def lr_factor(step: int, warmup_steps: int, max_steps: int, min_ratio: float) -> float:
    """Rises linearly to 1 over the warm-up, then falls along half a cosine to min_ratio at max_steps, and stays."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
