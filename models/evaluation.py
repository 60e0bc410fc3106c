"""Loss, perplexity and bits per byte of a language model on a text, against the length of what it sees at once.

Three ways to read a text of T targets at length N:

blocks    the text in blocks of N tokens, each begun anew, as in training. A target has (N + 1)/2 tokens before it on
          average.
windows   blocks of N that advance by a stride S, of each of which only the last S targets count (the first counts
          whole): a target has at least N − S tokens before it, and N/S times the work is done.
carried   blocks of N, each begun with the state after the one before: a target has the whole text before it, or what
          there is since its context began, where a context is given. What is measured is what the model makes of a
          state that is older than the blocks it was trained on. With linear attention the state has one size; with
          softmax it is the keys and values of all tokens before.

Sums are of float64 over counts in int64.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from lin_attn.data.blocks import IGNORED
from lin_attn.data.store import TokenStore
from models.causal_lm import CausalLM
from models.decoder import DecoderState
from models.generation import in_evaluation_mode
from models.loss import cross_entropy_sum
from models.metrics import LanguageModelMetric
from models.state_size import state_size

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Reading:
    """How a text is read.

    Args:
        length: N, tokens a block.
        stride: S, of windows; None for blocks.
        carry_state: begin each block with the state after the one before.
        context: with carry_state, begin anew after so many tokens, a multiple of the length; None for never.

    Raises:
        ValueError: for an argument out of range, or one that has no effect beside the others.
    """

    length: int
    stride: int | None = None
    carry_state: bool = False
    context: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length is {self.length}; wanted at least 1")
        if self.stride is not None and not 1 <= self.stride <= self.length:
            raise ValueError(f"stride is {self.stride} with length {self.length}; wanted 1 to the length")
        if self.stride is not None and self.carry_state:
            raise ValueError("stride and carry_state are both given; wanted one: a carried state has seen all before")
        if self.context is not None and not self.carry_state:
            raise ValueError(f"context is {self.context} without carry_state; wanted both, or a length of that size")
        if self.context is not None and (self.context < self.length or self.context % self.length):
            raise ValueError(f"context is {self.context} with length {self.length}; wanted a multiple of the length")

    @property
    def sees(self) -> int | None:
        """The most tokens that are seen at once; None where there is no end."""
        return self.context if self.carry_state else self.length


class Window(NamedTuple):
    """Inputs start … stop − 1 of a token stream, whose targets from the index first to stop count."""

    start: int
    stop: int
    first: int


class Figures(NamedTuple):
    """What an evaluation gives.

    Attributes:
        length: N.
        loss: nats per token.
        perplexity: exp(loss).
        bits_per_byte: total bits over total bytes.
        n_tokens: targets, the ends of documents included.
        n_bytes: bytes that they stand for.
        seconds: of wall time.
        state_bytes: the largest state that was carried; None where none was.
    """

    length: int
    loss: float
    perplexity: float
    bits_per_byte: float
    n_tokens: int
    n_bytes: int
    seconds: float
    state_bytes: int | None


def evaluate(
    model: CausalLM,
    store: TokenStore,
    reading: Reading,
    *,
    max_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    precision: Precision = "32-true",
    progress: Callable[[int], object] = lambda n: None,
) -> Figures:
    """Evaluates a model on a token store.

    Args:
        model: with the tokenizer that the store was made with.
        store: the text.
        reading: how it is read.
        max_tokens: only so many targets, from the beginning; all by default.
        batch_tokens: tokens in a batch of blocks or windows. A carried state goes from block to block, one at a time.
        precision: bf16-mixed multiplies in bfloat16 and keeps all else in the weights' dtype; 32-true computes in the
            weights' dtype, and so does bf16-true, which wants a model of bfloat16 weights.
        progress: called with the number of targets of each batch.

    Returns:
        The figures.

    Raises:
        ValueError: for an argument out of range, too long a reading for learned positions, a store without targets, or
            a state that grows without end.
    """
    check_reading(model, reading)
    if precision not in get_args(Precision):
        raise ValueError(f"precision is {precision!r}; wanted one of {', '.join(get_args(Precision))}")
    if (precision == "bf16-true") != (next(model.parameters()).dtype == torch.bfloat16):
        raise ValueError(f"precision is {precision} and the weights are {next(model.parameters()).dtype}")
    for name, value in (("max_tokens", max_tokens), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; wanted at least 1")
    n_targets = min(len(store) - 1, len(store) if max_tokens is None else max_tokens)
    if n_targets < 1:
        raise ValueError("the text has no token to foretell; wanted some text")
    assert model.tokenizer is not None
    token_bytes = model.tokenizer.token_bytes
    metric, largest, state, began = LanguageModelMetric(), 0, None, time.perf_counter()
    rows = 1 if reading.carry_state else max(batch_tokens // reading.length, 1)
    with in_evaluation_mode(model), torch.inference_mode(), _autocast(model, precision):
        for batch in _groups(windows(n_targets, reading.length, reading.stride), rows):
            if not reading.carry_state or (reading.context and batch[0].start % reading.context == 0):
                state = None
            tokens, targets = (x.to(model.device) for x in read_windows(store, batch))
            nll, state = _nll(model, tokens, targets, state)
            n_bytes = sum(
                int(store.byte_counts(one.first, one.stop + 1, token_bytes).sum(dtype=np.int64)) for one in batch
            )
            count = int((targets != IGNORED).sum())
            metric.update(nll.cpu(), count, n_bytes)
            largest = max(largest, state.nbytes) if reading.carry_state else 0
            progress(count)
    found = {name: value.item() for name, value in metric.compute().items()}
    return Figures(
        reading.length,
        **found,
        n_tokens=int(metric.count),
        n_bytes=int(metric.n_bytes),
        seconds=time.perf_counter() - began,
        state_bytes=largest if reading.carry_state else None,
    )


def windows(n_targets: int, length: int, stride: int | None = None) -> Iterator[Window]:
    """Windows in which each of the targets 1 … n_targets of a stream counts once; blocks, where the stride is None."""
    counted = 0
    for start in range(0, n_targets, stride or length):
        stop = min(start + length, n_targets)
        yield Window(start, stop, counted + 1)
        counted = stop
        if stop == n_targets:
            return


def read_windows(store: TokenStore, batch: list[Window]) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, N) int64 of windows; IGNORED where a target does not count or is past the end."""
    length = max(one.stop - one.start for one in batch)
    tokens = np.zeros((len(batch), length), dtype=np.int64)
    targets = np.full((len(batch), length), IGNORED, dtype=np.int64)
    for row, one in enumerate(batch):
        stream = store.tokens(one.start, one.stop + 1)
        n, before = one.stop - one.start, one.first - one.start - 1
        tokens[row, :n], targets[row, before:n] = stream[:-1], stream[before + 1 :]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def check_reading(model: CausalLM, reading: Reading) -> None:
    """Raises ValueError where the model has no positions that far, or a state that would grow over the whole text."""
    config = model.network_config
    if config.max_length is not None and (reading.sees is None or reading.sees > config.max_length):
        sees = "a context without end" if reading.sees is None else f"{reading.sees} tokens at once"
        raise ValueError(f"the model has {config.max_length} learned positions; wanted no more, came {sees}")
    if reading.carry_state and reading.context is None and (more := state_size(model).per_token):
        raise ValueError(
            f"carry_state is given and the state of network.attention {config.attention} grows by {more:,} bytes a "
            "token; wanted a context, after which it begins anew, or windows: a stride without carry_state"
        )


def _nll(model: CausalLM, tokens: Tensor, targets: Tensor, state: DecoderState | None) -> tuple[Tensor, DecoderState]:
    hidden, state = model.network(tokens, None, state)
    head = model.network.head
    return cross_entropy_sum(hidden.flatten(0, 1), head.weight, targets.flatten(), head.bias), state


def _autocast(model: CausalLM, precision: Precision) -> AbstractContextManager[Any]:
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def _groups(found: Iterator[Window], size: int) -> Iterator[list[Window]]:
    return iter(lambda: list(islice(found, size)), [])
