"""The parts of a block compute what they say."""

import pytest
import torch

from models.blocks import gelu


@pytest.mark.parametrize("size", [1, 2048, 2049])
def test_gelu_is_exact_however_many_numbers_there_are(size):
    """Few go another way than many, without a gradient."""
    x = torch.linspace(-9, 9, size)
    wanted = x.double() * (1 + torch.erf(x.double() / 2**0.5)) / 2
    for got in (gelu(x), gelu(x.clone().requires_grad_())):
        assert got.dtype == torch.float32
        assert torch.allclose(got.double(), wanted, rtol=0, atol=1e-6)
