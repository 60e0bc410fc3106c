"""Texts are cut and laid out as BERT has them, and padding is told apart."""

import numpy as np
import pytest
import torch

from lin_attn.data.formats import cut_lengths, joined, padded
from lin_attn.data.special_tokens import SpecialTokens
from lin_attn.data.tokenizer import ByteTokenizer

SPECIAL = SpecialTokens(ByteTokenizer(), ("pad", "class", "separator"))
CLASS, SEPARATOR = SPECIAL.ids["class"], SPECIAL.ids["separator"]


def test_the_longer_text_gives_up_its_last_tokens_one_at_a_time():
    for first in range(12):
        for second in range(12):
            for room in range(1, 14):
                a, b = first, second
                while a + b > room:
                    a, b = (a - 1, b) if a > b else (a, b - 1)
                assert cut_lengths(first, second, room) == (a, b)


def test_a_pair_is_told_apart_by_types():
    tokens, types = joined(SPECIAL, [1, 2, 3, 4], [5, 6], 8)
    assert tokens.tolist() == [CLASS, 1, 2, 3, SEPARATOR, 5, 6, SEPARATOR]
    assert types.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]


def test_one_text_is_cut_at_its_end():
    tokens, types = joined(SPECIAL, [1, 2, 3, 4], None, 5)
    assert tokens.tolist() == [CLASS, 1, 2, 3, SEPARATOR]
    assert not types.any()


@pytest.mark.parametrize("lengths", [[3, 1, 2], [2, 2], [], [0]])
def test_padding_is_on_the_right_and_masked(lengths):
    rows = [np.arange(1, n + 1) for n in lengths]
    tokens, mask = padded(rows, 9)
    width = max([1, *lengths])
    assert tokens.shape == (len(rows), width)
    assert tokens.dtype == torch.int64
    real = torch.ones(tokens.shape, dtype=torch.bool) if mask is None else mask
    assert (mask is None) == all(n == width for n in lengths)
    for row, n, places in zip(tokens, lengths, real, strict=True):
        assert row[places].tolist() == list(range(1, n + 1))
        assert (row[~places] == 9).all()
