"""A backend that is named is the one that computes, and what it cannot do it refuses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lin_attn import Rotary, linear_attention
from lin_attn.feature_maps import FeatureMap, feature_map
from lin_attn.ops.backends import BACKENDS, usable_backends


def operators_of(call):
    """The names of the operators that a call runs."""
    names = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        call()
    return names


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_named_backend_runs(backend, length):
    q = torch.randn(1, 2, length, 8)
    names = operators_of(lambda: linear_attention(q, q, q, rotary=Rotary(8), backend=backend))
    ran_chunked = any("lin_attn.linear_chunked" in name for name in names)
    assert ran_chunked == (backend == "chunked" or (backend == "auto" and length > 1))


def test_every_backend_says_whether_it_is_usable():
    assert set(usable_backends()) == set(BACKENDS) - {"auto"}


def test_forward_mode_is_refused_where_it_would_be_lost_and_exact_in_the_reference():
    q = torch.randn(1, 1, 6, 4, dtype=torch.float64)

    def slope(backend):
        return torch.func.jvp(lambda x: linear_attention(x, q, q, backend=backend).sum(), (q,), (torch.ones_like(q),))

    with pytest.raises(ValueError, match="reference"):
        slope("chunked")
    step = 1e-6
    above, below = (linear_attention(q + sign * step, q, q).sum() for sign in (1, -1))
    torch.testing.assert_close(slope("reference")[1], (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


def test_a_map_object_of_the_users_own_is_taken_as_it_is():
    elu1 = feature_map("elu1")
    own = FeatureMap("elu1", lambda x: 2 * elu1.forward(x), lambda x, grad: 2 * elu1.vjp(x, grad))
    q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))
    bare = {"rotary": Rotary(8), "normalize": False}
    out, wanted = (linear_attention(q, k, v, feature_map=phi, **bare) for phi in (own, elu1))
    torch.testing.assert_close(out, 4 * wanted)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (q, k, v)), tuple(4 * g for g in torch.autograd.grad(wanted.sum(), (q, k, v)))
    )
