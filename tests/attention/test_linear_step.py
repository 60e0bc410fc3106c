"""A token in one call of the kernel: what the long way computes, and only where nothing is out of the ordinary."""

import copy
import pickle
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lin_attn import LinearState, Rotary
from lin_attn.attention import LinearAttention, MultiHeadAttention
from lin_attn.kernels import cpu
from lin_attn.kernels.cpu import calls
from lin_attn.positions import XPos
from lin_attn.projection import FEW
from tests.helpers import TOLERANCE, relative

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason="the kernel is not built here")


@pytest.fixture
def counted(monkeypatch):
    counts = [0]

    def attend(*arguments):
        counts[0] += 1
        return calls.attend(*arguments)

    monkeypatch.setattr(cpu, "attend", attend)
    return counts


def after(attention, length, batch=1):
    """The state after so many random tokens."""
    x = torch.randn(batch, length, attention.query.in_features, dtype=attention.query.weight.dtype)
    with torch.no_grad():
        return attention(x, return_state=True)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_long_way_to_the_last_bit_and_the_float64_module(dtype, counted, monkeypatch):
    monkeypatch.setattr(calls, "poison", True)
    choice = random.Random(0)
    torch.manual_seed(0)
    for case in range(60):
        kv_heads, dim, batch = choice.randint(1, 3), 2 * choice.randint(1, 20), choice.randint(1, FEW[dtype])
        rope = choice.choice(("after", "before", "none"))
        partial = Rotary(dim, rotary_dim=2) if rope != "none" and choice.random() < 0.3 else None
        attention = LinearAttention(
            choice.randint(1, 60) if case % 4 else 320,  # on all threads
            kv_heads * choice.randint(1, 2),
            kv_heads,
            dim,
            feature_map=choice.choice(cpu.FEATURE_MAPS[1:]),
            rope=rope,
            rotary=partial,
            normalize=choice.random() < 0.7,
            bias=choice.random() < 0.5,
        ).to(dtype)
        torch.nn.init.constant_(attention.key.weight, 0.1)  # no denominator near zero: relu may leave one there
        torch.nn.init.constant_(attention.query.weight, 0.1)
        truth = copy.deepcopy(attention).double()
        inputs = torch.rand(4, batch, 1, attention.query.in_features).to(dtype)
        state = wanted_state = None
        with torch.no_grad():
            for x in inputs:
                long_out, long_state = MultiHeadAttention.forward(attention, x, state=state, return_state=True)
                out, state = attention(x, state=state, return_state=True)
                assert torch.equal(out, long_out)
                assert torch.equal(state.kv, long_state.kv)
                assert torch.equal(state.k_sum, long_state.k_sum)
                assert state.length == long_state.length
                if dtype == torch.float32:
                    wanted, wanted_state = truth(x.double(), state=wanted_state, return_state=True)
                    for got, true in zip((out, *state[:2]), (wanted, *wanted_state[:2]), strict=True):
                        assert relative(got, true) <= TOLERANCE[dtype]
        assert counted == [3 * (case + 1)]  # all but the first, which has no state


def test_an_earlier_state_stays_as_it_was(counted):
    attention = LinearAttention(24, 2)
    state = after(attention, 5)
    kept = [x.clone() for x in state[:2]]
    with torch.no_grad():
        x = torch.randn(1, 1, 24)
        first = attention(x, state=state, return_state=True)[0]
        assert torch.equal(first, attention(x, state=state, return_state=True)[0])
    assert all(torch.equal(got, before) for got, before in zip(state[:2], kept, strict=True))
    assert counted == [2]


class Louder(LinearAttention):
    def mix(self, q, k, v, **options):
        out, state = super().mix(q, k, v, **options)
        return 2 * out, state


def hooked(attention):
    attention.value.register_forward_hook(lambda layer, _, y: 2 * y)
    return attention


def replaced(attention):
    attention.mix = lambda q, k, v, *, key_mask, state: (v, state)
    return attention


def swapped(attention):
    attention.key = torch.nn.Bilinear(24, 24, 24)
    attention.key.forward = lambda x: 2 * x
    return attention


OUT_OF_THE_ORDINARY = {
    "subclass": lambda: Louder(24, 2),
    "hook": lambda: hooked(LinearAttention(24, 2)),
    "another mix": lambda: replaced(LinearAttention(24, 2)),
    "another layer": lambda: swapped(LinearAttention(24, 2)),
    "output_norm": lambda: LinearAttention(24, 2, output_norm=True),
    "xPos": lambda: LinearAttention(24, 2, rotary=XPos(12)),
    "backend": lambda: LinearAttention(24, 2, backend="chunked"),
    "feature map of one's own": lambda: LinearAttention(24, 2, feature_map=lambda x: x.sigmoid()),
    "feature map that the kernel has not": lambda: LinearAttention(24, 2, feature_map="exp"),
    "not causal": lambda: LinearAttention(24, 2, causal=False),
    "float64": lambda: LinearAttention(24, 2).double(),
}


@pytest.mark.parametrize("what", OUT_OF_THE_ORDINARY)
def test_a_module_out_of_the_ordinary_goes_the_long_way(what, counted):
    attention = OUT_OF_THE_ORDINARY[what]()
    x = torch.randn(1, 6, 24, dtype=attention.output.weight.dtype)
    with torch.no_grad():
        outs, state = [], None
        for token in x.split(1, dim=1):
            out, state = attention(token, state=state, return_state=True)
            outs.append(out)
        if attention.causal:
            assert relative(torch.cat(outs, 1), attention(x)) <= TOLERANCE[torch.float32]
    assert counted == [0]


