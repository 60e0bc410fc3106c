"""A causal language model as a Lightning module: training, evaluation and generation around a Decoder."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lin_attn.data.blocks import IGNORED
from lin_attn.data.tokenizer import Tokenizer, tokenizer_from_dict
from models.config import NetworkConfig, OptimizerConfig, as_config, as_plain
from models.decoder import Decoder, DecoderState
from models.generation import stream
from models.loss import cross_entropy_sum, token_nll
from models.metrics import LanguageModelMetric
from models.optimization import build_optimizer, build_schedule
from models.parallel import arrange
from models.random_state import random_states, set_random_state
from models.step_loss import StepLoss

Batch = dict[str, Tensor]
if TYPE_CHECKING:
    Network = NetworkConfig | Mapping[str, Any]
    Optimizer = OptimizerConfig | Mapping[str, Any]
else:  # the command line takes its fields, their types and help from here: of a union it could not set one by one
    Network, Optimizer = NetworkConfig, OptimizerConfig


class CausalLM(LightningModule):
    """Predicts each token from those before it.

    A batch is a dict of tokens (B, N) int64, targets (B, N) int64 (−100 for none), n_bytes (B,) int64, the bytes that
    the targets stand for, and start (B,) int64, where in its corpus the block's targets begin.

    Args:
        network: the decoder: a NetworkConfig or a dict of its fields.
        optimizer: AdamW and its schedule: an OptimizerConfig or a dict of its fields.
        activation_checkpointing: compute each block once more in backward, in place of keeping its activations.
        torch_compile: compile the network's blocks; the first steps take longer.

    Raises:
        ValueError: for a field that is unknown, out of range, or without effect.
    """

    def __init__(
        self,
        network: Network = NetworkConfig(),
        optimizer: Optimizer = OptimizerConfig(),
        activation_checkpointing: bool = False,
        torch_compile: bool = False,
    ) -> None:
        super().__init__()
        self.network_config = as_config(NetworkConfig, network, "network")
        self.optimizer_config = as_config(OptimizerConfig, optimizer, "optimizer")
        self.save_hyperparameters(
            {"network": as_plain(self.network_config), "optimizer": as_plain(self.optimizer_config)}
        )
        self.network = Decoder(self.network_config)
        self.activation_checkpointing, self.torch_compile = activation_checkpointing, torch_compile
        self.tokenizer: Tokenizer | None = None
        self._arranged = False
        self._step = StepLoss()
        self._resumed: dict[str, Any] = {}
        self.val_metric, self.test_metric = LanguageModelMetric(), LanguageModelMetric()

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        state: DecoderState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Logits of the token after each token.

        Args:
            tokens: (B, N) int64.
            key_mask: (B, N) bool, True where the token is real, False where it is padding.
            state: what an earlier call returned for the tokens before these.
            return_state: return the state after these tokens as well.

        Returns:
            (B, N, vocab_size), or that and a DecoderState.

        Raises:
            ValueError: if tokens are no (B, N) integers.
        """
        self._check_tokens(tokens)
        hidden, state = self.network(tokens, key_mask, state)
        logits = self.network.head(hidden)
        return (logits, state) if return_state else logits

    # Training and evaluation

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
        options = {"activation_checkpointing": self.activation_checkpointing, "torch_compile": self.torch_compile}
        arrange(self.network, mesh=self.device_mesh, **options)
        self._arranged = True

    def on_fit_start(self) -> None:
        """Says what is trained."""
        config, parameters = self.network_config, sum(parameter.numel() for parameter in self.parameters())
        position = f"rope {config.rope} the feature map" if config.rotates_features else config.position
        rank_zero_info(
            f"CausalLM: {config.attention} attention, positions: {position}; {config.n_layers} layers, "
            f"{config.d_model} wide, {parameters:,} parameters; precision {self.trainer.precision}"
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """What to differentiate: the batch's part in the step's mean loss (see `models.step_loss`)."""
        self._latest = batch
        nll, count = self._nll(batch)
        if not torch.isfinite(nll):
            raise FloatingPointError(
                f"the loss is {nll.item() / max(count.item(), 1)} at step {self.global_step}, on text of "
                f"{self._documents(batch)}; a lower optimizer.lr or optimizer.clip may help"
            )
        return self._step.add(nll, count)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the gradient that of the mean over the step's targets, logs that mean, and clips.

        It clips here since Lightning's own clipping refuses fused optimizers under mixed precision.
        """
        self.log("train/loss", self._step.finish(self.parameters(), self._shares).float(), prog_bar=True)
        if self.optimizer_config.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.optimizer_config.clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            # Under float16 the scaler expects gradients that overflow now and then, and skips their step.
            if self.trainer.precision != "16-mixed" and not torch.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient's norm is {norm.item()} at step {self.global_step}, on text of "
                    f"{self._documents(self._latest)}; a lower optimizer.lr may help"
                )
            self.log("train/grad_norm", norm)

    @property
    def _shares(self) -> int:
        """By what the trainer divides a step's gradient: its batches and the processes."""
        return int(self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the batch to the validation figures."""
        self._evaluate(batch, self.val_metric)

    def on_validation_epoch_end(self) -> None:
        """Logs val/loss, val/perplexity and val/bits_per_byte over all validation tokens."""
        self._log_metric("val", self.val_metric)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the batch to the test figures."""
        self._evaluate(batch, self.test_metric)

    def on_test_epoch_end(self) -> None:
        """Logs test/loss, test/perplexity and test/bits_per_byte over all test tokens."""
        self._log_metric("test", self.test_metric)

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """−log p of each target, nll (B, N) in nats, beside the batch's targets and start."""
        hidden, _ = self.network(batch["tokens"])
        nll = token_nll(hidden.flatten(0, 1), self.network.head.weight, batch["targets"].flatten())
        return {"nll": nll.view_as(batch["targets"]), "targets": batch["targets"], "start": batch["start"]}

    def configure_optimizers(self) -> Any:
        """AdamW and its schedule, which goes on with every step.

        Raises:
            ValueError: if neither optimizer.max_steps nor the trainer's max_steps says where the schedule ends.
        """
        max_steps = self.optimizer_config.max_steps or self.trainer.max_steps
        if max_steps < 1:
            raise ValueError(
                "optimizer.max_steps is null and trainer.max_steps is not set; "
                "wanted one of them, for the learning rate's schedule to know its end"
            )
        # A fused optimizer takes its gradients still scaled under fp16, where they could not be clipped.
        fused = None if self.trainer.precision != "16-mixed" else False
        optimizer = build_optimizer(self, self.optimizer_config, fused=fused)
        schedule = build_schedule(optimizer, self.optimizer_config, max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

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
        """A checkpoint carries its tokenizer, the random numbers' states, and the gradients of an unfinished step."""
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

    def _nll(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of negative log-likelihoods and the number of targets."""
        hidden, _ = self.network(batch["tokens"])
        targets = batch["targets"].flatten()
        nll = cross_entropy_sum(hidden.flatten(0, 1), self.network.head.weight, targets)
        return nll, (targets != IGNORED).sum()

    def _evaluate(self, batch: Batch, metric: LanguageModelMetric) -> None:
        nll, count = self._nll(batch)
        metric.update(nll, count, batch["n_bytes"].sum())

    def _log_metric(self, stage: str, metric: LanguageModelMetric) -> None:
        self.log_dict({f"{stage}/{name}": value for name, value in metric.compute().items()}, prog_bar=True)
        metric.reset()

    def _documents(self, batch: Batch) -> str:
        names = getattr(getattr(self.trainer, "datamodule", None), "document_names", None)
        if names is None:
            return "unnamed documents"
        length = batch["targets"].shape[1]
        found = dict.fromkeys(name for start in batch["start"].tolist() for name in names("train", start, length))
        return ", ".join(found)

    # Generation

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Continues prompts.

        Args:
            tokens: prompts, (B, N) int64, N ≥ 1.
            max_new_tokens: how many tokens to add at most.
            **options: of `stream`.

        Returns:
            (B, N + new) int64: prompts and continuations. After its stop_token a row repeats it.

        Raises:
            ValueError: for an argument out of range.
        """
        return torch.cat([tokens, *(new[:, None] for new in self.stream(tokens, max_new_tokens, **options))], dim=1)

    def stream(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        key_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token: int | None = None,
        seed: int | None = None,
    ) -> Iterator[Tensor]:
        """Continues prompts token by token, in memory that does not grow with linear attention.

        Args:
            tokens: prompts, (B, N) int64, N ≥ 1.
            max_new_tokens: how many tokens to add at most.
            key_mask: (B, N) bool, True where the token is real; pad shorter prompts on the left.
            temperature: 0 takes the likeliest token.
            top_k: draw from the k likeliest only.
            top_p: draw from the likeliest that together reach this probability only.
            stop_token: end when every row has drawn it; after it, a row repeats it.
            seed: of the draws; None takes torch's global generator.

        Returns:
            An iterator over the next token of each row, (B,) int64.

        Raises:
            ValueError: for an argument out of range.
        """
        self._check_tokens(tokens)
        return stream(
            self,
            tokens,
            max_new_tokens,
            key_mask=key_mask,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token=stop_token,
            seed=seed,
        )

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"tokens is {tokens.dtype} of shape {tuple(tokens.shape)}; wanted integers (B, N)")
