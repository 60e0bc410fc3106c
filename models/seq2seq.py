"""An encoder-decoder as a Lightning module: training with label smoothing, evaluation by BLEU, decoding.

The paper's system (RoFormer, arXiv 2104.09864, §4.1) is Transformer-base (Vaswani et al. 2017, arXiv 1706.03762) with
RoPE: label smoothing 0.1, beams of 4, length penalty 0.6, the last 5 checkpoints averaged (models/averaging.py).

Letters: B batch, N source length, M target length.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.text import SacreBLEUScore

from lin_attn.data.blocks import IGNORED
from models.beam_search import Decoded, beam_search, greedy_search
from models.config import OptimizerConfig, as_config
from models.embedding import check_tokens
from models.encoder_decoder import EncoderDecoder, Seq2SeqConfig, TranslationState, check_fits
from models.loss import cross_entropy_sum, exact_dtype, token_scores
from models.metrics import TokenMetric
from models.training import Batch, TrainedModel

if TYPE_CHECKING:
    Network = Seq2SeqConfig | Mapping[str, Any]
    Optimizer = OptimizerConfig | Mapping[str, Any]
else:  # as in models/causal_lm.py
    Network, Optimizer = Seq2SeqConfig, OptimizerConfig

BLEUTokenize = Literal["13a", "zh", "char", "none"]
MOST_BEYOND_SOURCE = 50  # a target is cut where it is so many tokens longer than its source (Vaswani et al., §6.1)


class Seq2Seq(TrainedModel):
    """Translates a source into a target.

    A batch is a dict of source (B, N) int64; target (B, M) int64, begin token, text, end token; source_mask (B, N) and
    target_mask (B, M) bool, True where the token is real, if any is padding. Targets are padded on the right.

    Figures: loss, perplexity and accuracy of the target's tokens, without smoothing; and bleu, SacreBLEU in percent of
    what is decoded: greedily in validation, in test with the beam. It is taken on texts where the data has a tokenizer,
    and else on the tokens as words.

    Args:
        network: encoder and decoder: a Seq2SeqConfig or a dict of its fields.
        optimizer: AdamW and its schedule: an OptimizerConfig or a dict of its fields.
        begin_token: what every target begins with; by default the byte tokenizer's document end.
        end_token: what every target ends with; may be the begin token.
        label_smoothing: ε in [0, 1): a target is worth 1 − ε, and every token of the vocabulary ε/V.
        beam_size: hypotheses a source, in test and predict.
        length_penalty: α of the beam's length penalty.
        bleu_tokenize: how SacreBLEU cuts texts into words: 13a, zh, char or none.

    Raises:
        ValueError: for a field that is unknown, out of range, or without effect.
    """

    network_config: Seq2SeqConfig
    token_keys = ("source", "target")
    judged_by = ()

    def __init__(
        self,
        network: Network = Seq2SeqConfig(),
        optimizer: Optimizer = OptimizerConfig(),
        begin_token: int = 256,
        end_token: int = 256,
        label_smoothing: float = 0.0,
        beam_size: int = 4,
        length_penalty: float = 0.6,
        bleu_tokenize: BLEUTokenize = "13a",
    ) -> None:
        config = as_config(Seq2SeqConfig, network, "network")
        for name, token in (("begin_token", begin_token), ("end_token", end_token)):
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"{name} is {token}; wanted a token below network.vocab_size, {config.vocab_size}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}; wanted a number in [0, 1)")
        if beam_size < 1:
            raise ValueError(f"beam_size is {beam_size}; wanted at least 1")
        if not length_penalty >= 0:
            raise ValueError(f"length_penalty is {length_penalty}; wanted a number ≥ 0, 0 for none")
        if bleu_tokenize not in get_args(BLEUTokenize):
            raise ValueError(f"bleu_tokenize is {bleu_tokenize!r}; wanted one of {', '.join(get_args(BLEUTokenize))}")
        super().__init__(
            config,
            optimizer,
            begin_token=begin_token,
            end_token=end_token,
            label_smoothing=label_smoothing,
            beam_size=beam_size,
            length_penalty=length_penalty,
            bleu_tokenize=bleu_tokenize,
        )
        self.begin_token, self.end_token, self.label_smoothing = begin_token, end_token, label_smoothing
        self.beam_size, self.length_penalty, self.bleu_tokenize = beam_size, length_penalty, bleu_tokenize
        self.network = EncoderDecoder(config)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of the token after each token of the target.

        Args:
            source: (B, N) int64.
            target: (B, M) int64.
            source_mask: (B, N) bool, True where the token is real, False where it is padding.
            target_mask: (B, M) bool, as source_mask.

        Returns:
            (B, M, vocab_size).

        Raises:
            ValueError: for tokens that are no integers of two axes and one batch size, or masks that do not fit.
        """
        logits: Tensor = self.network.decoder.logits(self._hidden(source, target, source_mask, target_mask))
        return logits

    def generate(
        self,
        source: Tensor,
        source_mask: Tensor | None = None,
        *,
        beam_size: int = 1,
        length_penalty: float = 0.0,
        max_new_tokens: int | None = None,
    ) -> Decoded:
        """Decodes targets from the source, token by token on a state.

        Args:
            source: (B, N) int64.
            source_mask: (B, N) bool, True where the token is real.
            beam_size: hypotheses a source; 1 takes the likeliest token each time.
            length_penalty: α ≥ 0 of the beam's scores.
            max_new_tokens: where targets are cut; by default at N + 50.

        Returns:
            tokens (B, n) int64, without the begin token, rows filled up with end tokens; and scores (B,).

        Raises:
            ValueError: for an argument out of range, or a length penalty that one hypothesis would ignore.
        """
        check_tokens(source, "source")
        check_fits("source_mask", source_mask, source)
        if beam_size == 1 and length_penalty != 0:
            raise ValueError(
                f"length_penalty is {length_penalty} with beam_size 1, where nothing competes; leave it out"
            )
        longest = source.shape[1] + MOST_BEYOND_SOURCE if max_new_tokens is None else max_new_tokens
        if max_new_tokens is None and self.network_config.max_length is not None:
            longest = min(longest, self.network_config.max_length)
        # A vocabulary may be larger than the tokenizer's, to be a round number: what has no text is not decoded.
        known = self.network_config.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size

        def step(tokens: Tensor, state: TranslationState) -> tuple[Tensor, TranslationState]:
            hidden, state = self.network(tokens[:, None], None, state)
            logits = self.network.decoder.logits(hidden[:, -1])[:, :known]
            return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1), state

        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                state = self.network.read(source, source_mask)
                begin = source.new_full((len(source),), self.begin_token)
                if beam_size == 1:
                    return greedy_search(step, state, begin, self.end_token, longest)
                return beam_search(
                    step, state, begin, self.end_token, longest, beam_size=beam_size, alpha=length_penalty
                )
        finally:
            self.train(was_training)

    # Training and evaluation

    def setup(self, stage: str) -> None:
        """See TrainedModel.setup; sources need embeddings too, and targets end with the tokenizer's end token."""
        super().setup(stage)
        source = getattr(getattr(self.trainer, "datamodule", None), "source_tokenizer", None)
        known = self.network_config.source_vocab_size or self.network_config.vocab_size
        if source is not None and source.vocab_size > known:
            raise ValueError(
                f"network.source_vocab_size is {known}; wanted at least the tokenizer's {source.vocab_size}"
            )
        if self.tokenizer is not None and self.tokenizer.end_id != self.end_token:
            raise ValueError(f"end_token is {self.end_token}; wanted the tokenizer's {self.tokenizer.end_id}")

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The smoothed sum of negative log-likelihoods in nats and the number of target tokens."""
        hidden, targets = self._predicted(batch)
        weight = self.network.head.weight
        loss = cross_entropy_sum(hidden, weight, targets, label_smoothing=self.label_smoothing)
        return loss, (targets != IGNORED).sum()

    def new_metric(self, stage: str) -> MetricCollection:
        """Loss, perplexity and accuracy of tokens; BLEU of what is decoded."""
        tokenize = self.bleu_tokenize if self.tokenizer is not None else "none"
        return MetricCollection({"tokens": TokenMetric(), "bleu": PercentBLEU(tokenize=tokenize)})

    def evaluate(self, batch: Batch, metric: MetricCollection) -> None:
        """Adds the batch's tokens and texts."""
        hidden, targets = self._predicted(batch)
        nll, hits = token_scores(hidden, self.network.head.weight, targets)
        found = self._searched(batch, self.beam_size if self.trainer.testing else 1)
        metric.update(
            total=nll.to(exact_dtype(nll.device)).sum(),
            count=(targets != IGNORED).sum(),
            hits=hits.sum(),
            preds=self.texts(found.tokens),
            target=[[text] for text in self.texts(batch["target"][:, 1:])],
        )

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """What the beam finds: tokens (B, n), scores (B,), and texts."""
        found = self._searched(batch, self.beam_size)
        return {"tokens": found.tokens, "scores": found.scores, "texts": self.texts(found.tokens)}

    def texts(self, tokens: Tensor) -> list[str]:
        """The text of each row up to its end token; without a tokenizer its tokens as words."""
        texts = []
        for row in tokens.tolist():
            row = row[: row.index(self.end_token)] if self.end_token in row else row
            if self.tokenizer is None:
                texts.append(" ".join(map(str, row)))
            else:
                texts.append(self.tokenizer.decode(row).decode("utf-8", "replace"))
        return texts

    def _searched(self, batch: Batch, beam_size: int) -> Decoded:
        """Targets of the batch's sources."""
        options = {"beam_size": beam_size, "length_penalty": self.length_penalty} if beam_size > 1 else {}
        return self.generate(batch["source"], batch.get("source_mask"), **options)  # type: ignore[arg-type]

    def _predicted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states (T, E) of all places of the target but its last, and the tokens after them (T,)."""
        target, mask = batch["target"], batch.get("target_mask")
        check_tokens(target, "target")
        if not (target[:, 0] == self.begin_token).all():
            raise ValueError(
                f"target begins with {target[:, 0].tolist()}; wanted begin_token, {self.begin_token}, and padding on "
                "the right"
            )
        known = None if mask is None else mask[:, :-1]
        hidden = self._hidden(batch["source"], target[:, :-1], batch.get("source_mask"), known)
        targets = target[:, 1:] if mask is None else target[:, 1:].masked_fill(~mask[:, 1:], IGNORED)
        return hidden.flatten(0, 1), targets.flatten()

    def _hidden(self, source: Tensor, target: Tensor, source_mask: Tensor | None, target_mask: Tensor | None) -> Tensor:
        """(B, M, E)."""
        check_tokens(source, "source")
        check_tokens(target, "target")
        check_fits("source_mask", source_mask, source)
        check_fits("target_mask", target_mask, target)
        if len(source) != len(target):
            raise ValueError(f"target has {len(target)} rows; wanted {len(source)}, one a source")
        hidden: Tensor
        hidden, _ = self.network(target, target_mask, self.network.read(source, source_mask))
        return hidden


class PercentBLEU(SacreBLEUScore):
    """SacreBLEU (Post 2018, arXiv 1804.08771) from 0 to 100, as papers give it."""

    def compute(self) -> Tensor:
        """The score of all texts that were added."""
        return 100 * super().compute()
