"""Texts of unequal length as batches: which go together, and what fills the rest.

Letters: B batch, N length.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lin_attn.data.tokenizer import Tokenizer, Tokens

if TYPE_CHECKING:
    from models.training import TrainedModel

Text = str | bytes


def tokenizer_of(model: "TrainedModel") -> Tokenizer:
    """The model's tokenizer.

    Raises:
        ValueError: if it has none.
    """
    if model.tokenizer is None:
        raise ValueError(
            "the model has no tokenizer, which it takes from a checkpoint or from its data; wanted model.tokenizer, "
            "such as lin_attn.data.ByteTokenizer()"
        )
    return model.tokenizer


def text_list(texts: Iterable[Text], argument: str = "texts") -> list[Text]:
    """Texts as a list; what gives them one by one, such as a generator or a file, is read once, here.

    Raises:
        ValueError: for anything but texts.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"{argument} is a {type(texts).__name__}; wanted a list of texts")
    found = list(texts)
    if not all(isinstance(text, str | bytes) for text in found):
        kinds = ", ".join(sorted({type(text).__name__ for text in found}))
        raise ValueError(f"{argument} is a {type(texts).__name__} of {kinds}; wanted a list of texts")
    return found


def batches(lengths: Sequence[int], size: int, *, equal: bool = False) -> Iterator[list[int]]:
    """Places of texts that are computed together, the longest first, so that too large a batch fails at once.

    Args:
        lengths: of the texts.
        size: how many are in a batch at most.
        equal: only texts of one length go together.

    Raises:
        ValueError: if size is less than 1.
    """
    if size < 1:
        raise ValueError(f"batch_size is {size}; wanted at least 1")
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (len(batch) == size or (equal and lengths[place] != lengths[batch[0]])):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def pad(
    rows: Sequence[Sequence[int] | Tokens], filler: int, *, side: Literal["left", "right"], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Tokens (B, N) int64, N the longest row, and key_mask (B, N) bool, True where a token is real."""
    longest = max(map(len, rows), default=0)
    tokens = torch.full((len(rows), longest), filler, dtype=torch.int64)
    key_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        tokens[i, place], key_mask[i, place] = torch.as_tensor(row, dtype=torch.int64), True
    return tokens.to(device), key_mask.to(device)
