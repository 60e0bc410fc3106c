"""Continuing prompts token by token from the state of the tokens before.

With linear attention a step costs the same at every length, in memory that does not grow. A row of a batch is continued
as it would be alone: padding on the left changes no position, and each row has random numbers of its own.

Letters: B batch, N length, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.embedding import check_tokens
from models.sampling import check_sampling, penalized, sample

if TYPE_CHECKING:
    from models.causal_lm import CausalLM
    from models.config import NetworkConfig
    from models.decoder import DecoderState

READ = 4096  # tokens of a prompt that are read at once
Seed = int | Sequence[int] | None


def stream(
    model: "CausalLM",
    tokens: Tensor,
    max_new_tokens: int,
    *,
    key_mask: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_token: int | None = None,
    seed: Seed = None,
) -> Iterator[Tensor]:
    """The next tokens of each row; see `CausalLM.stream`."""
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens is a {type(tokens).__name__}; wanted a tensor (B, N), or `complete` for texts")
    check_tokens(tokens, "tokens")
    check_sampling(temperature, top_k, top_p, repetition_penalty)
    rows, length = tokens.shape
    if length == 0:
        raise ValueError("tokens has length 0; wanted a prompt of at least one token, such as the document end")
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; wanted a whole number ≥ 0")
    config = model.network_config
    least, most = (int(tokens.min()), int(tokens.max())) if rows else (0, 0)
    if least < 0 or most >= config.vocab_size:
        raise ValueError(f"tokens are from {least} to {most}; wanted 0 to {config.vocab_size - 1}")
    if config.max_length is not None and length + max_new_tokens - 1 > config.max_length:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens} after a prompt of {length}; wanted at most "
            f"{max(config.max_length - length + 1, 0)}, for network.max_length is {config.max_length}"
        )
    if key_mask is not None:
        _check_padding(config, tokens, key_mask)
        key_mask = None if bool(key_mask.all()) else key_mask
    generators = None if seed is None else _generators(seeds_of(seed, rows), tokens.device)
    # A vocabulary may be larger than the tokenizer's, to be a round number: what has no text is not drawn.
    known = config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    if stop_token is not None and not 0 <= stop_token < known:
        raise ValueError(f"stop_token is {stop_token}; wanted a token, 0 to {known - 1}, or None")

    @torch.no_grad()
    def steps() -> Iterator[Tensor]:
        if max_new_tokens == 0:
            return
        seen = None if repetition_penalty == 1 else _seen(tokens, key_mask, known, stop_token)
        stopped = torch.zeros(rows, dtype=torch.bool, device=tokens.device)
        hidden, state = read(model, tokens, key_mask)
        for step in range(max_new_tokens):
            logits = model.network.logits(hidden)[:, :known]
            if seen is not None:
                logits = penalized(logits, seen, repetition_penalty)
            token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generators)
            if stop_token is not None:
                token = token.masked_fill(stopped, stop_token)
                stopped |= token == stop_token
            if seen is not None:
                seen.scatter_(1, token[:, None], token[:, None] != stop_token if stop_token is not None else True)
            yield token
            if step + 1 == max_new_tokens or (stop_token is not None and bool(stopped.all())):
                return
            outputs, state = model.network(token[:, None], None, state)
            hidden = outputs[:, -1]

    def evaluated() -> Iterator[Tensor]:
        drawn, modules = steps(), list(model.modules())  # to find them takes longer than to ask them
        while True:
            with in_evaluation_mode(modules):  # for a step alone: a stream may be left, or stand beside another
                token = next(drawn, None)
            if token is None:
                return
            yield token

    return evaluated()


def read(model: "CausalLM", tokens: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, "DecoderState"]:
    """The last hidden states (B, E) of prompts (B, N) and the state after them.

    A long prompt is read in pieces with the state carried: what is kept of one are its sums, not its activations.
    """
    size = block_of(model.network_config, READ)
    state: DecoderState | None = None
    for start in range(0, tokens.shape[1], size):
        part = slice(start, start + size)
        hidden, state = model.network(tokens[:, part], None if key_mask is None else key_mask[:, part], state)
    assert state is not None
    return hidden[:, -1], state


def block_of(config: "NetworkConfig", size: int) -> int:
    """The block length nearest to size, at least one, that may be cut anywhere: with segments, whole segments."""
    segment = config.segment_length
    return size if segment is None else max(size // segment, 1) * segment


def takes_left_padding(config: "NetworkConfig") -> bool:
    """Whether prompts of unequal length can be continued in one batch.

    With rope before the feature map weights depend on the positions themselves, and with segments on where these begin;
    padding on the left moves both.
    """
    before = config.rotates_features and config.rope == "before"
    return not before and config.segment_length is None


def _check_padding(config: "NetworkConfig", tokens: Tensor, key_mask: Tensor) -> None:
    if key_mask.shape != tokens.shape or key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask is {key_mask.dtype} of shape {tuple(key_mask.shape)}; wanted bool of shape {tuple(tokens.shape)}"
        )
    if not key_mask[:, -1].all():
        raise ValueError("key_mask hides the last token of a prompt; wanted padding on the left")
    if takes_left_padding(config) or bool(key_mask.all()):
        return
    if config.segment_length is not None:
        raise ValueError(
            f"key_mask is given and network.segment_length is {config.segment_length}: padding moves where segments "
            "begin; wanted prompts of one length"
        )
    raise ValueError(
        "key_mask is given and network.rope is 'before': its weights depend on the positions themselves, which "
        "padding moves; wanted prompts of one length"
    )


def seeds_of(seed: int | Iterable[int], rows: int, what: str = "row") -> list[int]:
    """One a row: the number that is given, or the numbers.

    Raises:
        ValueError: if they are no numbers that a generator takes, or not one a row.
    """
    if not isinstance(seed, Integral | Iterable):
        raise ValueError(f"seed is {seed!r}; wanted an integer, or one a {what}")
    seeds = [seed] * rows if isinstance(seed, Integral) else list(seed)
    if len(seeds) != rows:
        raise ValueError(f"seed has {len(seeds)} entries; wanted one number, or one a {what}, {rows}")
    for one in seeds:
        if not isinstance(one, Integral) or not -(2**63) <= int(one) < 2**63:
            raise ValueError(f"seed is {one!r}; wanted an integer of at most 64 bits")
    return [int(one) for one in seeds]


def _generators(seeds: list[int], device: torch.device) -> list[torch.Generator]:
    """One a row, so that what a row draws does not depend on the others."""
    return [torch.Generator(device).manual_seed(one) for one in seeds]


def _seen(tokens: Tensor, key_mask: Tensor | None, known: int, stop_token: int | None) -> Tensor:
    """(B, V) bool: the tokens of each prompt, but for padding and for the stop token: to end is no repetition."""
    real = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask
    real = real & (tokens < known)
    counts = torch.zeros(tokens.shape[0], known, dtype=torch.int32, device=tokens.device)
    seen = counts.scatter_add_(1, tokens.clamp(max=known - 1), real.int()) > 0
    if stop_token is not None:
        seen[:, stop_token] = False
    return seen


@contextmanager
def in_evaluation_mode(model: nn.Module | Iterable[nn.Module]) -> Iterator[None]:
    """Without dropout, a model or the modules that are given; the mode that each was in comes back."""
    modules = model.modules() if isinstance(model, nn.Module) else model
    in_training = [module for module in modules if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
