"""Continuing prompts token by token from the state of the tokens before: one step costs the same at every length."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.sampling import check_sampling, sample

if TYPE_CHECKING:
    from models.causal_lm import CausalLM


@torch.no_grad()
def stream(
    model: "CausalLM",
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
    """The next tokens of each row; see `CausalLM.stream`."""
    check_sampling(temperature, top_k, top_p)
    if tokens.shape[1] == 0:
        raise ValueError("tokens has length 0; wanted a prompt of at least one token, such as the document end")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; wanted a number ≥ 0")
    if key_mask is not None:
        _check_padding(model, key_mask)
    generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
    stopped = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    was_training, state = model.training, None
    # A vocabulary may be larger than the tokenizer's, to be a round number: what has no text is not drawn.
    known = model.network_config.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    model.eval()
    try:
        for _ in range(max_new_tokens):
            hidden, state = model.network(tokens, key_mask, state)
            logits = model.network.head(hidden[:, -1])[:, :known]
            token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            if stop_token is not None:
                token = token.masked_fill(stopped, stop_token)
                stopped |= token == stop_token
            yield token
            if stop_token is not None and bool(stopped.all()):
                return
            tokens, key_mask = token[:, None], None
    finally:
        model.train(was_training)


def _check_padding(model: "CausalLM", key_mask: Tensor) -> None:
    if not key_mask[:, -1].all():
        raise ValueError("key_mask hides the last token of a prompt; wanted padding on the left")
    if model.network_config.rotates_features and model.network_config.rope == "before":
        raise ValueError(
            "key_mask is given and network.rope is 'before': its weights depend on the positions themselves, which "
            "padding moves; wanted prompts of one length"
        )
