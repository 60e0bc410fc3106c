"""Linear attention is exact: the reference equals explicit loops, each backend equals the reference, gradients too."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from lin_attn import Rotary, feature_map, linear_attention
from lin_attn.feature_maps import FeatureMap
from lin_attn.ops.linear_reference import recurrent
from tests.helpers import (
    BACKENDS,
    FLOAT64_BACKENDS,
    LINEAR_BACKENDS,
    ROPES,
    TOLERANCE,
    assert_close,
    double,
    loop_linear,
    qkv,
    random_state,
    relative,
    rope_options,
    takes,
    values_and_gradients,
    widest,
)

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 300)  # about the chunks' sizes, 64 and 128
FLAGS = pytest.mark.parametrize(
    ("rope", "normalize", "causal"), [(r, n, c) for r in ROPES for n in (True, False) for c in (True, False)]
)
ON_BACKENDS = pytest.mark.parametrize("backend", BACKENDS)


def some_mask(batch: int, length: int) -> Tensor:
    """Holes everywhere, and a first key that only some of the batch have."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(5)) > 0.3
    mask[0, :1] = False
    return mask


def step_by_step(q: Tensor, k: Tensor, v: Tensor, rope: str, **options: Any) -> dict[str, Tensor]:
    """lin_attn's recurrent form, which the public function uses for single tokens only."""
    sums = (k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]), k.new_zeros(*k.shape[:2], k.shape[3]))
    tables = Rotary(q.shape[3]).tables(max(q.shape[2], k.shape[2]), 0, device=q.device, dtype=q.dtype)
    rotation = None if rope == "none" else tables
    phi, mask = feature_map(options.pop("phi", "elu1")), options.pop("key_mask", None)
    results = recurrent(q, k, v, mask, sums, rotation, phi=phi, rope=rope, eps=1e-6, **options)
    return dict(zip(("out", "kv", "k_sum"), results, strict=True))


@pytest.mark.parametrize("form", [*BACKENDS, "recurrent"])
@FLAGS
@pytest.mark.parametrize("masked", [False, True])
def test_equals_explicit_loops_with_explicit_rotation_matrices(form, rope, normalize, causal, masked):
    """Four query heads on two key heads, so that a sum over heads, or the wrong key head, shows."""
    q, k, v = qkv(keys=7 if causal else 5, dtype=widest(form))
    options = {"normalize": normalize, "causal": causal, "key_mask": some_mask(2, k.shape[2]) if masked else None}
    wanted = loop_linear(q, k, v, rope=rope, **options)
    if form == "recurrent":
        got = step_by_step(q, k, v, rope, **options)
    else:
        got = values_and_gradients(q, k, v, backend=form, **rope_options(rope, 6), **options)
    assert_close({name: got[name] for name in wanted}, wanted, TOLERANCE[widest(form)])


