"""Compilable: torch.compile(fullgraph=True), torch.export and activation checkpointing give the same numbers."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lin_attn import LinearState, Rotary, linear_attention, softmax_attention
from lin_attn.attention import LinearAttention, SoftmaxAttention
from tests.helpers import (
    BACKENDS,
    LINEAR_BACKENDS,
    TOLERANCE,
    assert_close,
    qkv,
    random_state,
    relative,
    widest,
)

FLOAT32 = TOLERANCE[torch.float32]  # a compiler may sum in another order

OPS: dict[str, Callable[..., Tensor]] = {
    f"linear {backend}": partial(linear_attention, backend=backend, rotary=Rotary(6)) for backend in BACKENDS
} | {"softmax": partial(softmax_attention, rotary=Rotary(6))}
VARIANTS = OPS | {
    f"linear {backend} before, all keys": partial(
        linear_attention, backend=backend, rotary=Rotary(6), rope="before", causal=False
    )
    for backend in LINEAR_BACKENDS
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def results(op: Callable[..., Tensor], length: int, **options: object) -> dict[str, Tensor]:
    inputs = qkv(length=length, dtype=torch.float32)
    out = op(*inputs, **options)
    return {"out": out} | dict(zip("qkv", torch.autograd.grad(out.square().sum(), inputs), strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_traced_without_a_graph_break_the_numbers_are_the_same(name):
    """Forward and backward, and for a second and third length, whose shapes have become symbols."""
    compiled = torch.compile(VARIANTS[name], fullgraph=True, backend="aot_eager")
    for length in (70, 33, 129):
        mask = torch.rand(2, length, generator=torch.Generator().manual_seed(5)) > 0.3
        got, wanted = (results(op, length, key_mask=mask) for op in (compiled, VARIANTS[name]))
        assert_close(got, wanted, FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_pass_through_a_traced_graph(backend):
    """Prefill, then single tokens: the length is a number that changes from call to call."""

    def step(q: Tensor, k: Tensor, v: Tensor, state: LinearState | None) -> tuple[Tensor, LinearState]:
        return linear_attention(q, k, v, state=state, return_state=True, rotary=Rotary(6), backend=backend)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v = (x.detach() for x in qkv(length=75, dtype=torch.float32))
    wanted, last = step(q, k, v, None)
    outs, state = [], None
    for piece in (slice(0, 70), *(slice(n, n + 1) for n in range(70, 75))):
        out, state = compiled(q[:, :, piece], k[:, :, piece], v[:, :, piece], state)
        outs.append(out)
    assert state.length == last.length == 75
    assert relative(torch.cat(outs, dim=2), wanted) <= FLOAT32
    assert relative(state.kv, last.kv) <= FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_inductor_gives_the_same_numbers(backend):
    """The real compiler, forward and backward: what stands around the op is fused. Two lengths, one compilation."""

    def step(x: Tensor, scale: Tensor, kv: Tensor, k_sum: Tensor) -> tuple[Tensor, LinearState]:
        q, k, v = (x * scale).chunk(3, dim=-1)
        state = LinearState(kv, k_sum, 11)
        return linear_attention(q, k, v.sin(), state=state, return_state=True, rotary=Rotary(6), backend=backend)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for length in (70, 33):
        q, k, _ = qkv(heads=2, length=length, value_size=6, dtype=torch.float32)
        state = random_state(k, k)
        # What the op promises of its results' strides must hold whatever those of the incoming state are.
        leaves = [torch.cat((q, k, k + q), dim=-1), torch.ones(18, requires_grad=True), state.kv.mT, state.k_sum]
        pairs = [(out.sin(), after.kv.sin()) for out, after in (compiled(*leaves), step(*leaves))]
        assert relative(pairs[0][0], pairs[1][0]) <= FLOAT32
        assert relative(pairs[0][1], pairs[1][1]) <= FLOAT32
        gradients = (torch.autograd.grad(out.sum() + kv.sum(), (leaves[1], q, state.kv)) for out, kv in pairs)
        assert all(relative(a, b) <= FLOAT32 for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_the_ops_keep_what_they_promise_to_the_compiler(backend, layout):
    """torch's own check of a custom op: schema, autograd, fake tensors with their strides, dynamic shapes."""
    q, k, v = qkv(length=5, dtype=torch.float32)
    if layout == "transposed":  # as it comes out of a projection, heads within positions
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    state = random_state(k, v)
    kv = state.kv if layout == "contiguous" else state.kv.detach().mT.contiguous().mT.requires_grad_()
    cos, sin = Rotary(6).tables(5, 0, device=q.device, dtype=q.dtype)
    mask = torch.tensor([[True, False, True, True, True]] * 2)
    arguments = (q, k, v, mask, kv, state.k_sum, cos, sin, "elu1", "after", True, True, 1e-6)
    torch.library.opcheck(getattr(torch.ops.lin_attn, f"linear_{backend}").default, arguments)


