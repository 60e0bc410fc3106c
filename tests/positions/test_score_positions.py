"""Encodings that add to the scores: each equals explicit loops, in value and gradient, whole, in pieces and padded."""

import pytest
import torch

from lin_attn import positions as P
from lin_attn import softmax_attention
from tests.helpers import relative
from tests.positions.oracles import CASES, HEADS, SIZE, E, built

EXACT = 1e-11  # float64
EVERY = pytest.mark.parametrize("name", CASES)


def inputs(batch=2, kv_heads=HEADS, length=6, keys=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = ((HEADS, length), (kv_heads, keys or length), (kv_heads, keys or length))
    return [
        torch.randn(batch, *shape, SIZE, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


@EVERY
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
@pytest.mark.parametrize("masked", [True, False])
def test_equals_explicit_loops_in_value_and_gradient(name, causal, kv_heads, masked):
    module = built(name, causal=causal)
    q, k, v = inputs(kv_heads=kv_heads)
    mask = None
    if masked:
        mask = torch.tensor([[True] * 6, [False, True, True, False, True, True]])
    leaves = [q, k, v, *module.parameters()]
    got = softmax_attention(q, k, v, positions=module, causal=causal, key_mask=mask)
    wanted = CASES[name].loops(module)(q, k, v, causal=causal, key_mask=mask)
    assert relative(got, wanted) <= EXACT
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True) for out in (got, wanted)]
    for a, b in zip(*gradients, strict=True):
        assert relative(a, b) <= EXACT
        assert b.norm() > 1e-3


@EVERY
def test_other_keys_than_queries_are_placed_from_0_on(name):
    """As cross-attention has them."""
    module = built(name, causal=False)
    q, k, v = inputs(length=3, keys=7)
    got = softmax_attention(q, k, v, positions=module, causal=False)
    assert relative(got, CASES[name].loops(module)(q, k, v, causal=False)) <= EXACT


@EVERY
@pytest.mark.parametrize("cuts", [[1] * 9, [4, 1, 1, 1, 1, 1], [3, 0, 5, 1], [9]])
def test_pieces_with_the_cache_carried_equal_the_whole(name, cuts):
    module = built(name)
    q, k, v = inputs(length=9)
    mask = torch.tensor([[False, False, True, True, True, True, True, True, True], [True] * 9])
    state, outs = None, []
    for rows in torch.arange(9).split(cuts):
        piece = (x[:, :, rows] for x in (q, k, v))
        out, state = softmax_attention(*piece, positions=module, key_mask=mask[:, rows], state=state, return_state=True)
        outs.append(out)
    whole = softmax_attention(q, k, v, positions=module, key_mask=mask)
    assert relative(torch.cat(outs, dim=2), whole) <= EXACT


@EVERY
def test_left_padding_changes_no_output_and_no_gradient_whatever_stands_in_it(name):
    module = built(name)
    q, k, v = inputs(batch=1)
    alone = softmax_attention(q, k, v, positions=module)
    mask = torch.arange(10)[None] >= 4
    nan = torch.full((1, HEADS, 4, SIZE), float("nan"), dtype=torch.float64)
    padded = [torch.cat((torch.zeros_like(nan), q), dim=2), *(torch.cat((nan, x), dim=2) for x in (k, v))]
    out = softmax_attention(*padded, positions=module, key_mask=mask)
    assert not out[:, :, :4].any()
    assert relative(out[:, :, 4:], alone) <= EXACT
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(alone.square().sum(), (q, k, v)),
        strict=True,
    ):
        assert relative(a, b) <= EXACT


@EVERY
def test_scores_depend_on_distance_only(name):
    """Queries at 5 … 7 over keys at 0 … 7 have the terms of the last of 8 queries."""
    module = built(name)
    q, k, _ = inputs(length=8)
    whole = module.scores(q, k, 0).expand(2, HEADS, 8, 8)
    late = module.scores(q[:, :, 5:], k, 5).expand(2, HEADS, 3, 8)
    for m in (0, 1, 2):
        assert relative(late[:, :, m, : 6 + m], whole[:, :, 5 + m, : 6 + m]) <= EXACT


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_dtype_is_near_float64(name, dtype):
    """Parameters stay as they are, as under autocast; terms are in the inputs' dtype."""
    module = built(name)
    q, k, v = (x.detach() for x in inputs(length=40, dtype=dtype))
    got = softmax_attention(q, k, v, positions=module.float())
    wanted = softmax_attention(q.double(), k.double(), v.double(), positions=module.double())
    assert got.dtype == dtype
    # Several roundings of scores as large as 10 in bfloat16, whose eighth bit is then a twentieth.
    assert relative(got, wanted) <= {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]