@pytest.mark.parametrize(
    ("form", "phi"),
    [
        (form, phi)
        for form in [*BACKENDS, "recurrent"]
        for phi in ["relu", "squared_relu", "exp", "identity"]
        if takes(form, feature_map=phi)
    ],
)
def test_every_feature_map_equals_explicit_loops(form, phi):
    q, k, v = qkv(dtype=widest(form))
    wanted = loop_linear(q, k, v, phi=phi, rope="after", normalize=phi == "exp")
    if form == "recurrent":
        got = step_by_step(q, k, v, "after", phi=phi, normalize=phi == "exp", causal=True)
    else:
        options = {"feature_map": phi, "rotary": Rotary(6), "normalize": phi == "exp", "backend": form}
        got = values_and_gradients(q, k, v, **options)
    assert_close({name: got[name] for name in wanted}, wanted, TOLERANCE[widest(form)])


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@FLAGS
def test_gradients_equal_finite_differences(backend, rope, normalize, causal):
    """gradcheck through q, k, v, kv and k_sum into out, kv and k_sum, entry by entry.

    The gradients of a backend without float64 are held to those of the reference, below.
    """
    q, k, v = qkv(1, 2, 1, 4, 2, 3, keys=4 if causal else 3)
    state, mask = random_state(k, v), torch.tensor([[True, False, True, True]])[:, : k.shape[2]]

    def op(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
        out, after = linear_attention(
            q, k, v, state=state._replace(kv=kv, k_sum=k_sum), return_state=True, key_mask=mask, backend=backend,
            normalize=normalize, causal=causal, **rope_options(rope, 2),
        )  # fmt: skip
        return out, after.kv, after.k_sum

    assert torch.autograd.gradcheck(op, (q, k, v, state.kv, state.k_sum))


@pytest.mark.parametrize(
    ("backend", "dtype"), [(b, d) for b in BACKENDS for d in TOLERANCE if takes(b, dtype=d)], ids=str
)
@FLAGS
def test_every_dtype_equals_the_float64_reference(backend, dtype, rope, normalize, causal):
    """All at once: grouped heads, a mask, a state, D ≠ M, lengths off the chunks, N_k ≠ N where it may be."""
    q, k, v = qkv(length=150, size=8, value_size=12, keys=150 if causal else 90, dtype=dtype)
    state = random_state(k, v)
    options = {"normalize": normalize, "causal": causal, "key_mask": some_mask(2, k.shape[2])} | rope_options(rope, 8)
    got = values_and_gradients(q, k, v, state, backend=backend, **options)
    wanted = values_and_gradients(*double(q, k, v, state), backend="reference", **options)
    assert got["out"].dtype == dtype
    assert got["kv"].dtype == got["k_sum"].dtype == torch.promote_types(dtype, torch.float32)
    assert_close(got, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("size", "value_size"), [(4, 6), (48, 40)], ids=["chunk64", "chunk128"])
@pytest.mark.parametrize("causal", [True, False])
def test_any_length_equals_the_reference(backend, length, size, value_size, causal):
    keys, dtype = length if causal else (length * 2 + 1) % 140, widest(backend)
    q, k, v = qkv(1, 2, 1, length, size, value_size, keys=keys, dtype=dtype)
    state, options = random_state(k, v), {"rotary": Rotary(size), "causal": causal}
    got = values_and_gradients(q, k, v, state, backend=backend, **options)
    wanted = values_and_gradients(*double(q, k, v, state), backend="reference", **options)
    assert_close(got, wanted, TOLERANCE[dtype])


def test_the_step_by_step_form_equals_the_quadratic_one_over_many_tokens():
    q, k, v = qkv(length=130)
    got = step_by_step(q, k, v, "after", normalize=True, causal=True)
    wanted = values_and_gradients(q, k, v, backend="reference", rotary=Rotary(6))
    assert_close(got, {name: wanted[name] for name in got}, TOLERANCE[torch.float64])


def _sliced(shape: tuple[int, ...]) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    return (*shape[:2], shape[2] + 2, shape[3] + 3), lambda x: x[:, :, 1:-1, 1:-2]


LAYOUTS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]] = {
    # shape → (shape of what is stored, view of it that has the shape)
    "transposed": lambda s: ((s[0], s[2], s[1], s[3]), lambda x: x.transpose(1, 2)),
    "sliced at an odd offset": _sliced,
    "dense at an odd offset": lambda s: ((int(np.prod(s)) + 1,), lambda x: x[1:].view(s)),
    "expanded": lambda s: ((1, 1, s[2], s[3]), lambda x: x.expand(s)),
    "head dim not last": lambda s: ((s[0], s[1], s[3], s[2]), lambda x: x.mT),
    "flipped": lambda s: (s, lambda x: x.flip(2)),
}


@ON_BACKENDS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", ["after", "before"])
def test_memory_layout_changes_nothing(backend, layout, rope):
    """Gradients are compared on what is stored, so that an expanded tensor's are summed."""
    shapes = [tuple(x.shape) for x in qkv(length=70, size=8, value_size=6)]
    stored, views = zip(*(LAYOUTS[layout](shape) for shape in shapes), strict=True)
    generator = torch.Generator().manual_seed(6)
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in stored]

    def run(leaves: list[Tensor], **options: Any) -> dict[str, Tensor]:
        inputs = [view(x) for view, x in zip(views, leaves, strict=True)]
        out = linear_attention(*inputs, rotary=Rotary(8), rope=rope, **options)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        return {"out": out} | {f"grad of {n}": g for n, g in zip("qkv", gradients, strict=True)}

    got = run(leaves, backend=backend)
    wanted = run([x.detach().double().requires_grad_() for x in leaves], backend="reference")
    assert_close(got, wanted, TOLERANCE[torch.float32])


