"""What the Lightning modules of the zoo share: steps, clipping, schedule, evaluation, and what a checkpoint carries.

A model is a subclass that says what a batch costs (`loss_sum`) and how it is judged (`new_metric`, `evaluate`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lin_attn.data.tokenizer import Tokenizer, tokenizer_from_dict
from models.config import NetworkConfig, OptimizerConfig, as_config, as_plain
from models.optimization import build_optimizer, build_schedule
from models.parallel import arrange
from models.random_state import random_states, set_random_state
from models.saving import Shareable
from models.step_loss import StepLoss

Batch = dict[str, Tensor]
Metrics = Metric | MetricCollection


class TrainedModel(Shareable, LightningModule):
    """A network, its optimizer, and the tokenizer that its data came with.

    Args:
        network_config: of the network; a dataclass of plain values.
        optimizer: an OptimizerConfig or a dict of its fields.
        **options: the model's other arguments, plain values, which go into its checkpoints.

    Attributes:
        tokenizer: taken over from the data module or a checkpoint; None before.
        token_keys: the entries of a batch that are tokens, for counting how many are seen.
        judged_by: the entries that a batch has besides, to be judged by; predict does without them.
        not_judged_by: entries that tell of a batch that was made for other models.
        body: the part of it that other models may have too, under a name of their own.
        can_be_sharded: whether all its parameters are in `network`, for FSDP2.
    """

    token_keys: tuple[str, ...] = ("tokens",)
    judged_by: tuple[str, ...] = ("targets",)
    not_judged_by: tuple[str, ...] = ()
    body: str = "network"
    can_be_sharded: bool = False

    def __init__(
        self, network_config: NetworkConfig, optimizer: OptimizerConfig | Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__()
        self.network_config = network_config
        self.optimizer_config = as_config(OptimizerConfig, optimizer, "optimizer")
        plain = {"network": as_plain(network_config), "optimizer": as_plain(self.optimizer_config)}
        self.save_hyperparameters(plain | options)
        self.tokenizer: Tokenizer | None = None
        self.activation_checkpointing = self.torch_compile = False  # how it is run, not what it is
        self._arranged = False
        self._step = StepLoss()
        self._resumed: dict[str, Any] = {}
        self._metrics = nn.ModuleList()  # of the stage that runs, one for each of its data loaders

    # What a model says

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The training loss, summed over so many targets or examples: two scalars."""
        raise NotImplementedError

    def new_metric(self, stage: str) -> Metrics:
        """What adds up a stage's batches; its `compute` gives a dict of figures by name. stage is val or test."""
        raise NotImplementedError

    def evaluate(self, batch: Batch, metric: Any) -> None:
        """Adds a batch to the metric."""
        raise NotImplementedError

    def source_of(self, batch: Batch) -> str:
        """Where a batch is from, for the message about one that cannot be trained on."""
        return f"a batch of {len(next(iter(batch.values())))}"

    # Training

    def setup(self, stage: str) -> None:
        """Takes the tokenizer over from the data module and checks that its tokens have embeddings."""
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is not None:
            self.tokenizer = tokenizer
            if tokenizer.vocab_size > self.network_config.vocab_size:
                raise ValueError(
                    f"network.vocab_size is {self.network_config.vocab_size}; "
                    f"wanted at least the tokenizer's {tokenizer.vocab_size}"
                )

    def configure_model(self) -> None:
        """Arranges the network as it is to be run.

        Raises:
            ValueError: for a strategy that splits tensors, or averaged weights of a sharded model.
        """
        if self._arranged or self._trainer is None:  # load_from_checkpoint asks too; a run will ask again
            return
        averaging = [one for one in self.trainer.callbacks if isinstance(one, WeightAveraging)]  # type: ignore[attr-defined]
        if self.device_mesh is not None and averaging:
            raise ValueError(
                f"{type(averaging[0]).__name__} is among trainer.callbacks and the model is sharded, which Lightning's "
                "WeightAveraging does not support; wanted one of them, or trainer.strategy=ddp"
            )
        if self.device_mesh is not None and not self.can_be_sharded:
            raise ValueError(f"trainer.strategy shards a {type(self).__name__}; wanted a CausalLM for that, or ddp")
        options = {"activation_checkpointing": self.activation_checkpointing, "torch_compile": self.torch_compile}
        assert isinstance(self.network, nn.Module)
        arrange(self.network, mesh=self.device_mesh, **options)
        self._arranged = True

    def on_fit_start(self) -> None:
        """Says what is trained."""
        config, parameters = self.network_config, sum(parameter.numel() for parameter in self.parameters())
        position = f"rope {config.rope} the feature map" if config.rotates_features else config.position
        rank_zero_info(
            f"{type(self).__name__}: {config.attention} attention, positions: {position}; {config.n_layers} layers, "
            f"{config.d_model} wide, {parameters:,} parameters; precision {self.trainer.precision}"
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """What to differentiate: the batch's part in the step's mean loss (see `models.step_loss`)."""
        self._check_batch(batch)
        self._latest = batch
        total, count = self.loss_sum(batch)
        if not torch.isfinite(total):
            raise FloatingPointError(
                f"the loss is {total.item() / max(count.item(), 1)} at step {self.global_step}, on "
                f"{self.source_of(batch)}; a lower optimizer.lr or optimizer.clip may help"
            )
        return self._step.add(total, count)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the gradient that of the mean over the step's targets or examples, logs that mean, and clips.

        It clips here since Lightning's own clipping refuses fused optimizers under mixed precision.
        """
        self.log("train/loss", self._step.finish(self.parameters(), self._shares).float(), prog_bar=True)
        if self.optimizer_config.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.optimizer_config.clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            # Under float16 the scaler expects gradients that overflow now and then, and skips their step.
            if self.trainer.precision != "16-mixed" and not torch.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient's norm is {norm.item()} at step {self.global_step}, on "
                    f"{self.source_of(self._latest)}; a lower optimizer.lr may help"
                )
            self.log("train/grad_norm", norm)

    @property
    def _shares(self) -> int:
        """By what the trainer divides a step's gradient: its batches and the processes."""
        return int(self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def configure_optimizers(self) -> Any:
        """AdamW and its schedule, which goes on with every step.

        Raises:
            ValueError: if neither optimizer.max_steps nor the trainer's max_steps says where the schedule ends.
        """
        max_steps = self.optimizer_config.max_steps or self.trainer.max_steps
        if max_steps < 1 and self.optimizer_config.has_end:
            raise ValueError(
                "optimizer.max_steps is null and trainer.max_steps is not set; "
                "wanted one of them, for the learning rate's schedule to know its end"
            )
        # A fused optimizer takes its gradients still scaled under fp16, where they could not be clipped.
        fused = None if self.trainer.precision != "16-mixed" else False
        optimizer = build_optimizer(self, self.optimizer_config, fused=fused)
        schedule = build_schedule(optimizer, self.optimizer_config, max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # Evaluation

    def on_validation_epoch_start(self) -> None:
        """Opens the validation figures."""
        self._open_metrics("val", self.trainer.val_dataloaders)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds the batch to the validation figures of its data loader."""
        self._check_batch(batch)
        self.evaluate(batch, self._metrics[dataloader_idx])

    def on_validation_epoch_end(self) -> None:
        """Logs the validation figures, val/…, over all batches."""
        self._log_metrics("val")

    def on_test_epoch_start(self) -> None:
        """Opens the test figures."""
        self._open_metrics("test", self.trainer.test_dataloaders)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds the batch to the test figures of its data loader."""
        self._check_batch(batch)
        self.evaluate(batch, self._metrics[dataloader_idx])

    def on_test_epoch_end(self) -> None:
        """Logs the test figures, test/…, over all batches."""
        self._log_metrics("test")

    def _open_metrics(self, stage: str, loaders: Any) -> None:
        # New ones each time: those of an evaluation in inference mode could not be added to outside of it.
        count = len(loaders) if isinstance(loaders, list | tuple) else 1
        self._metrics = nn.ModuleList(self.new_metric(stage).to(self.device) for _ in range(count))

    def _log_metrics(self, stage: str) -> None:
        """The first data loader's figures by their names, those of further ones under the names the data module has."""
        names = getattr(getattr(self.trainer, "datamodule", None), f"{stage}_names", None)
        for i, metric in enumerate(self._metrics):
            assert isinstance(metric, Metrics)
            which = "" if i == 0 else f"{names[i] if names else i}/"
            self.log_dict({f"{stage}/{which}{name}": value for name, value in metric.compute().items()}, prog_bar=True)
        self._metrics = nn.ModuleList()

    def on_predict_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Refuses data for other models, as the steps do."""
        self._check_batch(batch)

    def _check_batch(self, batch: Batch) -> None:
        """Raises ValueError for a batch that was made for other models."""
        wanted = (*self.token_keys, *(() if self.trainer.predicting else self.judged_by))
        if not set(wanted) <= set(batch) or set(self.not_judged_by) & set(batch):
            without = f" and no {', '.join(self.not_judged_by)}" if self.not_judged_by else ""
            module = getattr(self.trainer, "datamodule", None)
            data = "of a data loader" if module is None else f"a {type(module).__name__}"
            raise ValueError(
                f"data is {data}, whose batches have {', '.join(batch)}; wanted data for a {type(self).__name__}: "
                f"batches of {', '.join(wanted)}{without}"
            )

    # Checkpoints

    def on_train_start(self) -> None:
        """Goes on where the checkpoint that is resumed stopped: in its step, and with its random numbers."""
        resumed, self._resumed = self._resumed, {}
        self._step = StepLoss()
        if self.trainer.ckpt_path is None:  # its weights alone were loaded, to begin with
            return
        if "step" in resumed:
            self._step.load_state_dict(resumed["step"], self, self._shares, self.device)
        states = resumed.get("random_states", [])
        if len(states) == self.trainer.world_size:
            set_random_state(states[self.global_rank], self.device)
        elif states:
            rank_zero_info(
                f"the checkpoint is of {len(states)} processes, here are {self.trainer.world_size}: dropout goes on "
                "with other random numbers"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint carries its class's name, its tokenizer, random states, and an unfinished step's gradients."""
        checkpoint["model_class"] = type(self).__name__
        checkpoint["random_states"] = random_states(self.device)
        if self._step.batches:
            checkpoint["step"] = self._step.state_dict(self, self._shares)
        if self.tokenizer is not None:
            checkpoint["tokenizer"] = self.tokenizer.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the tokenizer up; the rest waits for training to go on."""
        self._resumed = {name: checkpoint[name] for name in ("random_states", "step") if name in checkpoint}
        if "tokenizer" in checkpoint:
            saved = tokenizer_from_dict(checkpoint["tokenizer"])
            if self.tokenizer is not None and self.tokenizer.fingerprint != saved.fingerprint:
                raise ValueError(
                    f"data.tokenizer is {self.tokenizer.fingerprint}, and the checkpoint is of {saved.fingerprint}; "
                    "wanted the same: give the checkpoint as data.tokenizer, and the text is read with what it carries"
                )
            self.tokenizer = saved
