"""Softmax attention, the baseline, equals explicit loops in every option, and its gradients finite differences."""

import pytest
import torch
from torch import Tensor

from lin_attn import Rotary, softmax_attention
from tests.helpers import TOLERANCE, loop_softmax, qkv, relative


def some_bias(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("bias", [None, (), (7,), (7, 1), (4, 1, 7), (2, 4, 7, 7)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_explicit_loops(causal, rope, masked, bias, scale):
    """Four query heads on two key heads, D ≠ M, N_k ≠ N where it may be."""
    q, k, v = qkv(length=7 if causal else 4, keys=7)
    if bias is not None:
        bias = some_bias(bias)[..., : q.shape[2], :] if len(bias) > 1 else some_bias(bias)
    mask = torch.rand(2, 7, generator=torch.Generator().manual_seed(5)) > 0.4 if masked else None
    options = {"bias": bias, "causal": causal, "key_mask": mask, "scale": scale}
    got = softmax_attention(q, k, v, rotary=Rotary(6) if rope else None, **options)
    assert relative(got, loop_softmax(q, k, v, rope=rope, **options)) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_equal_finite_differences_the_bias_too(causal):
    q, k, v = qkv(1, 2, 1, 4, 2, 3)
    mask = torch.tensor([[True, False, True, True]])

    def op(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out, cache = softmax_attention(
            q, k, v, bias=bias, causal=causal, key_mask=mask, rotary=Rotary(2), return_state=True
        )
        return out, cache.k, cache.v

    assert torch.autograd.gradcheck(op, (q, k, v, some_bias((2, 4, 4))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 1, 65])
@pytest.mark.parametrize("causal", [True, False])
def test_every_dtype_equals_float64(dtype, length, causal):
    """Values and gradients. Products are taken in the inputs' dtype here, so the tolerance is for several roundings."""
    inputs = qkv(length=length, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got = softmax_attention(*inputs, rotary=Rotary(6), causal=causal)
    wanted = softmax_attention(*wide, rotary=Rotary(6), causal=causal)
    assert got.dtype == dtype
    assert relative(got, wanted) <= TOLERANCE[dtype]
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    gradients = torch.autograd.grad((got * weights).sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad((wanted * weights).sum(), wide), strict=True):
        if length == 1 and not (b.norm() > 1e-9):  # the weight is 1 whatever q and k are
            assert a.abs().max() <= 0.02
        else:
            assert relative(a, b) <= 2 * TOLERANCE[dtype]


def test_a_bias_with_a_state_reaches_the_earlier_keys():
    q, k, v = qkv(length=9)
    bias = some_bias((4, 9, 9))
    whole = loop_softmax(q, k, v, bias=bias, rope=True)
    first, cache = softmax_attention(
        *(x[:, :, :5] for x in (q, k, v)), bias=bias[:, :5, :5], rotary=Rotary(6), return_state=True
    )
    then = softmax_attention(*(x[:, :, 5:] for x in (q, k, v)), bias=bias[:, 5:], rotary=Rotary(6), state=cache)
    assert relative(torch.cat((first, then), dim=2), whole) <= TOLERANCE[torch.float64]


def test_without_causal_earlier_keys_come_in_through_the_state():
    q, k, v = qkv(length=9)
    _, cache = softmax_attention(*(x[:, :, :5] for x in (q, k, v)), causal=False, return_state=True)
    then = softmax_attention(*(x[:, :, 5:] for x in (q, k, v)), causal=False, state=cache)
    assert relative(then, loop_softmax(q, k, v, causal=False)[:, :, 5:]) <= TOLERANCE[torch.float64]
