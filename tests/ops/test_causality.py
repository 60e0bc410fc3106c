"""Nothing at n > m reaches out_m, forward or backward."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lin_attn import Rotary, linear_attention, softmax_attention
from tests.helpers import BACKENDS, ROPES, TOLERANCE, qkv, relative, rope_options, widest

OPS: dict[str, Callable[..., Tensor]] = {
    f"linear {backend} {rope} {'sum' if normalize else 'bare'}": partial(
        linear_attention, backend=backend, normalize=normalize, **rope_options(rope, 6)
    )
    for backend in BACKENDS
    for rope in ROPES
    for normalize in (True, False)
} | {"softmax": softmax_attention, "softmax rotary": partial(softmax_attention, rotary=Rotary(6))}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("m", [0, 63, 64, 100])
def test_gradients_from_the_future_are_exactly_zero(name, m):
    """And those from the past are not, so that a detached input would show."""
    q, k, v = qkv(length=130, dtype=widest(name))
    out = OPS[name](q, k, v)
    grad_q, grad_k, grad_v = torch.autograd.grad(out[:, :, m].square().sum(), (q, k, v))
    others = [n for n in range(130) if n != m]
    assert not grad_q[:, :, others].any(), "another query reaches this one"
    assert not grad_k[:, :, m + 1 :].any(), "a later key"
    assert not grad_v[:, :, m + 1 :].any(), "a later value"
    assert grad_v[:, :, : m + 1].ne(0).all()
    if m:  # one key alone has weight 1 whatever it is, if weights are normalised and not rotated
        assert grad_k[:, :, : m + 1].ne(0).all()
        assert grad_q[:, :, m].ne(0).all()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("huge", [1e15, -1e15])
def test_the_future_may_be_anything_and_the_past_stays_bit_identical(name, huge):
    q, k, v = qkv(length=130, dtype=torch.float32)
    m = 77  # in the middle of a chunk
    before = OPS[name](q, k, v)
    changed = [torch.cat((x[:, :, : m + 1], x[:, :, m + 1 :] * huge), dim=2) for x in (q, k, v)]
    after = OPS[name](*changed)
    assert not torch.equal(after, before)
    assert torch.equal(after[:, :, : m + 1], before[:, :, : m + 1])


@pytest.mark.parametrize("name", OPS)
def test_a_prefix_alone_gives_the_same(name):
    """f(x[:m]) = f(x)[:m] to rounding: lengths may pick other loops, not other numbers."""
    q, k, v = qkv(length=130, dtype=widest(name))
    whole = OPS[name](q, k, v)
    for m in (1, 64, 77, 129):
        prefix = OPS[name](q[:, :, :m], k[:, :, :m], v[:, :, :m])
        if widest(name) == torch.float64:
            torch.testing.assert_close(prefix, whole[:, :, :m], rtol=0, atol=1e-12)
        assert relative(prefix, whole[:, :, :m]) <= TOLERANCE[widest(name)]


@pytest.mark.parametrize("name", OPS)
def test_without_causal_every_key_reaches_every_query(name):
    q, k, v = qkv(length=70, dtype=widest(name))
    out = OPS[name](q, k, v, causal=False)
    grad_v = torch.autograd.grad(out[:, :, 0].square().sum(), v)[0]
    assert grad_v.ne(0).all()
