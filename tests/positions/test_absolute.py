"""Sinusoidal and learned absolute positions: the vectors they name, and an error at their end."""

import math

import pytest
import torch

from lin_attn.positions import LearnedPositions, sinusoidal


def test_sinusoidal_equals_the_formula_far_out_too():
    """Entry by entry, to float32's rounding of a number below 1."""
    positions = torch.tensor([[0, 1, 2], [511, 100_003, 1_000_000]])
    got = sinusoidal(positions, 16)
    assert got.shape == (2, 3, 16)
    for row, m in zip(got.view(-1, 16), positions.flatten().tolist(), strict=True):
        for i in range(8):
            angle = m / 10000 ** (2 * i / 16)
            assert row[2 * i : 2 * i + 2].tolist() == pytest.approx((math.sin(angle), math.cos(angle)), abs=1e-6)


def test_sinusoidal_positions_are_integers_and_the_size_even():
    with pytest.raises(ValueError, match="positions"):
        sinusoidal(torch.arange(3.0), 8)
    with pytest.raises(ValueError, match="d_model"):
        sinusoidal(torch.arange(3), 7)


def test_learned_positions_are_a_table_that_learns():
    table = LearnedPositions(5, 4)
    positions = torch.tensor([[0, 4, 4], [1, 2, 3]])
    out = table(positions, 5)
    assert torch.equal(out, torch.stack([torch.stack([table.table.weight[m] for m in row]) for row in positions]))
    out.sum().backward()
    assert table.table.weight.grad[:, 0].tolist() == [1, 1, 1, 1, 2]


def test_learned_positions_end_with_an_error_that_says_where():
    table = LearnedPositions(5, 4)
    with pytest.raises(ValueError, match=r"position 5\b.*max_length"):
        table(torch.arange(6), 6)
    with pytest.raises(ValueError, match="max_length"):
        LearnedPositions(0, 4)
