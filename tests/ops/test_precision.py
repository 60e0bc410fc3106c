"""Precise: φ, angles and sums are float32 at least, whatever the inputs are and whatever autocast wants."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from lin_attn import LinearState, Rotary, linear_attention, softmax_attention
from tests.helpers import (
    BACKENDS,
    ROPES,
    TOLERANCE,
    double,
    qkv,
    relative,
    rope_options,
    takes,
    values_and_gradients,
    widest,
)

ON_BACKENDS = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize(
    ("backend", "phi"),
    [(b, phi) for b in BACKENDS for phi in ("elu1", "exp", "relu", "squared_relu") if takes(b, feature_map=phi)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hundredfold_query_and_key_stay_finite(backend, phi, dtype):
    """After long training scores are large; outputs then are averages still, no greater than the greatest value."""
    q, k, v = (x * scale for x, scale in zip(qkv(length=130, dtype=dtype), (100, 100, 1), strict=True))
    got = values_and_gradients(q, k, v, feature_map=phi, backend=backend)
    assert all(x.isfinite().all() for x in got.values())
    assert got["out"].abs().max() <= 1.01 * v.abs().max()


@ON_BACKENDS
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_the_key_features_does_not_matter(backend, scale):
    """The denominator is not biased by eps, row by row. A quarter of the queries' features are below 0.1."""
    q, k, v = qkv(length=130, size=2, dtype=torch.float32)
    q, k = (q - 2).exp(), k.exp()
    run = partial(linear_attention, feature_map="identity", backend=backend)
    plain, scaled = run(q, k, v), run(q, k * scale, v)
    assert ((scaled - plain).norm(dim=-1) / plain.norm(dim=-1)).max() <= 1e-3


@ON_BACKENDS
def test_the_floor_of_the_denominator_is_a_constant(backend):
    """Where the sum of weights is below eps it is held there, with its sign, and has no gradient."""
    eps, dtype = 0.5, widest(backend)
    q = torch.tensor([[[[0.1, -0.2]]]], dtype=dtype, requires_grad=True)
    k = torch.tensor([[[[1.0, 1.0]]]], dtype=dtype, requires_grad=True)
    v = torch.tensor([[[[3.0]]]], dtype=dtype, requires_grad=True)
    out = linear_attention(q, k, v, feature_map="identity", eps=eps, backend=backend)
    assert out.item() == pytest.approx(-0.1 * 3 / -eps)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    wanted = ([1 * 3 / -eps] * 2, [0.1 * 3 / -eps, -0.2 * 3 / -eps], [-0.1 / -eps])
    for gradient, numbers in zip(gradients, wanted, strict=True):
        assert gradient.flatten().tolist() == pytest.approx(numbers)


@ON_BACKENDS
@pytest.mark.parametrize("rope", ROPES)
def test_strongly_negative_bfloat16_keys_keep_their_weights(backend, rope):
    """elu(x) + 1 computed in bfloat16 is 0 below −6: at −8 all of the output would be lost."""
    q, k, v = qkv(length=70, dtype=torch.bfloat16)
    k = (k - 8).detach().requires_grad_()
    got = values_and_gradients(q, k, v, backend=backend, **rope_options(rope, 6))
    wanted = values_and_gradients(*double(q, k, v), backend="reference", **rope_options(rope, 6))
    assert relative(got["out"], wanted["out"]) <= TOLERANCE[torch.bfloat16]
    assert relative(got["grad of k"], wanted["grad of k"]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rope", ["after", "before"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(b, d) for b in BACKENDS for d in (torch.float32, torch.float16, torch.bfloat16) if takes(b, dtype=d)],
    ids=str,
)
def test_position_a_million_rotates_right(backend, rope, dtype):
    """Angles made in float32 would be off by 0.03 there, in bfloat16 by thousands."""
    q, k, v = qkv(length=70, dtype=dtype)
    state = LinearState(torch.randn(2, 2, 6, 5), 10 * torch.rand(2, 2, 6), 1_000_003)
    options = {"rotary": Rotary(6), "rope": rope}
    got = linear_attention(q, k, v, state=state, backend=backend, **options)
    q, k, v, state = double(q, k, v, state)
    wanted = linear_attention(q, k, v, state=state, backend="reference", **options)
    assert relative(got, wanted) <= TOLERANCE[dtype]


ISLANDS: dict[str, Callable[..., Tensor]] = {
    f"linear {backend} {rope}": partial(linear_attention, backend=backend, **rope_options(rope, 6))
    for backend in BACKENDS
    for rope in ROPES
} | {
    f"linear {backend} user's map": partial(linear_attention, backend=backend, feature_map=softplus, rotary=Rotary(6))
    for backend in BACKENDS
}
ISLANDS["softmax"] = partial(softmax_attention, rotary=Rotary(6))


# autograd's own backward of a matrix product obeys the autocast region that backward() is called in.
BACKWARD_OUTSIDE_ONLY = pytest.mark.xfail(
    strict=True, reason="differentiated by autograd, inside the caller's autocast"
)


@pytest.mark.parametrize(
    ("name", "backward_inside"),
    [(name, False) for name in ISLANDS]
    + [
        pytest.param(name, True, marks=BACKWARD_OUTSIDE_ONLY if "reference" in name or name == "softmax" else ())
        for name in ISLANDS
    ],
)
def test_autocast_changes_no_bit(name, backward_inside):
    """Backward too, and even where it is called inside the autocast region, which torch advises against."""

    def run(enabled: bool) -> list[Any]:
        inputs = qkv(length=70, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = ISLANDS[name](*inputs)
            if backward_inside:
                out.square().sum().backward()
        if not backward_inside:
            out.square().sum().backward()
        return [out, *(x.grad for x in inputs)]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