class LearnedMap(nn.Module):
    """A user's map with parameters, from D to another size."""

    def __init__(self, size: int, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, features)

    def forward(self, x: Tensor) -> Tensor:
        return softplus(self.linear(x))


@ON_BACKENDS
@pytest.mark.parametrize("rope", ROPES)
def test_a_users_feature_map_with_parameters_is_exact(backend, rope):
    """D′ ≠ D; each head of its own vector; the parameters' gradients pass gradcheck, or are the reference's."""
    dtype = widest(backend)
    phi = LearnedMap(6, 4).to(dtype)
    weight, bias = (x.detach().double().numpy() for x in phi.parameters())
    q, k, v = qkv(dtype=dtype)
    options = rope_options(rope, 6 if rope == "before" else 4) | {"backend": backend}
    got = linear_attention(q, k, v, feature_map=phi, **options)
    wanted = loop_linear(q, k, v, phi=lambda x: np.log1p(np.exp(weight @ x + bias)), rope=rope)["out"]
    assert relative(got, wanted) <= TOLERANCE[dtype]

    def op(q: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_attention(
            q, *(x.to(q.dtype) for x in (k, v)), feature_map=lambda x: softplus(x @ weight.mT + bias), **options
        )

    leaves = (q, *phi.parameters())
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(op, leaves, fast_mode=True)
    else:
        gradients = torch.autograd.grad(op(*leaves).square().sum(), leaves)
        leaves, options["backend"] = double(*leaves), "reference"
        references = torch.autograd.grad(op(*leaves).square().sum(), leaves)
        assert all(relative(a, b) <= TOLERANCE[dtype] for a, b in zip(gradients, references, strict=True))


@ON_BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_users_feature_map_sees_float32(backend, dtype):
    seen = []

    def phi(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return softplus(x)

    q, k, v = qkv(length=70, dtype=dtype)
    got = values_and_gradients(q, k, v, feature_map=phi, rotary=Rotary(6), backend=backend)
    wanted = values_and_gradients(*double(q, k, v), feature_map=softplus, rotary=Rotary(6), backend="reference")
    assert set(seen) == {torch.float32}
    assert_close(got, wanted, TOLERANCE[dtype])


@ON_BACKENDS
def test_a_feature_map_may_be_named_or_given(backend):
    """The registered object is the name's equal; one of the user's own is a callable like any other."""
    q, k, v = qkv(length=70, dtype=widest(backend))
    named = linear_attention(q, k, v, feature_map="squared_relu", backend=backend)
    given = feature_map("squared_relu")
    own = FeatureMap("own", given.forward, given.vjp)
    assert torch.equal(linear_attention(q, k, v, feature_map=given, backend=backend), named)
    for phi in (own, dataclasses.replace(own, name="elu1")):
        got = linear_attention(q, k, v, feature_map=phi, backend=backend)
        assert relative(got, named) <= TOLERANCE[widest(backend)]


def test_auto_is_one_of_the_backends_and_the_default():
    q, k, v = qkv(length=70, dtype=torch.float32)
    got = linear_attention(q, k, v, rotary=Rotary(6))
    assert torch.equal(got, linear_attention(q, k, v, rotary=Rotary(6), backend="auto"))
    wanted = loop_linear(q, k, v, rope="after")["out"]
    assert relative(got, wanted) <= TOLERANCE[torch.float32]


@ON_BACKENDS
def test_without_normalization_and_rotation_the_sum_is_bare(backend):
    """Distinguishes normalize=False from dividing by a constant or by D."""
    ones = torch.ones(1, 1, 3, 4)
    out = linear_attention(ones, ones, ones, feature_map="identity", normalize=False, backend=backend)
    assert out[0, 0, :, 0].tolist() == [4.0, 8.0, 12.0]
