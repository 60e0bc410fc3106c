"""What a run shows and writes while it goes on."""

import csv
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, TQDMProgressBar
from torch import Tensor

from lin_attn.data.blocks import IGNORED


class RunProgressBar(TQDMProgressBar):
    """One training bar over all steps of the run, not one an epoch, so that its time left is the run's."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Opens the bar at the step that the run goes on from."""
        super().on_train_start()
        bar = self.train_progress_bar
        bar.set_description("Training")
        bar.total = _steps_of(trainer)
        bar.initial = bar.n = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """The bar goes on."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Shows the step and the latest figures."""
        bar = self.train_progress_bar
        if trainer.global_step > bar.n and self._should_update(trainer.global_step, bar.total or 0):
            bar.update(trainer.global_step - bar.n)
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The figures without the run's version number."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}


def _steps_of(trainer: Trainer) -> int | None:
    """All steps of the run, if it has an end."""
    if trainer.max_steps > 0:
        return trainer.max_steps
    batches = trainer.num_training_batches
    if not trainer.max_epochs or trainer.max_epochs < 0 or batches == float("inf"):
        return None
    return math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs


class ExampleWriter(BasePredictionWriter):
    """`predict` writes predictions.csv: a row an example, a column an entry of what the model predicts."""

    def __init__(self) -> None:
        super().__init__(write_interval="batch")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the table."""
        if trainer.world_size > 1:
            raise ValueError(f"predict runs on {trainer.world_size} processes; wanted one, trainer.devices=1")
        self._path = Path(trainer.log_dir or trainer.default_root_dir) / "predictions.csv"
        os.makedirs(self._path.parent, exist_ok=True)
        self._file = self._path.open("w", newline="")
        self._rows, self._count = csv.writer(self._file), 0

    def write_on_batch_end(self, trainer: Trainer, pl_module: LightningModule, prediction: Any, *_: Any) -> None:
        """Adds the batch's examples; what is a row of numbers is written with spaces between."""
        if self._count == 0:
            self._rows.writerow(["example", *prediction])
        columns = [x.tolist() if isinstance(x, Tensor) else x for x in prediction.values()]
        for row in zip(*columns, strict=True):
            self._rows.writerow([self._count, *(" ".join(map(str, x)) if isinstance(x, list) else x for x in row)])
            self._count += 1

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the table."""
        self._file.close()
        print(f"predictions of {self._count} examples: {self._path}")  # noqa: T201


class PredictionWriter(BasePredictionWriter):
    """`predict` writes predictions.csv for a language model: a row a document, with its targets, bytes and bits."""

    def __init__(self) -> None:
        super().__init__(write_interval="batch")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the sums over documents."""
        if trainer.world_size > 1:
            raise ValueError(f"predict runs on {trainer.world_size} processes; wanted one, trainer.devices=1")
        self._store = trainer.datamodule.stores["test"]  # type: ignore[attr-defined]
        self._bits = np.zeros(self._store.n_documents)
        self._targets = np.zeros(self._store.n_documents, dtype=np.int64)
        self._n_bytes = np.zeros(self._store.n_documents, dtype=np.int64)
        self._token_bytes = trainer.datamodule.tokenizer.token_bytes  # type: ignore[attr-defined]

    def write_on_batch_end(self, trainer: Trainer, pl_module: LightningModule, prediction: Any, *_: Any) -> None:
        """Adds each target's bits to its document."""
        nll, targets, start = (prediction[name].cpu() for name in ("nll", "targets", "start"))
        places = start[:, None] + torch.arange(targets.shape[1])
        real = targets != IGNORED
        documents = np.searchsorted(self._store.column("start"), places[real].numpy(), side="right") - 1
        np.add.at(self._bits, documents, nll[real].double().numpy() / math.log(2))
        np.add.at(self._targets, documents, 1)
        ranges = zip(start.tolist(), real.sum(dim=1).tolist(), strict=True)
        n_bytes = [self._store.byte_counts(first, first + n, self._token_bytes) for first, n in ranges]
        np.add.at(self._n_bytes, documents, np.concatenate(n_bytes))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the table."""
        path = Path(trainer.log_dir or trainer.default_root_dir) / "predictions.csv"
        os.makedirs(path.parent, exist_ok=True)
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["document", "targets", "n_bytes", "bits", "bits_per_byte"])
            columns = self._store.names(), self._targets, self._n_bytes, self._bits
            for name, targets, n_bytes, bits in zip(*columns, strict=True):
                if n_bytes:
                    rows.writerow([name, targets, n_bytes, f"{bits:.3f}", f"{bits / n_bytes:.4f}"])
        print(f"bits per byte of {np.count_nonzero(self._n_bytes)} documents: {path}")  # noqa: T201
