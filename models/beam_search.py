"""Decoding a target: greedy, and beam search with length penalty (Wu et al. 2016, arXiv 1609.08144, §7).

    score(Y) = log P(Y) / lp(Y),   lp(Y) = ((5 + |Y|) / 6)^α          |Y| counts the end token, not the begin token

At each step a hypothesis that ends among the beam's K best extensions is finished, and the K best that do not end go
on. A source is done when K hypotheses have finished, or none that goes on can come to a better score: log P only falls
and lp only grows, so log P / lp(longest) is the best that one may hope for.

What is searched is given as a function, step(tokens, state) → (log-probabilities, state), with a state of which rows
can be selected; this file knows no model.

Letters: B batch of sources, K beam size, V vocabulary, M most new tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor


class Selectable(Protocol):
    """A state with a row a sequence."""

    def select(self, rows: Tensor) -> Any:
        """The state of the sequences of some rows, (R,) int64."""


State = TypeVar("State", bound=Selectable)
Step = Callable[[Tensor, State], tuple[Tensor, State]]  # tokens (R,) int64 → log-probabilities (R, V) of the next ones


class Decoded(NamedTuple):
    """Targets that were found.

    Attributes:
        tokens: (B, n) int64, n ≤ M, without the begin token; after its end token a row repeats it.
        scores: (B,), log P(Y) / lp(Y).
    """

    tokens: Tensor
    scores: Tensor


def length_penalty(length: int, alpha: float) -> float:
    """lp of a target of so many tokens; 1 for α = 0."""
    return float(((5 + length) / 6) ** alpha)


def greedy_search(step: Step[State], state: State, begin: Tensor, end_token: int, max_new_tokens: int) -> Decoded:
    """Takes the likeliest token, until every target has ended.

    Args:
        step: see above.
        state: of the B sources.
        begin: (B,) int64, what each target is begun with.
        end_token: ends a target.
        max_new_tokens: M, at least 1; a target is cut there.

    Returns:
        The targets, with log P as their scores.

    Raises:
        ValueError: if max_new_tokens is less than 1.
    """
    _check_length(max_new_tokens)
    token, ended = begin, torch.zeros_like(begin, dtype=torch.bool)
    tokens: list[Tensor] = []
    scores: Tensor | None = None
    for _ in range(max_new_tokens):
        logprobs, state = step(token, state)
        best, token = logprobs.max(-1)
        token = token.masked_fill(ended, end_token)
        best = best.masked_fill(ended, 0)
        scores = best if scores is None else scores + best
        tokens.append(token)
        ended = ended | (token == end_token)
        if bool(ended.all()):
            break
    assert scores is not None
    return Decoded(torch.stack(tokens, dim=1), scores)


def beam_search(
    step: Step[State],
    state: State,
    begin: Tensor,
    end_token: int,
    max_new_tokens: int,
    *,
    beam_size: int,
    alpha: float = 0.0,
) -> Decoded:
    """The best target that a beam finds for each source; one that is cut at M counts only if none has ended.

    Args:
        step: see above; it is called with B · K rows, a source's K hypotheses side by side.
        state: of the B sources.
        begin: (B,) int64, what each target is begun with.
        end_token: ends a target.
        max_new_tokens: M, at least 1.
        beam_size: K, at least 1.
        alpha: α ≥ 0, the exponent of the length penalty; 0 for none.

    Returns:
        The targets and their scores.

    Raises:
        ValueError: for an argument out of range, or a vocabulary of less than two tokens.
    """
    _check_length(max_new_tokens)
    if beam_size < 1:
        raise ValueError(f"beam_size is {beam_size}; wanted at least 1")
    if not alpha >= 0:
        raise ValueError(f"length_penalty is {alpha}; wanted a number ≥ 0, 0 for none")
    B, K, device = len(begin), beam_size, begin.device
    first = torch.arange(B, device=device)[:, None] * K  # row of each source's first hypothesis
    state = state.select(torch.arange(B, device=device).repeat_interleave(K))
    token = begin.repeat_interleave(K)
    alive_tokens = begin.new_empty(B, K, 0)
    best_tokens = begin.new_full((B, max_new_tokens), end_token)
    done, n_finished = torch.zeros_like(begin, dtype=torch.bool), torch.zeros_like(begin)
    alive, best = torch.empty(0), torch.empty(0)
    for length in range(1, max_new_tokens + 1):
        logprobs, state = step(token, state)
        V = logprobs.shape[-1]
        if V < 2:
            raise ValueError(f"the vocabulary has {V} token; wanted at least 2, the end token and another")
        if length == 1:  # K hypotheses that are all alike: the first stands for them
            alive = logprobs.new_full((B, K), float("-inf"))
            alive[:, 0] = 0
            best = logprobs.new_full((B,), float("-inf"))
        # Each hypothesis has one extension that ends: of the 2K best ones at least K go on.
        values, places = (alive[..., None] + logprobs.view(B, K, V)).flatten(1).topk(2 * K)
        origin, extension = places // V, places % V
        ends = extension == end_token
        extended = torch.cat((alive_tokens.gather(1, origin[..., None].expand(-1, -1, length - 1)),
                              extension[..., None]), dim=-1)  # fmt: skip

        finished = (ends & (values > float("-inf")))[:, :K]
        n_finished = n_finished + finished.sum(1)
        scores = values[:, :K].masked_fill(~finished, float("-inf")) / length_penalty(length, alpha)
        score, which = scores.max(1)
        better = (score > best) & ~done
        best = torch.where(better, score, best)
        found = extended[torch.arange(B, device=device), which]
        best_tokens[:, :length] = torch.where(better[:, None], found, best_tokens[:, :length])

        kept = ends.int().argsort(dim=1, stable=True)[:, :K]  # those that go on, the best first
        alive = values.gather(1, kept).masked_fill(ends.gather(1, kept), float("-inf"))
        alive_tokens = extended.gather(1, kept[..., None].expand(-1, -1, length))
        token = alive_tokens[..., -1].flatten()
        state = state.select((first + origin.gather(1, kept)).flatten())
        hope = alive[:, 0] / length_penalty(max_new_tokens, alpha)
        done = done | (n_finished >= K) | (best >= hope)
        if bool(done.all()):
            break
    cut = best == float("-inf")
    length = alive_tokens.shape[-1]
    best_tokens[:, :length] = torch.where(cut[:, None], alive_tokens[:, 0], best_tokens[:, :length])
    best = torch.where(cut, alive[:, 0] / length_penalty(length, alpha), best)
    return Decoded(best_tokens[:, : _longest(best_tokens, end_token)], best)


def _longest(tokens: Tensor, end_token: int) -> int:
    """The length of the longest target, its end token included."""
    before = (tokens == end_token).int().cumsum(1) == 0
    return min(int(before.sum(1).max()) + 1, tokens.shape[1]) if len(tokens) else 0


def _check_length(max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; wanted at least 1")