def test_a_call_out_of_the_ordinary_goes_the_long_way(counted, monkeypatch):
    attention = LinearAttention(24, 2)
    state, x = after(attention, 5), torch.randn(1, 1, 24)
    with torch.no_grad():
        wanted = attention(x, state=state, return_state=True)[0]
    assert counted == [1]

    def same(out, expected=wanted):
        assert relative(out, expected) <= TOLERANCE[torch.float32]

    out, new = attention(x, state=state, return_state=True)
    same(out)
    (out.sum() + new.kv.sum()).backward()
    assert all(parameter.grad is not None for parameter in attention.parameters())
    with torch.no_grad():
        same(attention(x, state=state))
        same(attention(x, state=state, return_state=True, key_mask=torch.ones(1, 1, dtype=torch.bool))[0])
        assert attention(torch.randn(1, 2, 24), state=state, return_state=True)[0].shape == (1, 2, 24)
        assert attention(torch.randn(5, 1, 24), state=after(attention, 3, 5), return_state=True)[0].shape == (5, 1, 24)
        scattered = LinearState(state.kv.transpose(2, 3).contiguous().transpose(2, 3), *state[1:])
        same(attention(x, state=scattered, return_state=True)[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attention(x, state=state, return_state=True)[0].dtype == torch.bfloat16
        with FlopCounterMode(display=False) as counter:
            attention(x, state=state, return_state=True)
        assert counter.get_total_flops() > 4 * 2 * 24 * 24
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        same(compiled(x, state=state, return_state=True)[0])
        for name in ("chunked", "reference"):
            monkeypatch.setenv("LIN_ATTN_BACKEND", name)
            same(attention(x, state=state, return_state=True)[0])
    for parameter in attention.parameters():
        parameter.requires_grad_(False)
    monkeypatch.delenv("LIN_ATTN_BACKEND")
    learned = LinearState(state.kv.clone().requires_grad_(), *state[1:])
    assert attention(x, state=learned, return_state=True)[0].requires_grad
    assert attention(x.clone().requires_grad_(), state=state, return_state=True)[0].requires_grad
    for parameter in attention.parameters():
        parameter.requires_grad_()
        assert attention(x, state=state, return_state=True)[0].requires_grad
        parameter.requires_grad_(False)
    assert counted == [1]
    attention(x, state=state, return_state=True)  # nothing wants a gradient
    assert counted == [2]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda s: (s.kv, s.k_sum, 5), "state is a tuple; wanted the LinearState"),
        (lambda s: LinearState(s.kv[:, :1].contiguous(), s.k_sum, 5), "state.kv is torch.float32 of shape"),
        (lambda s: LinearState(s.kv, s.k_sum[..., :4].contiguous(), 5), "state.k_sum is torch.float32 of shape"),
        (lambda s: LinearState(s.kv.double(), s.k_sum.double(), 5), "state.kv is torch.float64"),
    ],
)
def test_a_state_of_another_module_is_the_long_ways_error(broken, message, counted):
    attention = LinearAttention(24, 2)
    state = broken(after(attention, 5))
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        attention(torch.randn(1, 1, 24), state=state, return_state=True)
    assert counted == [0]


@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 23), (24,)])
def test_a_wrong_x_is_the_long_ways_error(shape):
    attention = LinearAttention(24, 2)
    with torch.no_grad(), pytest.raises(ValueError, match="x has shape"):
        attention(torch.randn(shape), state=after(attention, 5), return_state=True)


def test_heads_that_do_not_divide_are_the_long_ways_error():
    attention = LinearAttention(24, 4, 2)
    state = after(attention, 5)
    attention.n_heads = 3
    attention.query.weight = torch.nn.Parameter(attention.query.weight[:18].detach().clone())
    attention.output.weight = torch.nn.Parameter(attention.output.weight[:, :18].detach().clone())
    with torch.no_grad(), pytest.raises(ValueError, match="divisor of the 3 heads"):
        attention(torch.randn(1, 1, 24), state=state, return_state=True)


def test_options_changed_later_are_the_long_ways():
    attention = LinearAttention(24, 2, rope="none")
    attention.rotary, attention.normalize = Rotary(12), None
    state, x = after(attention, 5), torch.randn(1, 1, 24)
    with torch.no_grad():
        out, new = attention(x, state=state, return_state=True)
        wanted, wanted_new = MultiHeadAttention.forward(attention, x, state=state, return_state=True)
        assert torch.equal(out, wanted)
        assert torch.equal(new.kv, wanted_new.kv)
        attention.rope = "bogus"
        with pytest.raises(ValueError, match="rope is 'bogus'"):
            attention(x, state=state, return_state=True)


def test_a_copy_takes_the_same_way(counted):
    attention = LinearAttention(24, 2)
    state, x = after(attention, 5), torch.randn(1, 1, 24)
    with torch.no_grad():
        for copied in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
            copied(x, state=state, return_state=True)
    assert counted == [2]


@pytest.mark.parametrize("name", ["query", "key", "value", "output"])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_parameters_of_another_size_are_read_no_further_than_they_go(name, part, counted):
    attention = LinearAttention(24, 2, bias=True)
    state, x = after(attention, 5), torch.randn(1, 1, 24)
    layer = getattr(attention, name)
    smaller = layer.weight[:, :12] if part == "weight" and name == "output" else getattr(layer, part)[:12]
    setattr(layer, part, torch.nn.Parameter(smaller.detach().contiguous()))
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError)):
        attention(x, state=state, return_state=True)
    assert counted == [0]
