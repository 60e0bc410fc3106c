"""Classification and regression of a text or a pair of texts (BERT, Devlin et al. 2019, arXiv 1810.04805, §4.1).

    loss = −log softmax(outputs)[label] of C ≥ 2 classes,   (output − label)² of one output

A pair is one sequence, its texts told apart by token types.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

from models.config import OptimizerConfig, as_config
from models.encoder import EncoderConfig
from models.encoder_use import TextEncoder
from models.loss import exact_dtype
from models.metrics import MeanLoss
from models.pooled import PooledEncoder, Pooler, Pooling
from models.training import Batch, TrainedModel

if TYPE_CHECKING:
    Network = EncoderConfig | Mapping[str, Any]
    Optimizer = OptimizerConfig | Mapping[str, Any]
else:  # as in models/causal_lm.py
    Network, Optimizer = EncoderConfig, OptimizerConfig


class SequenceClassifier(TextEncoder, TrainedModel):
    """Gives a text, or a pair of texts, a class or a number.

    A batch is a dict of tokens (B, N) int64; labels (B,), int64 in 0 … n_classes − 1, or floating point for one class;
    key_mask (B, N) bool, True where the token is real, if any is padding; token_types (B, N) int64, if the network has
    types.

    Figures: loss, and accuracy and F1 for classes (F1 of class 1 where there are two, else the mean over classes), or
    Pearson's and Spearman's correlations for a number.

    Args:
        network: the encoder: an EncoderConfig or a dict of its fields.
        optimizer: AdamW and its schedule: an OptimizerConfig or a dict of its fields.
        n_classes: number of classes; 1 for regression.
        pooling: what of the hidden states is classified: the first real token's, or the mean over real tokens.
        pooler: activation of a layer before the classes, tanh in BERT and gelu in RoFormer; none for no such layer.

    Raises:
        ValueError: for a field that is unknown, out of range, or without effect.
    """

    network_config: EncoderConfig
    body = "network.encoder"
    judged_by = ("labels",)

    def __init__(
        self,
        network: Network = EncoderConfig(),
        optimizer: Optimizer = OptimizerConfig(),
        n_classes: int = 2,
        pooling: Pooling = "first",
        pooler: Pooler = "tanh",
    ) -> None:
        if n_classes < 1:
            raise ValueError(f"n_classes is {n_classes}; wanted at least 2, or 1 for regression")
        options = {"n_classes": n_classes, "pooling": pooling, "pooler": pooler}
        super().__init__(as_config(EncoderConfig, network, "network"), optimizer, **options)
        self.n_classes = n_classes
        self.network = PooledEncoder(self.network_config, n_classes, pooling, pooler)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """Scores of the classes before softmax, or the number.

        Args:
            tokens: (B, N) int64.
            key_mask: (B, N) bool, True where the token is real, False where it is padding.
            token_types: (B, N) int64, less than network.n_token_types; all 0 by default.

        Returns:
            (B, n_classes).

        Raises:
            ValueError: for tokens or token_types that are no (B, N) integers, or types that the network has not.
        """
        outputs: Tensor = self.network(tokens, key_mask, token_types)
        return outputs

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the examples' losses and their number."""
        losses = example_losses(self._outputs(batch), self._labels(batch))
        return losses.sum(), torch.tensor(len(losses), device=losses.device)

    def new_metric(self, stage: str) -> MetricCollection:
        """The figures of the task."""
        figures: dict[str, Metric | MetricCollection] = {"loss": MeanLoss(example_losses)}
        if self.n_classes == 1:
            figures |= {"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef()}
        else:
            two, n = self.n_classes == 2, self.n_classes
            figures["accuracy"] = MulticlassAccuracy(n, average="micro")
            figures["f1"] = BinaryF1Score() if two else MulticlassF1Score(n, average="macro")
        return MetricCollection(figures)

    def evaluate(self, batch: Batch, metric: MetricCollection) -> None:
        """Adds the batch's examples."""
        outputs, labels = self._outputs(batch).float(), self._labels(batch)
        if len(labels) == 0:  # a process that had none left; some metrics fail at that
            return
        predicted = outputs[:, 0] if self.n_classes == 1 else outputs.argmax(-1)
        metric.update(outputs=outputs, labels=labels, preds=predicted, target=labels)

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """outputs (B, n_classes) and predicted (B,): the likeliest class, or the number."""
        outputs = self._outputs(batch).float()
        return {"outputs": outputs, "predicted": outputs[:, 0] if self.n_classes == 1 else outputs.argmax(-1)}

    def _outputs(self, batch: Batch) -> Tensor:
        outputs: Tensor = self(batch["tokens"], batch.get("key_mask"), batch.get("token_types"))
        return outputs

    def _labels(self, batch: Batch) -> Tensor:
        """The labels, checked: a wrong one would be told by no name on the CPU, and by a crash on a GPU."""
        labels = batch["labels"]
        floating = labels.is_floating_point()
        if labels.dim() != 1 or floating != (self.n_classes == 1):
            wanted = "floating point" if self.n_classes == 1 else "integers"
            raise ValueError(f"labels is {labels.dtype} of shape {tuple(labels.shape)}; wanted {wanted} (B,)")
        if floating:
            return labels.float()
        if len(labels) and (labels.min() < 0 or labels.max() >= self.n_classes):
            raise ValueError(
                f"labels go from {labels.min()} to {labels.max()}; wanted 0 to n_classes − 1 = {self.n_classes - 1}"
            )
        return labels


def example_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of outputs (B, C) in nats, or the squared error where C is 1: (B,), float64 where there is that."""
    outputs = outputs.float()
    losses = (outputs[:, 0] - labels).square() if outputs.shape[1] == 1 else F.cross_entropy(
        outputs, labels, reduction="none"
    )  # fmt: skip
    return losses.to(exact_dtype(losses.device))
