"""How likely texts are: −log p of their tokens, each given those before it.

A document is scored as it was trained on: after the end token of the document before, and with the end that follows it.

    bits per byte = Σ_t −log₂ p(token_t | tokens before it) / bytes of the text

A long text is read in blocks with the state carried. That state has one size with linear attention; with softmax it is
the keys and values of all tokens before, and grows with the text.

Letters: B batch, N length.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lin_attn.data.blocks import IGNORED
from lin_attn.data.tokenizer import Tokens, as_bytes
from models.generation import block_of, in_evaluation_mode
from models.loss import exact_dtype, token_scores
from models.padding import Text, batches, pad, text_list, tokenizer_of

if TYPE_CHECKING:
    from models.causal_lm import CausalLM

BATCH_SIZE = 16
BLOCK_LENGTH = 2048


class Score(NamedTuple):
    """How likely some tokens are.

    Attributes:
        nats: Σ −log p, a sum in float64.
        n_tokens: of how many.
        greedy: whether each is the likeliest in its place.
    """

    nats: float
    n_tokens: int
    greedy: bool

    def bits_per_byte(self, n_bytes: int) -> float:
        """The bits over the bytes that the tokens stand for; NaN where there are none."""
        return self.nats / math.log(2) / n_bytes if n_bytes else math.nan


def score_texts(
    model: "CausalLM",
    texts: Sequence[Text],
    *,
    with_end: bool = True,
    batch_size: int = BATCH_SIZE,
    block_length: int = BLOCK_LENGTH,
) -> list[Score]:
    """The score of each text as a document; the arguments are those of `CausalLM.score`."""
    texts = text_list(texts)
    tokenizer = tokenizer_of(model)
    end = [tokenizer.end_id]
    rows = [np.concatenate([end, tokenizer.encode(text), end if with_end else []]).astype(np.int64) for text in texts]
    return score_tokens(model, [(row, 1) for row in rows], batch_size=batch_size, block_length=block_length)


def bits_per_byte(model: "CausalLM", texts: Sequence[Text], **options: Any) -> list[float]:
    """See `CausalLM.score`."""
    texts = text_list(texts)
    scores = score_texts(model, texts, **options)
    return [score.bits_per_byte(len(as_bytes(text))) for score, text in zip(scores, texts, strict=True)]


def score_tokens(
    model: "CausalLM",
    sequences: Sequence[tuple[Tokens, int]],
    *,
    batch_size: int = BATCH_SIZE,
    block_length: int = BLOCK_LENGTH,
) -> list[Score]:
    """The scores of the ends of sequences, given their beginnings.

    Args:
        model: what scores them.
        sequences: tokens (n,), n ≥ 1, and the place, at least 1, of the first that counts.
        batch_size: how many are read at once; those of like length go together.
        block_length: how many tokens of each.

    Returns:
        One for each sequence, in their order; that of a sequence alone, whatever the batch.

    Raises:
        ValueError: for an argument out of range.
    """
    if block_length < 1:
        raise ValueError(f"block_length is {block_length}; wanted at least 1")
    for tokens, first in sequences:
        if len(tokens) == 0 or first < 1:
            raise ValueError(f"a sequence of {len(tokens)} tokens counts from {first}; wanted a token before the first")
    found = [Score(0.0, 0, True)] * len(sequences)
    with in_evaluation_mode(model), torch.no_grad():
        for places in batches([len(tokens) for tokens, _ in sequences], batch_size):
            for place, score in zip(places, _batch([sequences[i] for i in places], model, block_length), strict=True):
                found[place] = score
    return found


def _batch(sequences: list[tuple[Tokens, int]], model: "CausalLM", block_length: int) -> list[Score]:
    """Rows padded on the right, in blocks: what comes after a row's end changes nothing that is counted."""
    device, network = model.device, model.network
    length = max(len(tokens) for tokens, _ in sequences) - 1
    size, state = block_of(model.network_config, block_length), None
    nats = torch.zeros(len(sequences), dtype=exact_dtype(device), device=device)
    missed = torch.zeros(len(sequences), dtype=torch.int64, device=device)
    for start in range(0, length, size):
        stop = min(start + size, length)
        inputs = [tokens[:-1][start:stop] for tokens, _ in sequences]
        targets = [_counted(tokens, first, start, stop) for tokens, first in sequences]
        x, key_mask = pad(inputs, 0, side="right", device=device)
        y, _ = pad(targets, IGNORED, side="right", device=device)
        hidden, state = network(x, None if bool(key_mask.all()) else key_mask, state)
        nll, hits = token_scores(hidden.flatten(0, 1), network.head.weight, y.flatten(), network.head.bias)
        nats += nll.view_as(y).to(nats.dtype).sum(1)
        missed += ((y != IGNORED) & ~hits.view_as(y)).sum(1)
    counts = [max(len(tokens) - first, 0) for tokens, first in sequences]
    return [Score(*row) for row in zip(nats.tolist(), counts, (missed == 0).tolist(), strict=True)]


def _counted(tokens: Tokens, first: int, start: int, stop: int) -> Tokens:
    """The targets of the inputs start..stop-1, IGNORED before the first that counts."""
    targets = tokens[start + 1 : stop + 1].astype(np.int64)
    targets[: max(first - 1 - start, 0)] = IGNORED
    return targets
