"""A few tokens' projection by the kernel: the float64 product, and only where nobody but the caller looks on."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from lin_attn.kernels import cpu
from lin_attn.kernels.cpu import calls
from lin_attn.projection import FEW, Projection, project, project_gelu
from tests.helpers import TOLERANCE, relative

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason="the kernel is not built here")
MANY = 100_000  # weights, enough for two threads


def close(got, wanted, tolerance):
    assert relative(got, wanted) <= tolerance


@pytest.fixture
def counted(monkeypatch):
    counts = [0]

    def project(x, layers, **options):
        counts[0] += 1
        return calls.project(x, layers, **options)

    monkeypatch.setattr(cpu, "project", project)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_float64_product_with_poisoned_results(dtype, monkeypatch):
    monkeypatch.setattr(calls, "poison", True)
    choice, generator = random.Random(0), torch.Generator().manual_seed(0)
    for case in range(120):
        inputs, outputs = choice.randint(1, 80), choice.randint(1, 80)
        if case % 4 == 0:  # on all threads, with parts that do not divide
            inputs, outputs = choice.randint(300, 400), choice.randint(300, 400)
        shape = choice.choice([(1, 1), (3,), (2, 2), (1,), ()])
        x = torch.randn(*shape, inputs, generator=generator).to(dtype)
        layers = []
        for size in (outputs, choice.randint(1, 80), choice.randint(1, 80))[: choice.randint(1, 3)]:
            weight = (torch.randn(size, inputs, generator=generator) * inputs**-0.5).to(dtype)
            layers.append((weight, torch.randn(size, generator=generator).to(dtype) if choice.random() < 0.5 else None))
        gelu = choice.random() < 0.5
        computed = cpu.project(x, layers, gelu=gelu)
        for (weight, bias), y in zip(layers, computed, strict=True):
            wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            assert y.dtype == dtype
            close(y, F.gelu(wanted) if gelu else wanted, TOLERANCE[dtype])


def test_gelu_to_the_last_digits_where_it_is_small_too():
    """1 + erf would lose them."""
    x = torch.cat([torch.linspace(-13, 13, 20_001), torch.tensor([1e30, -1e30, torch.inf, torch.nan])])[:, None]
    computed = cpu.project(x, [(torch.ones(1, 1), None)], gelu=True)[0]
    wanted = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    large = ~(x.abs() <= 4.8)
    torch.testing.assert_close(computed[~large].double(), wanted[~large], rtol=2e-6, atol=0)
    torch.testing.assert_close(computed[large].double(), wanted[large], rtol=2e-5, atol=1e-37, equal_nan=True)


def test_the_same_on_one_thread_and_on_all():
    x, layers = torch.randn(1, 1, 256), [(torch.randn(MANY // 512 + 1 + i, 256), None) for i in range(2)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(torch.cat(cpu.project(x, layers, gelu=True), -1))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_takes_a_few_tokens(dtype, counted):
    layer = Projection(24, 40).to(dtype)
    with torch.no_grad():
        for tokens in range(1, FEW[dtype] + 1):
            layer(torch.randn(1, tokens, 24, dtype=dtype))
            assert counted == [tokens]
        layer(torch.randn(1, FEW[dtype] + 1, 24, dtype=dtype))
    assert counted == [FEW[dtype]]
    with torch.inference_mode():
        layer(torch.randn(1, 24, dtype=dtype))
    assert counted == [FEW[dtype] + 1]


def test_whoever_looks_on_sees_torchs_linear(counted, monkeypatch):
    layer, x = Projection(24, 40), torch.randn(1, 1, 24)
    wanted = F.linear(x, layer.weight, layer.bias)

    out = layer(x)
    out.sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 24 * 40
        close(torch.func.vmap(layer)(x.expand(3, 1, 24)), wanted.expand(3, 1, 40), TOLERANCE[torch.float32])
        assert torch.jit.trace(layer, x, check_trace=False)(x.expand(5, 1, 24)).shape == (5, 1, 40)
        with torch.autograd.forward_ad.dual_level():
            dual = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
            close(tangent, layer.weight.sum(1).expand(1, 1, 40), TOLERANCE[torch.float32])
        layer(torch.randn(24, 4).t())  # not contiguous
        assert layer(x[:, :0]).shape == (1, 0, 40)
        monkeypatch.setenv("LIN_ATTN_BACKEND", "chunked")
        assert torch.equal(layer(x), wanted)
    assert counted == [0]


def test_layers_of_one_input_are_one_call(counted):
    layers, x = [Projection(24, size) for size in (40, 8, 8)], torch.randn(1, 1, 24)
    with torch.no_grad():
        for got, layer in zip(project(x, *layers), layers, strict=True):
            assert torch.equal(got, cpu.project(x, [(layer.weight, layer.bias)])[0])
        assert counted == [4]
        close(project_gelu(x, layers[0]), F.gelu(layers[0](x)), TOLERANCE[torch.float32])
        assert counted == [6]
        for got, layer in zip(project(x.expand(1, 9, 24), *layers), layers, strict=True):
            assert torch.equal(got, F.linear(x.expand(1, 9, 24), layer.weight, layer.bias))
        assert counted == [6]


def test_a_layer_that_does_more_is_called(monkeypatch):
    """A hook, a parametrization, another forward, another class: what they do is done, with gelu after it."""

    def double(layer, _, y):
        return 2 * y

    class Doubling(Projection):
        def forward(self, x):
            return 2 * super().forward(x)

    def doubled(how):
        layer = Projection(24, 40)
        if how == "hook":
            layer.register_forward_hook(double)
        elif how == "hook before":
            layer.register_forward_pre_hook(lambda layer, arguments: (2 * arguments[0],))
        elif how == "global hook":
            monkeypatch.setattr(torch.nn.modules.module, "_global_forward_hooks", {0: double})
        elif how == "parametrization":
            twice = torch.nn.Identity()
            twice.forward = lambda x: 2 * x
            torch.nn.utils.parametrize.register_parametrization(layer, "weight", twice)
        elif how == "forward":
            layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
        else:
            layer.__class__ = Doubling
        if how in ("hook before", "parametrization"):  # these double the product alone
            torch.nn.init.zeros_(layer.bias)
        return layer

    x = torch.randn(1, 1, 24)
    for how in ("hook", "hook before", "parametrization", "forward", "class", "global hook"):
        layer, plain = doubled(how), Projection(24, 8)
        weight = getattr(getattr(layer, "parametrizations", None), "weight", None)
        wanted = 2 * F.linear(x, layer.weight if weight is None else weight.original, layer.bias)
        with torch.no_grad():
            close(project(x, plain, layer)[1], wanted, TOLERANCE[torch.float32])
            close(project_gelu(x, layer), F.gelu(wanted), TOLERANCE[torch.float32])


def test_a_wrong_width_is_torchs_error():
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Projection(24, 40)(torch.randn(1, 48))
    with torch.no_grad(), pytest.raises(RuntimeError):
        project(torch.randn(()), Projection(24, 40))


def test_weights_are_those_of_linear():
    layer, other = Projection(24, 40), torch.nn.Linear(24, 40)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 1, 24)
    assert isinstance(layer, torch.nn.Linear)
    with torch.no_grad():
        close(layer(x), other(x), TOLERANCE[torch.float32])
