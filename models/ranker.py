"""Ranking of pairs of texts: (A, B) above (A, C), as in CAIL2019-SCM (Xiao et al. 2019, arXiv 1911.08962).

    P((A, B) above (A, C)) = σ(s(A, B) − s(A, C)),   loss = −log of it      (RankNet, Burges et al. 2005, eqs. 1–3)

One network scores each pair, read as one sequence whose texts are told apart by token types; to exchange the pairs is
to change the difference's sign, and so there is nothing to learn about which comes first.

Letters: B batch, N length.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import OptimizerConfig, as_config
from models.encoder import EncoderConfig
from models.loss import exact_dtype
from models.metrics import AccuracyMetric
from models.pooled import PooledEncoder, Pooler, Pooling
from models.training import Batch, TrainedModel

if TYPE_CHECKING:
    Network = EncoderConfig | Mapping[str, Any]
    Optimizer = OptimizerConfig | Mapping[str, Any]
else:  # as in models/causal_lm.py
    Network, Optimizer = EncoderConfig, OptimizerConfig


class PairRanker(TrainedModel):
    """Scores pairs of texts such that the pair that belongs above another gets the higher score.

    A batch is a dict of first_tokens (B, N) and second_tokens (B, N′), int64: the pair that belongs above, (A, B), and
    the one below, (A, C); first_mask and second_mask, bool, True where the token is real, if any is padding;
    first_types and second_types, int64, if the network has token types. Lengths may differ.

    Figures: loss, and accuracy, the share of examples whose first pair has the higher score.

    Args:
        network: the encoder: an EncoderConfig or a dict of its fields.
        optimizer: AdamW and its schedule: an OptimizerConfig or a dict of its fields.
        pooling: what of the hidden states is scored: the first real token's, or the mean over real tokens.
        pooler: activation of a layer before the score, tanh in BERT and gelu in RoFormer; none for no such layer.

    Raises:
        ValueError: for a field that is unknown, out of range, or without effect.
    """

    network_config: EncoderConfig
    body = "network.encoder"
    judged_by = ()
    token_keys = ("first_tokens", "second_tokens")

    def __init__(
        self,
        network: Network = EncoderConfig(),
        optimizer: Optimizer = OptimizerConfig(),
        pooling: Pooling = "first",
        pooler: Pooler = "tanh",
    ) -> None:
        super().__init__(as_config(EncoderConfig, network, "network"), optimizer, pooling=pooling, pooler=pooler)
        self.network = PooledEncoder(self.network_config, 1, pooling, pooler)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """Scores of pairs, each one sequence.

        Args:
            tokens: (B, N) int64.
            key_mask: (B, N) bool, True where the token is real, False where it is padding.
            token_types: (B, N) int64, less than network.n_token_types; all 0 by default.

        Returns:
            (B,).

        Raises:
            ValueError: for tokens or token_types that are no (B, N) integers, or types that the network has not.
        """
        scores: Tensor = self.network(tokens, key_mask, token_types)[:, 0]
        return scores

    def margins(self, batch: Batch) -> Tensor:
        """s(A, B) − s(A, C) of each example, (B,) float32."""
        first, second = (
            self(batch[f"{which}_tokens"], batch.get(f"{which}_mask"), batch.get(f"{which}_types"))
            for which in ("first", "second")
        )
        margins: Tensor = first.float() - second.float()
        return margins

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the examples' losses in nats and their number."""
        losses = ranking_losses(self.margins(batch))
        return losses.sum(), torch.tensor(len(losses), device=losses.device)

    def new_metric(self, stage: str) -> AccuracyMetric:
        """Loss and accuracy."""
        return AccuracyMetric()

    def evaluate(self, batch: Batch, metric: AccuracyMetric) -> None:
        """Adds the batch's examples."""
        margins = self.margins(batch)
        metric.update(ranking_losses(margins).sum(), len(margins), (margins > 0).sum())

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """The difference of the two scores, margins (B,): positive where the first pair belongs above."""
        return {"margins": self.margins(batch)}


def ranking_losses(margins: Tensor) -> Tensor:
    """−log σ(margins), (B,) in nats, float64 where the device has that."""
    return -F.logsigmoid(margins).to(exact_dtype(margins.device))
