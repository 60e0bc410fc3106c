"""A backend that is named is the one that computes, and what it cannot do it refuses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lin_attn import Rotary, linear_attention
from lin_attn.feature_maps import FeatureMap, feature_map
from lin_attn.ops.backends import BACKENDS, usable_backends
from tests.helpers import FLOAT64_BACKENDS, LINEAR_BACKENDS, TOLERANCE, qkv, relative


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


def backend_of(q, **options):
    """The linear backend that ran, or "reference": neither, but plain operators."""
    names = " ".join(operators_of(lambda: linear_attention(q, q, q, **options)))
    ran = [backend for backend in LINEAR_BACKENDS if f"lin_attn.linear_{backend}" in names]
    assert len(ran) <= 1
    return ran[0] if ran else "reference"


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_named_backend_runs(backend, length, monkeypatch):
    monkeypatch.delenv("LIN_ATTN_BACKEND", raising=False)
    q = torch.randn(1, 2, length, 8)
    assert backend_of(q, backend=backend) == ("cpu" if backend == "auto" else backend)
    if backend == "auto":
        assert backend_of(q.double()) == ("chunked" if length > 1 else "reference")


REFUSED = {
    # what the fused kernel refuses: (words of the reason, q, options)
    "float64": ("float64", torch.randn(1, 2, 5, 8, dtype=torch.float64), {}),
    "float16": ("float16", torch.randn(1, 2, 5, 8).half(), {}),
    "a map along the whole vector": ("'exp'", torch.randn(1, 2, 5, 8), {"feature_map": "exp"}),
    "large heads": ("head dims are 258 and 258", torch.randn(1, 2, 5, 258), {}),
    "heads of no size": ("head dims are 0 and 0", torch.randn(1, 2, 5, 0), {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_fused_kernel_cannot_compute_it_refuses_and_auto_leaves_to_chunked(case):
    words, q, options = REFUSED[case]
    with pytest.raises(ValueError, match=rf"backend 'cpu' cannot compute this: .*{words}.*; wanted backend='auto'"):
        linear_attention(q, q, q, backend="cpu", **options)
    assert backend_of(q, **options) == "chunked"


@pytest.mark.parametrize("name", FLOAT64_BACKENDS)
def test_the_environment_names_a_backend_for_calls_that_do_not(name, monkeypatch):
    q = torch.randn(1, 2, 5, 8)
    monkeypatch.setenv("LIN_ATTN_BACKEND", name)
    assert backend_of(q) == name
    assert backend_of(q, backend="cpu") == "cpu"
    monkeypatch.setenv("LIN_ATTN_BACKEND", "")
    assert backend_of(q) == "cpu"


def test_an_unknown_backend_in_the_environment_is_named(monkeypatch):
    q = torch.randn(1, 2, 5, 8)
    monkeypatch.setenv("LIN_ATTN_BACKEND", "fused")
    with pytest.raises(ValueError, match="LIN_ATTN_BACKEND is 'fused'"):
        linear_attention(q, q, q)
    monkeypatch.setenv("LIN_ATTN_BACKEND", "cpu")
    with pytest.raises(ValueError, match=r"backend 'cpu' cannot compute this: .* torch\.float64"):
        linear_attention(q.double(), q.double(), q.double())


def test_every_backend_says_whether_it_is_usable():
    assert set(usable_backends()) == set(BACKENDS) - {"auto"}


def test_forward_mode_is_refused_where_it_would_be_lost_and_exact_in_the_reference():
    q = torch.randn(1, 1, 6, 4, dtype=torch.float64)

    def slope(backend):
        return torch.func.jvp(lambda x: linear_attention(x, q, q, backend=backend).sum(), (q,), (torch.ones_like(q),))

    with pytest.raises(ValueError, match="reference"):
        slope("chunked")
    x = q.float()
    with pytest.raises(ValueError, match="forward-mode"):
        torch.func.jvp(lambda x: linear_attention(x, x, x, backend="cpu"), (x,), (x,))
    step = 1e-6
    above, below = (linear_attention(q + sign * step, q, q).sum() for sign in (1, -1))
    torch.testing.assert_close(slope("reference")[1], (above - below) / (2 * step), rtol=1e-6, atol=1e-8)


def test_a_map_object_of_the_users_own_is_taken_as_it_is():
    elu1 = feature_map("elu1")
    own = FeatureMap("elu1", lambda x: 2 * elu1.forward(x), lambda x, grad: 2 * elu1.vjp(x, grad))
    q, k, v = qkv(1, 2, 2, 70, 8, 8, dtype=torch.float32)
    bare = {"rotary": Rotary(8), "normalize": False}
    out, wanted = (linear_attention(q, k, v, feature_map=phi, **bare) for phi in (own, elu1))
    assert relative(out, 4 * wanted) <= TOLERANCE[torch.float32]
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, 4 * wanted))
    assert all(relative(a, b) <= TOLERANCE[torch.float32] for a, b in zip(*gradients, strict=True))
