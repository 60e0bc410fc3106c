"""A sequence in any pieces, the state carried, equals the whole; states are values: kept, branched, differentiated."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from lin_attn import KVCache, LinearState, Rotary, linear_attention, softmax_attention
from tests.helpers import (
    BACKENDS,
    FLOAT64_BACKENDS,
    LINEAR_BACKENDS,
    ROPES,
    TOLERANCE,
    double,
    qkv,
    random_state,
    relative,
    rope_options,
    takes,
    widest,
)

PIECES = {"uneven": (1, 63, 1, 64, 0, 2, 19), "halves": (75, 75), "tokens": (1,) * 150}
OPS: dict[str, Callable[..., Any]] = {
    f"linear {backend} {rope}": partial(linear_attention, backend=backend, **rope_options(rope, 6))
    for backend in BACKENDS
    for rope in ROPES
}
OPS |= {
    f"linear {backend} {rope} a user's map": partial(
        linear_attention, backend=backend, feature_map=softplus, **rope_options(rope, 6)
    )
    for backend in BACKENDS
    for rope in ("after", "before")
}
OPS |= {"softmax": softmax_attention, "softmax rotary": partial(softmax_attention, rotary=Rotary(6))}


def in_pieces(ops: list[Callable[..., Any]], inputs: tuple[Tensor, ...], sizes: tuple[int, ...], mask: Tensor | None):
    """The output and last state of a sequence fed in pieces, to each op in turn."""
    state, outs, start = None, [], 0
    for i, size in enumerate(sizes):
        piece = slice(start, start + size)
        piece_mask = None if mask is None or mask[:, piece].all() else mask[:, piece]
        out, state = ops[i % len(ops)](
            *(x[:, :, piece] for x in inputs), key_mask=piece_mask, state=state, return_state=True
        )
        outs.append(out)
        start += size
    return torch.cat(outs, dim=2), state


def some_mask(length: int) -> Tensor:
    """Hidden keys in the first half only: some pieces have a mask and some do not."""
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(5)) > 0.3
    mask[:, length // 2 :] = True
    return mask


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_any_pieces_with_the_state_carried_equal_the_whole(name, pieces, masked, training):
    """Outputs and states; in training the gradients through the chain of states as well. To rounding."""
    sizes = PIECES[pieces]
    inputs = qkv(length=sum(sizes), dtype=widest(name))
    mask = some_mask(sum(sizes)) if masked else None
    with torch.set_grad_enabled(training):
        whole, last = OPS[name](*inputs, key_mask=mask, return_state=True)
        out, state = in_pieces([OPS[name]], inputs, sizes, mask)
    tolerance = TOLERANCE[widest(name)]
    assert relative(out, whole) <= tolerance
    assert state.length == last.length == sum(sizes)
    assert all(relative(a, b) <= tolerance for a, b in zip(state[:2], last[:2], strict=True))
    if training:
        weights = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator().manual_seed(3))
        got = torch.autograd.grad((out * weights).sum(), inputs)
        wanted = torch.autograd.grad((whole * weights).sum(), inputs)
        assert all(relative(a, b) <= tolerance for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("backends", [FLOAT64_BACKENDS, BACKENDS], ids=["in float64", "in float32"])
@pytest.mark.parametrize("rope", ROPES)
def test_backends_exchange_states(rope, backends):
    dtype = torch.float64 if backends == FLOAT64_BACKENDS else torch.float32
    inputs, options = qkv(length=150, dtype=dtype), rope_options(rope, 6)
    ops = [partial(linear_attention, backend=backend, **options) for backend in backends]
    out, state = in_pieces(ops, inputs, PIECES["uneven"], None)
    whole, last = linear_attention(*double(*inputs), return_state=True, backend="reference", **options)
    assert relative(out, whole) <= TOLERANCE[dtype]
    assert relative(state.kv, last.kv) <= TOLERANCE[dtype]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_zeros_is_no_state_but_its_length_shifts_positions(backend, causal):
    """Rotated scores depend on m − n only: a start at position 1,000,000 gives the same output."""
    q, k, v = qkv(length=70, dtype=widest(backend))
    options = {"rotary": Rotary(6), "backend": backend, "causal": causal}
    zeros = LinearState(k.new_zeros(2, 2, 6, 5), k.new_zeros(2, 2, 6), 1_000_000)
    out, after = linear_attention(q, k, v, state=zeros, return_state=True, **options)
    plain, start = linear_attention(q, k, v, return_state=True, **options)
    tolerance = 1e-9 if widest(backend) == torch.float64 else TOLERANCE[torch.float32]
    assert relative(out, plain) <= tolerance, "float64 angles at 10⁶ are exact to 10⁻¹⁰"
    assert after.length == 1_000_070
    assert relative(after.kv, start.kv) > 0.1, "the state holds rotated keys"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_decodes_8192_tokens_as_float32_does(backend):
    """Sums in bfloat16 would stop growing after a few hundred tokens. 1e-2: the output is rounded to 8 bits."""
    length = 8192
    q, k, v = (x.detach() for x in qkv(1, 2, 1, length, 8, 8, dtype=torch.bfloat16))
    options = {"rotary": Rotary(8), "backend": backend}
    with torch.inference_mode():
        out, state = in_pieces([partial(linear_attention, **options)], (q, k, v), (1,) * length, None)
        wide, last = linear_attention(q.float(), k.float(), v.float(), return_state=True, rotary=Rotary(8))
    assert relative(out, wide) <= TOLERANCE[torch.bfloat16]
    assert relative(out[:, :, -100:], wide[:, :, -100:]) <= TOLERANCE[torch.bfloat16]
    assert relative(state.k_sum, last.k_sum) <= 1e-4, "8192 additions in float32"


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_a_million_tokens_of_carried_state_stay_finite_and_exact(backend):
    """Sixteen pieces of 65,536 bfloat16 tokens. The mean of random values must come out as float64 has it."""
    state = total = None
    weight, length = 0.0, 65_536
    q = torch.zeros(1, 1, length, 4, dtype=torch.bfloat16)
    for seed in range(16):
        _, k, v = (x.detach() for x in qkv(1, 1, 1, length, 4, 4, dtype=torch.bfloat16, seed=seed))
        out, state = linear_attention(q, k, v + 1, state=state, return_state=True, backend=backend)
        phi = torch.where(k >= 0, k.double() + 1, k.double().exp())
        total = (phi.mT @ (v + 1).double()).sum(2) + (0 if total is None else total)
        weight += phi.sum().item()
    assert state.length == 16 * length
    assert relative(out[:, :, -1], total / weight) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(b, d) for b in BACKENDS for d in (torch.float64, torch.float32, torch.bfloat16) if takes(b, dtype=d)],
    ids=str,
)
def test_inputs_and_states_are_never_written_to(backend, rope, dtype, length):
    """Values and version counters, with and without gradients; the new state shares no memory with the old."""
    q, k, v = qkv(length=length, dtype=dtype)
    state, mask = random_state(k, v), torch.rand(2, length) > 0.3
    tensors = (q, k, v, state.kv, state.k_sum, mask)
    copies, versions = [x.detach().clone() for x in tensors], [x._version for x in tensors]
    for training in (True, False):
        with torch.set_grad_enabled(training):
            out, after = linear_attention(
                q, k, v, state=state, key_mask=mask, return_state=True, backend=backend, **rope_options(rope, 6)
            )
        if training:
            (out.sum() + after.kv.sum() + after.k_sum.sum()).backward()
    assert versions == [x._version for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert after.kv.data_ptr() != state.kv.data_ptr()
    assert after.k_sum.data_ptr() != state.k_sum.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [0, 1, 5])
def test_what_is_written_into_a_new_state_is_in_no_other_calls_beginning(backend, length):
    """Sums of zero are made once for all calls."""
    q, k, v = (x.detach() for x in qkv(length=length, dtype=widest(backend)))
    out, state = linear_attention(q, k, v, return_state=True, backend=backend)
    kept = state.kv.clone(), state.k_sum.clone()
    state.kv.fill_(float("nan"))
    state.k_sum.fill_(float("nan"))
    again, fresh = linear_attention(q, k, v, return_state=True, backend=backend)
    assert torch.equal(again, out)
    assert torch.equal(fresh.kv, kept[0])
    assert torch.equal(fresh.k_sum, kept[1])


@pytest.mark.parametrize("name", OPS)
def test_a_state_can_be_branched(name):
    """Two continuations of one prefix, in either order, as beams have them."""
    prefix, one, two = (qkv(length=n, seed=i, dtype=widest(name)) for i, n in enumerate((9, 3, 1)))
    _, state = OPS[name](*prefix, return_state=True)
    first = OPS[name](*one, state=state)
    other = OPS[name](*two, state=state)
    assert torch.equal(OPS[name](*one, state=state), first)
    whole = OPS[name](*(torch.cat((a, b), dim=2) for a, b in zip(prefix, two, strict=True)))
    assert relative(other, whole[:, :, 9:]) <= TOLERANCE[widest(name)]


@pytest.mark.parametrize("name", [name for name in OPS if name.startswith("softmax")])
def test_softmax_writes_to_neither_inputs_nor_cache(name):
    q, k, v = qkv(length=9)
    _, cache = OPS[name](q, k, v, return_state=True)
    tensors = (q, k, v, cache.k, cache.v)
    copies, versions = [x.detach().clone() for x in tensors], [x._version for x in tensors]
    OPS[name](q, k, v, state=cache).sum().backward()
    assert versions == [x._version for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_states_are_immutable_and_know_their_bytes():
    q, k, v = qkv(length=9, dtype=torch.float32)
    mask = torch.ones(2, 9, dtype=torch.bool)
    _, state = linear_attention(q, k, v, return_state=True)
    _, cache = softmax_attention(q, k, v, key_mask=mask, return_state=True)
    for held in (state, cache):
        with pytest.raises(AttributeError):
            held.length = 0
    assert state.nbytes == 2 * 2 * (6 * 5 + 6) * 4
    assert cache.nbytes == 2 * 2 * 9 * (6 + 5) * 4 + 2 * 9
    assert isinstance(cache, KVCache)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("only", ["out", "kv", "k_sum"])
def test_a_loss_on_one_result_alone_has_the_references_gradients(backend, only):
    """The others' gradients are then undefined, not zero tensors."""
    inputs = qkv(length=70, dtype=widest(backend))

    def gradients(backend: str, *inputs: Tensor) -> list[Tensor]:
        out, after = linear_attention(*inputs, rotary=Rotary(6), return_state=True, backend=backend)
        loss = {"out": out, "kv": after.kv, "k_sum": after.k_sum}[only].square().sum()
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]

    for got, wanted in zip(gradients(backend, *inputs), gradients("reference", *double(*inputs)), strict=True):
        assert relative(got, wanted) <= TOLERANCE[widest(backend)]
