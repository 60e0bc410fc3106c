"""How a network is run: recomputed in backward, compiled, sharded over processes. The numbers stay the same.

Order matters: activation checkpointing innermost, then the compiler, then sharding (as torchtitan has it).
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from models.embedding import TokenNetwork


def arrange(
    network: nn.Module, *, activation_checkpointing: bool, torch_compile: bool, mesh: DeviceMesh | None
) -> None:
    """Arranges a network in place: names of parameters stay the same.

    Args:
        network: to arrange.
        activation_checkpointing: keep only each block's input for backward, and compute the block once more there
            (Chen et al. 2016, arXiv 1604.06174).
        torch_compile: compile each block.
        mesh: of the processes, with the dimensions data_parallel and tensor_parallel, to shard parameters, gradients
            and the optimizer's state over, a block at a time (FSDP2; Zhao et al. 2023, arXiv 2304.11277); or None.

    Raises:
        ValueError: for a mesh that splits tensors.
    """
    stacks = [module for module in network.modules() if isinstance(module, TokenNetwork)]
    blocks = [block for stack in stacks for block in stack.blocks]
    for stack in stacks:
        stack.activation_checkpointing = activation_checkpointing
    if torch_compile:
        for block in blocks:
            block.compile()
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        if mesh["tensor_parallel"].size() > 1:
            raise ValueError(
                f"the strategy's tensor_parallel_size is {mesh['tensor_parallel'].size()}; wanted 1, and "
                "data_parallel_size the number of processes: networks are sharded by fully_shard alone"
            )
        for module in (*blocks, network):
            fully_shard(module, mesh=mesh["data_parallel"])


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy with all processes sharding the data (FSDP2), and one file a checkpoint.

    `trainer.strategy=fsdp2` names it.

    Args:
        process_group_backend: by default that of the device: nccl, or gloo on the CPU.
        timeout: how long a process waits for the others.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Spans the mesh over all processes of all machines."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint of any number of processes into the sharded model and optimizer.

        Lightning's own reading numbers parameters in the module's order; in a file of one process they are numbered in
        that of the optimizer's groups, by which they are found here.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        assert self.model is not None
        checkpoint = self.checkpoint_io.load_checkpoint(self.broadcast(checkpoint_path), weights_only=weights_only)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            set_optimizer_state_dict(self.model, optimizer, by_name(state, optimizer, self.model), options=options)
        return checkpoint


def by_name(state: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's state with the names of parameters in place of their numbers."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    of: dict[int, str] = {}
    groups = []
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        named = [names[id(parameter)] for parameter in group["params"]]
        of |= dict(zip(saved["params"], named, strict=True))
        groups.append(saved | {"params": named})
    return {"state": {of[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def register(registry: Any = StrategyRegistry) -> None:
    """Gives the strategy its name."""
    if "fsdp2" not in registry:
        registry.register("fsdp2", FullyShardedStrategy, description=FullyShardedStrategy.__doc__)


register()
