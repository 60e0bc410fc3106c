"""Feature maps: their values, their derivatives, and their precision where a naive form loses all of it."""

import math

import pytest
import torch
from torch import Tensor

from lin_attn import feature_map
from tests.helpers import PHI

NAMES = tuple(PHI)


def points(dtype: torch.dtype = torch.float64) -> Tensor:
    """(4, 5): both signs, large ones, and within a vector no ties."""
    x = torch.linspace(-9.7, 8.3, 20, dtype=torch.float64)
    return x[torch.randperm(20, generator=torch.Generator().manual_seed(0))].view(4, 5).to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_equal_the_formula_and_keep_the_dtype(name, dtype):
    """To one rounding of the result and those before it, in float32 at least: of x − max x, 20 at most, for "exp"."""
    x = points(dtype)
    got = feature_map(name)(x)
    wanted = torch.stack([torch.tensor(PHI[name](row)) for row in x.double().numpy()])
    assert got.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    rtol = torch.finfo(dtype).eps + 20 * torch.finfo(wide).eps
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("name", NAMES)
def test_vjp_equals_autograd_and_finite_differences(name):
    phi, x = feature_map(name), points().requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    (wanted,) = torch.autograd.grad(phi.forward(x), x, grad)
    torch.testing.assert_close(phi.vjp(x.detach(), grad), wanted, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(phi.forward, x)


@pytest.mark.parametrize("name", NAMES)
def test_vjp_equals_autograd_at_kinks_and_ties(name):
    """At 0, where the branches meet, and where two entries are the greatest."""
    phi = feature_map(name)
    x = torch.tensor([[0.0, -1.0, 0.0], [2.0, 2.0, 1.0], [-3.0, -3.0, -3.0]], dtype=torch.float64, requires_grad=True)
    grad = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64).expand(3, 3)
    (wanted,) = torch.autograd.grad(phi.forward(x), x, grad)
    torch.testing.assert_close(phi.vjp(x.detach(), grad), wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x", [-8.0, -17.0, -80.0])
def test_elu1_is_positive_and_exact_where_the_sum_would_cancel(x, dtype):
    """elu(x) + 1 is 0 for x < −17 in float32 and x < −6 in bfloat16. Within 1 %, value and gradient."""
    x = torch.tensor([x], dtype=dtype, requires_grad=True)
    out = feature_map("elu1")(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    wanted = math.exp(x.item())
    assert out.item() == pytest.approx(wanted, rel=0.01)
    assert slope.item() == pytest.approx(wanted, rel=0.01)
    assert feature_map("elu1").vjp(x.detach().float(), torch.ones(1)).item() == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_large_inputs_give_finite_values_and_gradients(name):
    x = torch.tensor([[1e4, -1e4, 300.0, -300.0, 0.0]], requires_grad=True)
    out = feature_map(name)(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert slope.isfinite().all()
    assert feature_map(name).vjp(x.detach(), torch.ones_like(x)).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_elu1_and_exp_are_positive_and_the_others_are_not(name):
    phi = feature_map(name)
    assert phi.name == name
    assert bool((phi(points()) > 0).all()) == (phi.name in ("elu1", "exp"))


def test_exp_looks_at_one_vector_alone():
    """A greatest entry taken over all keys would leak the future."""
    x = points()
    changed = torch.cat((x[:1], x[1:] + 100))
    assert torch.equal(feature_map("exp")(x)[0], feature_map("exp")(changed)[0])


@pytest.mark.parametrize("name", ["elu", "", None, 3, ["elu1"]])
def test_an_unknown_name_is_an_error_that_lists_the_known(name):
    with pytest.raises(ValueError, match=r"feature_map.*elu1"):
        feature_map(name)