class Wrapped(nn.Module):
    """An op as a module, which is what torch.export takes."""

    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.op(q, k, v)


@pytest.mark.parametrize("name", OPS)
def test_an_exported_op_serves_any_length(name):
    length = torch.export.Dim("length", min=2, max=4096)
    axes = ({2: length},) * 3
    program = torch.export.export(Wrapped(OPS[name]), qkv(length=70, dtype=torch.float32), dynamic_shapes=axes)
    for n in (70, 33, 129):
        inputs = qkv(length=n, dtype=torch.float32)
        assert relative(program.module()(*inputs), OPS[name](*inputs)) <= FLOAT32


def test_an_exported_op_serves_lengths_whose_results_are_large():
    op = partial(linear_attention, backend="cpu")
    length = torch.export.Dim("length", min=2, max=2**20)
    inputs = tuple(torch.randn(1, 4, 70, 64) for _ in range(3))
    program = torch.export.export(Wrapped(op), inputs, dynamic_shapes=({2: length},) * 3)
    inputs = tuple(torch.randn(1, 4, 4200, 64) for _ in range(3))
    assert relative(program.module()(*inputs), op(*inputs)) <= FLOAT32


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes are constants of a trace
@pytest.mark.parametrize("length", [1, 70])
def test_a_jit_trace_keeps_the_computation(length):
    op = OPS["linear cpu"]
    traced = torch.jit.trace(Wrapped(op), qkv(length=length, dtype=torch.float32), check_trace=False)
    inputs = qkv(length=length, dtype=torch.float32)
    assert relative(traced(*inputs), op(*inputs)) <= FLOAT32


@pytest.mark.parametrize("module", [LinearAttention, SoftmaxAttention])
def test_an_exported_and_a_traced_module_give_the_same(module):
    torch.manual_seed(0)
    attention = module(16, 4, 2, output_norm=True)
    x = torch.randn(2, 70, 16)
    length = torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(attention, (x,), dynamic_shapes=({1: length},)).module()
    traced = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for n in (33, 70):
        x = torch.randn(2, n, 16, requires_grad=True)
        wanted = attention(x)
        assert relative(exported(x), wanted) <= FLOAT32
        got = traced(x)
        assert relative(got, wanted) <= FLOAT32
        leaves = [x, *attention.parameters()]
        pairs = zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (got, wanted)), strict=True)
        assert all(relative(a, b) <= 10 * FLOAT32 for a, b in pairs)


