"""A causal language model as a Lightning module: training, evaluation and use around a Decoder."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from lin_attn.data.blocks import IGNORED
from models.completion import complete, stream_text
from models.config import NetworkConfig, OptimizerConfig, as_config
from models.decoder import Decoder, DecoderState
from models.embedding import check_tokens
from models.generation import stream
from models.loss import cross_entropy_sum, token_nll
from models.metrics import LanguageModelMetric
from models.padding import Text
from models.scoring import BATCH_SIZE, BLOCK_LENGTH, bits_per_byte
from models.training import Batch, TrainedModel

if TYPE_CHECKING:
    Network = NetworkConfig | Mapping[str, Any]
    Optimizer = OptimizerConfig | Mapping[str, Any]
else:  # the command line takes its fields, their types and help from here: of a union it could not set one by one
    Network, Optimizer = NetworkConfig, OptimizerConfig


class CausalLM(TrainedModel):
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

    can_be_sharded = True
    judged_by = ("targets", "n_bytes")

    def __init__(
        self,
        network: Network = NetworkConfig(),
        optimizer: Optimizer = OptimizerConfig(),
        activation_checkpointing: bool = False,
        torch_compile: bool = False,
    ) -> None:
        super().__init__(as_config(NetworkConfig, network, "network"), optimizer)
        self.activation_checkpointing, self.torch_compile = activation_checkpointing, torch_compile
        self.network = Decoder(self.network_config)

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
        check_tokens(tokens, "tokens")
        hidden, state = self.network(tokens, key_mask, state)
        logits = self.network.logits(hidden)
        return (logits, state) if return_state else logits

    # Training and evaluation

    def loss_sum(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of negative log-likelihoods in nats and the number of targets."""
        hidden, _ = self.network(batch["tokens"])
        targets = batch["targets"].flatten()
        nll = cross_entropy_sum(hidden.flatten(0, 1), self.network.head.weight, targets, self.network.head.bias)
        return nll, (targets != IGNORED).sum()

    def new_metric(self, stage: str) -> LanguageModelMetric:
        """Loss, perplexity and bits per byte over all tokens."""
        return LanguageModelMetric()

    def evaluate(self, batch: Batch, metric: LanguageModelMetric) -> None:
        """Adds the batch's tokens and bytes."""
        nll, count = self.loss_sum(batch)
        metric.update(nll, count, batch["n_bytes"].sum())

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        """−log p of each target, nll (B, N) in nats, beside the batch's targets and start."""
        hidden, _ = self.network(batch["tokens"])
        head = self.network.head
        nll = token_nll(hidden.flatten(0, 1), head.weight, batch["targets"].flatten(), head.bias)
        return {"nll": nll.view_as(batch["targets"]), "targets": batch["targets"], "start": batch["start"]}

    def source_of(self, batch: Batch) -> str:
        """The documents that a batch is from."""
        names = getattr(getattr(self.trainer, "datamodule", None), "document_names", None)
        if names is None:
            return "text of unnamed documents"
        length = batch["targets"].shape[1]
        found = dict.fromkeys(name for start in batch["start"].tolist() for name in names("train", start, length))
        return f"text of {', '.join(found)}"

    # Use

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Continues prompts of tokens; `complete` continues texts.

        Args:
            tokens: prompts, (B, N) int64, N ≥ 1.
            max_new_tokens: how many tokens to add at most.
            **options: of `stream`.

        Returns:
            (B, N + new) int64: prompts and continuations. After its stop_token a row repeats it.

        Raises:
            ValueError: for an argument out of range.
        """
        drawn = self.stream(tokens, max_new_tokens, **options)
        return torch.cat([tokens, *(new[:, None] for new in drawn)], dim=1)

    def stream(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        key_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_token: int | None = None,
        seed: int | Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Continues prompts token by token, in memory that does not grow with linear attention.

        A row of a batch is continued as it would be alone.

        Args:
            tokens: prompts, (B, N) int64, N ≥ 1.
            max_new_tokens: how many tokens to add at most.
            key_mask: (B, N) bool, True where the token is real; pad shorter prompts on the left.
            temperature: 0 takes the likeliest token.
            top_k: draw from the k likeliest only.
            top_p: draw from the likeliest that together reach this probability only.
            repetition_penalty: makes tokens of the prompt and those drawn already less likely, where it is above 1
                (Keskar et al. 2019, arXiv 1909.05858, §4.1). The stop_token is left as it is.
            stop_token: end when every row has drawn it; after it, a row repeats it.
            seed: of the draws: one number, with which each row draws as it would alone, so that equal prompts are
                continued alike; or one a row. None takes torch's global generator.

        Returns:
            An iterator over the next token of each row, (B,) int64.

        Raises:
            ValueError: for an argument out of range, or padding that the network's positions do not allow.
        """
        return stream(
            self,
            tokens,
            max_new_tokens,
            key_mask=key_mask,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            stop_token=stop_token,
            seed=seed,
        )

    @overload
    def complete(self, texts: Text, max_new_tokens: int, **options: Any) -> str: ...

    @overload
    def complete(self, texts: Sequence[Text], max_new_tokens: int, **options: Any) -> list[str]: ...

    def complete(self, texts: Text | Sequence[Text], max_new_tokens: int, **options: Any) -> str | list[str]:
        """Continues texts, as the beginnings of documents.

        Args:
            texts: one, or a list.
            max_new_tokens: how many tokens to add to each at most. A text ends before that where its document does.
            **options: of `stream` but key_mask and stop_token, with one seed or one a text, and
                stop: a list of texts; the continuation ends before the first of them.
                on_text: called with a text's place in the list and what is added to it, as it is drawn.
                batch_size: how many texts are continued together; 32 by default.

        Returns:
            The continuation, without the text itself; or a list of them, in the order of the texts. Bytes that are no
            UTF-8 are replacement characters.

        Raises:
            ValueError: for an argument out of range, or a model without a tokenizer.
        """
        if isinstance(texts, str | bytes):
            return complete(self, [texts], max_new_tokens, **options)[0]
        return complete(self, texts, max_new_tokens, **options)

    def stream_text(self, text: Text, max_new_tokens: int, **options: Any) -> Iterator[str]:
        """Continues a text, piece by piece: an iterator over what `complete` would put together.

        Args:
            text: the beginning of a document.
            max_new_tokens: how many tokens to add at most.
            **options: of `complete` but on_text and batch_size.

        Raises:
            ValueError: as `complete`.
        """
        return stream_text(self, text, max_new_tokens, **options)

    def score(
        self,
        texts: Sequence[Text],
        *,
        with_end: bool = True,
        batch_size: int = BATCH_SIZE,
        block_length: int = BLOCK_LENGTH,
    ) -> list[float]:
        """Bits per byte of each text.

        Args:
            texts: of any length. A long one is read in blocks with the state carried; with softmax attention that
                state, the keys and values of all tokens before, grows with the text.
            with_end: each is a whole document, whose end is to be foretold too, as in training; False for a part.
            batch_size: how many are read at once. It changes no figure.
            block_length: how many tokens of each. It changes no figure.

        Returns:
            One number a text; NaN for one without bytes.

        Raises:
            ValueError: for an argument out of range, or a model without a tokenizer.
        """
        return bits_per_byte(self, texts, with_end=with_end, batch_size=batch_size, block_length=block_length)
