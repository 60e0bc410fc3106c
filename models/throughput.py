"""How fast a run goes: tokens a second, use of the machine, time lost to waiting for data, and memory.

    mfu = operations a token · tokens a second / (processes · operations a second of a large matrix product)

The operations are the model's own (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): three times those of the
forward pass, whatever is computed once more in backward, and attention's are those of the mechanism in use: linear
attention's grow with N, not with N². The ceiling is measured when training begins, in the run's precision.
"""

import resource
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lin_attn.scaling.cost import matmul_rate
from lin_attn.scaling.plan import Point
from models.config import NetworkConfig
from models.scaling import network_cost

PRECISIONS = {"bf16": "bfloat16", "16": "float16", "64": "float64", "32": "float32"}


class FetchTimer(PassThroughProfiler):
    """Adds up the seconds that the training loop waits for its next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self._begun = 0.0, 0.0

    def start(self, action_name: str) -> None:
        """Lightning begins an action."""
        if action_name.endswith("train_dataloader_next"):
            self._begun = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Lightning ends an action."""
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self._begun


class Throughput(Callback):
    """Logs, of training alone (validation and checkpoints do not count), at the trainer's logging interval:

    train/tokens_per_second of all processes; train/mfu, a share of 1; train/data_wait, the share of time in which
    the loop waited for a batch, unless the trainer has another profiler than `FetchTimer`; and train/peak_memory_gb,
    in 10⁹ bytes, the most that this process has held: of the GPU, or of the machine's memory.
    """

    def __init__(self) -> None:
        self._ceiling = 0.0
        self._step = self._tokens = self._flops = 0
        self._since = self._waited = self._fetched_at_pause = 0.0
        self._paused: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the ceiling and starts the clock."""
        self._step = trainer.global_step
        config = getattr(pl_module, "network_config", None)
        if type(config) is NetworkConfig:  # a decoder's operations are known
            self._ceiling = matmul_rate(
                step_point(config, 1, 1, pl_module.device.type, str(trainer.precision)),
                size=8192 if pl_module.device.type == "cuda" else 1024,
            )
            rank_zero_info(f"the ceiling of train/mfu: {self._ceiling / 1e9:,.0f} GFLOP/s in a matrix product")
        self._restart(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock again."""
        self._restart(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """What a checkpoint took between two batches does not count."""
        if self._paused is not None:
            self._since += time.perf_counter() - self._paused - (_fetched(trainer) - self._fetched_at_pause)
            self._paused = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Counts the batch, and logs after the last batch of a step at the interval."""
        keys: tuple[str, ...] = pl_module.token_keys  # type: ignore[assignment]
        self._tokens += sum(batch[key].numel() for key in keys) * trainer.world_size
        if self._ceiling:
            rows, length = batch["tokens"].shape
            self._flops += training_flops(pl_module.network_config, rows, length)  # type: ignore[arg-type]
        interval, step = trainer.log_every_n_steps, trainer.global_step  # type: ignore[attr-defined]
        if interval and step % interval == 0 and step != self._step:
            self._log(trainer, pl_module)
        self._step = step
        self._paused, self._fetched_at_pause = time.perf_counter(), _fetched(trainer)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        figures = {"tokens_per_second": self._tokens / seconds}
        if self._ceiling:
            figures["mfu"] = self._flops / seconds / self._ceiling
        if _timer(trainer) is not None:
            figures["data_wait"] = (_fetched(trainer) - self._waited) / seconds
        figures["peak_memory_gb"] = peak_memory(pl_module.device) / 1e9
        pl_module.log_dict({f"train/{name}": value for name, value in figures.items()}, prog_bar=True)
        self._restart(trainer)

    def _restart(self, trainer: Trainer) -> None:
        self._tokens, self._flops, self._since, self._paused = 0, 0, time.perf_counter(), None
        self._fetched_at_pause = self._waited = _fetched(trainer)


def training_flops(config: NetworkConfig, rows: int, length: int) -> int:
    """Operations of the model in a step on (B, N) tokens: forward, and twice that for the gradients."""
    return 3 * network_cost(step_point(config, rows, length), config).flops


def step_point(config: NetworkConfig, rows: int, length: int, device: str = "cpu", precision: str = "32") -> Point:
    """The forward pass of a step, as `lin_attn.scaling` names it; precision as Lightning's trainer does."""
    return Point(
        mechanism="linear" if config.attention == "linear" else "softmax-flash",
        backend="auto" if config.attention == "linear" else "flash",
        level="model",
        phase="forward",
        device=device,
        dtype=PRECISIONS[precision.partition("-")[0]],
        batch=rows,
        heads=config.n_heads,
        head_dim=config.d_model // config.n_heads,
        length=length,
    )


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: by torch's allocator on a GPU, else resident, of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _timer(trainer: Trainer) -> FetchTimer | None:
    profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler if isinstance(profiler, FetchTimer) else None


def _fetched(trainer: Trainer) -> float:
    timer = _timer(trainer)
    return 0.0 if timer is None else timer.seconds