@pytest.mark.parametrize("counted", ["forward", "backward", "both"])
def test_a_mode_that_watches_operators_sees_the_fused_ones_and_changes_no_bit(counted):
    """Where nobody watches, autograd alone is told of them."""
    inputs = qkv(length=70, dtype=torch.float32)
    weights = torch.randn(2, 4, 70, 5, generator=torch.Generator().manual_seed(2))
    plain = linear_attention(*inputs, rotary=Rotary(6), backend="cpu")
    assert "linear_cpu" not in str(type(plain.grad_fn))
    parts = ("forward", "backward")
    counters = [FlopCounterMode(display=False) if counted in (part, "both") else None for part in parts]
    with counters[0] or nullcontext():
        out = linear_attention(*inputs, rotary=Rotary(6), backend="cpu")
    with counters[1] or nullcontext():
        grads = torch.autograd.grad(out, inputs, weights)
    for counter, name in zip(counters, ("linear_cpu", "linear_cpu_backward"), strict=True):
        if counter is not None:
            seen = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
            assert [op for op in seen if op.endswith(f"lin_attn.{name}")], seen
    assert torch.equal(out, plain)
    wanted = torch.autograd.grad(plain, inputs, weights)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_the_fused_gradient_is_not_differentiated_again_and_says_so():
    inputs = qkv(length=9, dtype=torch.float32)
    out = linear_attention(*inputs, rotary=Rotary(6), backend="cpu")
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(grads[0].sum(), inputs[0])


def test_gradients_of_several_outputs_at_once_are_those_of_each():
    """torch runs backward once, on a batch of cotangents that looks like one."""
    inputs = qkv(length=9, dtype=torch.float32)
    out = linear_attention(*inputs, rotary=Rotary(6), backend="cpu")
    cotangents = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(1))
    at_once = torch.autograd.grad(out, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(cotangents):
        alone = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
        assert all(relative(a[i], b) <= FLOAT32 for a, b in zip(at_once, alone, strict=True))


@pytest.mark.parametrize("transform", ["grad", "vjp", "functionalize"])
def test_a_transform_leaves_nothing_behind_for_the_next_call(transform):
    """Neither angles nor sums of zero that were made within it: they are of no use outside."""
    q, k, v = (x.detach() for x in qkv(length=11, dtype=torch.float32))
    rotary = Rotary(6, 100.0 + len(transform))  # whose angles nobody has asked for yet
    op = partial(linear_attention, k=k, v=v, rotary=rotary)
    if transform == "functionalize":
        torch.func.functionalize(lambda q: op(q, backend="reference"))(q)
    elif transform == "vjp":
        torch.func.vjp(lambda q: op(q, backend="reference"), q)
    else:
        torch.func.grad(lambda q: op(q, backend="reference").sum())(q)
    assert all(x.data_ptr() for x in rotary.tables(11, 0, device=q.device, dtype=q.dtype))
    assert relative(op(q, backend="cpu"), op(q, backend="reference")) <= FLOAT32


def test_inputs_that_change_before_backward_are_an_error():
    q, k, v = qkv(length=9, dtype=torch.float32)
    k = k * 1
    out = linear_attention(q, k, v, rotary=Rotary(6), backend="cpu")
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(backend, reentrant):
    q, k, v = qkv(length=70, dtype=widest(backend))
    op = partial(linear_attention, rotary=Rotary(6), backend=backend)
    weights = torch.randn(2, 4, 70, 5, generator=torch.Generator().manual_seed(2), dtype=q.dtype)
    plain = torch.autograd.grad((op(q, k, v) * weights).sum(), (q, k, v))
    for x in (q, k, v):
        x.grad = None
    (checkpoint(op, q, k, v, use_reentrant=reentrant) * weights).sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip((q, k, v), plain, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing_where_only_the_state_has_a_gradient(backend):
    """What is saved is read once, though the output's gradient has to be made up."""
    k, v = qkv(length=70, dtype=widest(backend))[1:]

    def state(k: Tensor, v: Tensor) -> Tensor:
        q = k.repeat_interleave(2, dim=1)
        return linear_attention(q, k, v, rotary=Rotary(6), return_state=True, backend=backend)[1].kv.square().sum()

    plain = torch.autograd.grad(state(k, v), (k, v))
    got = torch.autograd.grad(checkpoint(state, k, v, use_reentrant=False), (k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
