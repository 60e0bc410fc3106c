"""How examples become rows of tokens, and rows become a batch.

    a text         class  text  separator
    a pair         class  first  separator  second  separator        types 0 … 0 1 … 1, the second separator's too
    a source       text  end
    a target       begin  text  end

(BERT, Devlin et al. 2019, arXiv 1810.04805, figure 2; for translation Ott et al. 2019, arXiv 1904.01038, where the end
token stands for the beginning of a target too.)
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import Tokens


def joined(
    tokenizer: SpecialTokens, first: Sequence[int], second: Sequence[int] | None, max_length: int
) -> tuple[Tokens, Tokens]:
    """One sequence of a text or of two, cut to a length.

    Args:
        tokenizer: has class and separator.
        first: tokens.
        second: tokens, or None for one text.
        max_length: of the sequence, with its special tokens.

    Returns:
        tokens (n,) and their types (n,), int64, n ≤ max_length.
    """
    ids = tokenizer.ids
    if second is None:
        row = [ids["class"], *first[: max_length - 2], ids["separator"]]
        return np.array(row, dtype=np.int64), np.zeros(len(row), dtype=np.int64)
    n_first, n_second = cut_lengths(len(first), len(second), max_length - 3)
    row = [ids["class"], *first[:n_first], ids["separator"], *second[:n_second], ids["separator"]]
    return np.array(row, dtype=np.int64), np.repeat([0, 1], [n_first + 2, n_second + 1])


def cut_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """What is left of two texts that have to fit: the longer one gives up a token at a time, of equals the second.

    (As `_truncate_seq_pair` of BERT's own code does.)

    Args:
        first: length of the first text.
        second: length of the second text.
        room: for both together.

    Returns:
        Their new lengths.
    """
    first = min(first, max(room - second, -(-room // 2)))
    return first, min(second, room - first)


def padded(rows: Sequence[Tokens], fill: int) -> tuple[Tensor, Tensor | None]:
    """Rows filled up on the right to the longest.

    Args:
        rows: B of them, each (n,).
        fill: the padding token.

    Returns:
        (B, N) int64, and (B, N) bool, True where the token is real, or None where all are. Without rows N is 1.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    width = int(lengths.max(initial=1))
    batch = np.full((len(rows), width), fill, dtype=np.int64)
    for place, row in enumerate(rows):
        batch[place, : len(row)] = row
    mask = np.arange(width) < lengths[:, None]
    return torch.from_numpy(batch), None if mask.all() else torch.from_numpy(mask)