@EVERY
def test_traced_without_a_graph_break_the_numbers_are_the_same(name):
    torch._dynamo.reset()
    module = built(name).float()
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="aot_eager")
    q, k, v = inputs(length=9, dtype=torch.float32)
    got, wanted = (op(q, k, v, positions=module) for op in (compiled, softmax_attention))
    assert relative(got, wanted) <= 1e-5
    for a, b in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, wanted)), strict=True):
        assert relative(a, b) <= 1e-5


def test_no_three_axes_of_length_length_and_head_dim_are_ever_formed():
    """Each encoding keeps to numbers a query and key: at N = 64 and D = 64 a factor of 64 would show."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return out

    N, D = 64, 64
    q, k, v = torch.randn(3, 1, 1, N, D).requires_grad_().unbind(0)
    for module in (
        P.ShawPositions(D, causal=False),
        P.TransformerXLPositions(D, 1, D, causal=False),
        P.T5Positions(1, causal=False),
        P.DebertaPositions(D, 1, D, N, causal=False),
        P.AlibiPositions(1),
    ):
        with Watch():
            softmax_attention(q, k, v, positions=module, causal=False).sum().backward(retain_graph=True)
        assert largest <= 4 * N * D


def test_alibi_slopes_are_those_of_the_paper_and_of_its_code():
    assert P.alibi_slopes(8) == tuple(2.0**-h for h in range(1, 9))
    assert P.alibi_slopes(1) == (2.0**-8,)
    assert P.alibi_slopes(16) == pytest.approx([2 ** (-h / 2) for h in range(1, 17)])
    # 8 of 8 heads, then every other one of 16.
    assert P.alibi_slopes(12) == pytest.approx([2.0**-h for h in range(1, 9)] + [2 ** -(h / 2) for h in (1, 3, 5, 7)])
    assert len({P.alibi_slopes(n)[-1] for n in (5, 6, 7)}) == 3


def test_t5_buckets_begin_where_whole_numbers_say():
    """Both halves of 32 buckets up to 128: 8 exact ones, then 8 · 2^(j/2)."""
    module = P.T5Positions(1, 32, 128, causal=False)
    assert module.starts == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)
    assert module.buckets(torch.tensor([0, 7, 8, 11, 12, 90, 91, 10**6, -1, -91])).tolist() == [
        0, 7, 8, 8, 9, 14, 15, 15, 17, 31,
    ]  # fmt: skip
    assert P.T5Positions(1, 32, 128, causal=True).buckets(torch.tensor([-5, 0, 15, 16, 19, 128])).tolist() == [
        0, 0, 15, 16, 17, 31,
    ]  # fmt: skip


WRONG = {
    "shaw without a distance": ("max_distance", lambda: P.ShawPositions(4, max_distance=0, causal=True)),
    "odd sines": ("d_model", lambda: P.TransformerXLPositions(9, 3, 4, causal=True)),
    "odd buckets for two sides": ("n_buckets", lambda: P.T5Positions(2, 7, causal=False)),
    "one bucket": ("n_buckets", lambda: P.T5Positions(2, 1, causal=True)),
    "all buckets exact": ("max_distance", lambda: P.T5Positions(2, 32, 16, causal=True)),
    "table of the other direction": (
        "table",
        lambda: P.DebertaPositions(E, 3, 4, 8, causal=False, table=torch.nn.Embedding(8, E)),
    ),
    "no head": ("n_heads", lambda: P.AlibiPositions(0)),
    "no position": ("positions", lambda: softmax_attention(*inputs(), positions="t5")),
    "one-sided positions for both sides": (
        "positions",
        lambda: softmax_attention(*inputs(), positions=built("shaw"), causal=False),
    ),
    "values and xpos": (
        "positions",
        lambda: softmax_attention(*inputs(), positions=built("shaw"), rotary=P.XPos(SIZE)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong):
    argument, call = WRONG[wrong]
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        call()
