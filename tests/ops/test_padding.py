"""Padding changes no real token's output or gradient, wherever it stands and whatever it holds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lin_attn import Rotary, linear_attention, softmax_attention
from tests.helpers import BACKENDS, TOLERANCE, loop_linear, loop_softmax, qkv, relative, rope_options, widest

OPS: dict[str, Callable[..., Any]] = {
    f"linear {backend} {rope} {'sum' if normalize else 'bare'}": partial(
        linear_attention, backend=backend, normalize=normalize, **rope_options(rope, 6)
    )
    for backend in BACKENDS
    for rope in ("none", "after")
    for normalize in (True, False)
} | {"softmax": softmax_attention, "softmax rotary": partial(softmax_attention, rotary=Rotary(6))}
# φ(R_m q)ᵀ φ(R_n k) is not a function of m − n: rotated before φ, left padding rightly changes everything.
BEFORE = {
    f"linear {backend} before": partial(linear_attention, backend=backend, **rope_options("before", 6))
    for backend in BACKENDS
}


def padded(x: Tensor, length: int, side: str) -> Tensor:
    """x (1, H, n, D) in a frame of `length` tokens, the rest filled with huge numbers."""
    frame = 1e4 * torch.randn(*x.shape[:2], length, x.shape[3], dtype=x.dtype)
    start = length - x.shape[2] if side == "left" else 0
    return torch.cat((frame[:, :, :start], x, frame[:, :, start + x.shape[2] :]), dim=2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(40,), (40, 90, 1, 71)], ids=["batch 1", "batch 4"])
@pytest.mark.parametrize(
    ("name", "side"),
    [(name, side) for name in OPS for side in ("left", "right")] + [(name, "right") for name in BEFORE],
)
def test_padding_changes_no_real_output_or_gradient(name, side, lengths, causal):
    """A batch of unequal lengths against each sequence alone, to rounding."""
    op = partial((OPS | BEFORE)[name], causal=causal)
    sequences = [qkv(1, length=n, seed=n, dtype=widest(name)) for n in lengths]
    frame = max(*lengths, 90) + 3
    batch = [torch.cat([padded(s[i], frame, side) for s in sequences]) for i in range(3)]
    steps = torch.arange(frame)
    mask = torch.stack([steps >= frame - n if side == "left" else steps < n for n in lengths])
    out = op(*batch, key_mask=mask)
    rows = [out[i : i + 1, :, mask[i]] for i in range(len(lengths))]
    alone = [op(*s) for s in sequences]
    leaves = [x for s in sequences for x in s]
    got = torch.autograd.grad(sum(row.square().sum() for row in rows), leaves)
    wanted = torch.autograd.grad(sum(row.square().sum() for row in alone), leaves)
    # Angles begin elsewhere with left padding.
    tolerance = 1e-10 if widest(name) == torch.float64 else TOLERANCE[widest(name)]
    assert max(relative(a, b) for a, b in zip(rows, alone, strict=True)) <= tolerance
    # One real key alone is its value whatever q and k are: gradients that cancel to 0 are compared absolutely.
    assert max(min(relative(a, b), (a - b).abs().max().item()) for a, b in zip(got, wanted, strict=True)) <= tolerance


@pytest.mark.parametrize("name", OPS | BEFORE)
def test_hidden_keys_get_no_gradient(name):
    q, k, v = qkv(length=70, dtype=widest(name))
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(5)) > 0.4
    out, state = (OPS | BEFORE)[name](q, k, v, key_mask=mask, return_state=True)
    loss = out.square().sum() + (0 if "softmax" in name else state[0].square().sum() + state[1].square().sum())
    for gradient in torch.autograd.grad(loss, (k, v)):
        rows = gradient.abs().sum((1, 3))
        assert not rows[~mask].any()
        assert rows[mask].ne(0).all() or "softmax" in name


@pytest.mark.parametrize("name", OPS | BEFORE)
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_without_keys_gives_zeros_and_finite_gradients(name, causal):
    """The first sequence sees nothing; the second nothing for its first 66 tokens, if causal."""
    q, k, v = qkv(length=70, dtype=torch.float32)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[1, 66:] = True
    out = (OPS | BEFORE)[name](q, k, v, key_mask=mask, causal=causal)
    assert not out[0].any()
    assert out[1, :, :66].any() == (not causal)
    assert out[1, :, 66:].any()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    for gradient in torch.autograd.grad((out * weights).sum(), (q, k, v)):
        assert gradient.isfinite().all()
        assert not gradient[0].any()
        assert gradient[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_keys_has_finite_gradients_with_an_eps_of_zero(backend):
    """eps=0 is allowed: the floor is then the least normal number, whose inverse overflows."""
    q, k, v = qkv(length=5, dtype=torch.float32)
    out = linear_attention(q, k, v, key_mask=torch.zeros(2, 5, dtype=torch.bool), eps=0, backend=backend)
    assert not out.any()
    gradients = torch.autograd.grad((10 * out).sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_key_at_all_gives_zeros(backend):
    q, k, v = qkv(length=5, keys=0, dtype=widest(backend))
    assert not linear_attention(q, k, v, causal=False, rotary=Rotary(6), backend=backend).any()
    assert not softmax_attention(q, k, v, causal=False, rotary=Rotary(6)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_is_applied_after_the_feature_map_above_and_below(backend):
    """φ(0) = 1: a key that is zeroed before the map would still weigh, and by hand half of it would be this."""
    q, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[3.0], [7.0]]]])
    mask = torch.tensor([[True, False]])
    out, state = linear_attention(q, q, v, causal=False, key_mask=mask, return_state=True, backend=backend)
    assert out.flatten().tolist() == [3.0, 3.0]
    assert state.k_sum.flatten().tolist() == [1.0, 1.0]
    assert state.kv.flatten().tolist() == [3.0, 3.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_and_values_may_be_nan(backend):
    """Uninitialised memory stands in padding; the reference says that hidden values may be anything."""
    q, k, v = qkv(dtype=widest(backend))
    mask = torch.rand(2, 7, generator=torch.Generator().manual_seed(5)) > 0.4
    holes = ~mask[:, None, :, None]
    wanted = loop_linear(q, k, v, key_mask=mask, rope="after")["out"]
    k, v = (x.detach().masked_fill(holes, float("nan")) for x in (k, v))
    got = linear_attention(q, k, v, key_mask=mask, rotary=Rotary(6), backend=backend)
    assert relative(got, wanted) <= TOLERANCE[widest(backend)]


def test_softmax_with_a_mask_equals_explicit_loops():
    q, k, v = qkv()
    mask = torch.rand(2, 7, generator=torch.Generator().manual_seed(5)) > 0.4
    for causal in (True, False):
        got = softmax_attention(q, k, v, key_mask=mask, causal=causal, rotary=Rotary(6))
        assert relative(got, loop_softmax(q, k, v, key_mask=mask, causal=causal, rope=True)) <= 1e-11
