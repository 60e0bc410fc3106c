"""A few tokens' projection by the kernel: the float64 product, and only where nobody but the caller looks on."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Linear
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lin_attn.kernels import cpu
from lin_attn.kernels.cpu import calls, library
from lin_attn.projection import FEW, project, project_gelu
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
    layer = Linear(24, 40).to(dtype)
    with torch.no_grad():
        for tokens in range(1, FEW[dtype] + 1):
            project(torch.randn(1, tokens, 24, dtype=dtype), layer)
            assert counted == [tokens]
        project(torch.randn(1, FEW[dtype] + 1, 24, dtype=dtype), layer)
    assert counted == [FEW[dtype]]
    with torch.inference_mode():
        project(torch.randn(1, 24, dtype=dtype), layer)
    assert counted == [FEW[dtype] + 1]


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.linear else out


def test_whoever_looks_on_sees_torchs_linear(counted, monkeypatch):
    linear, x = Linear(24, 40), torch.randn(1, 1, 24)
    wanted = linear(x)

    def layer(x):
        return project(x, linear)[0]

    layer(x).sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 24 * 40
        with Doubled():
            assert torch.equal(layer(x), 2 * wanted)
        close(torch.func.vmap(layer)(x.expand(3, 1, 24)), wanted.expand(3, 1, 40), TOLERANCE[torch.float32])
        linear.requires_grad_(False)  # tracers take no other constants
        assert torch.jit.trace(layer, x, check_trace=False)(x.expand(5, 1, 24)).shape == (5, 1, 40)
        for early in (False, True):
            graph = make_fx(layer, pre_dispatch=early)(x)
            close(graph(2 * x), layer(torch.cat([2 * x] * 9, 1))[:, :1], TOLERANCE[torch.float32])
        with torch.autograd.forward_ad.dual_level():
            dual = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
            close(tangent, linear.weight.sum(1).expand(1, 1, 40), TOLERANCE[torch.float32])
        layer(torch.randn(24, 4).t())  # not contiguous
        assert layer(x[:, :0]).shape == (1, 0, 40)
        assert project(x, Linear(24, 0))[0].shape == (1, 1, 0)
        monkeypatch.setenv("LIN_ATTN_BACKEND", "chunked")
        assert torch.equal(layer(x), wanted)
    assert counted == [0]


def test_layers_of_one_input_are_one_call(counted):
    layers, x = [Linear(24, size) for size in (40, 8, 8)], torch.randn(1, 1, 24)
    with torch.no_grad():
        for got, layer in zip(project(x, *layers), layers, strict=True):
            assert torch.equal(got, cpu.project(x, [(layer.weight, layer.bias)])[0])
        assert counted == [4]
        close(project_gelu(x, layers[0]), F.gelu(layers[0](x)), TOLERANCE[torch.float32])
        assert counted == [5]
        for got, layer in zip(project(x.expand(1, 9, 24), *layers), layers, strict=True):
            assert torch.equal(got, layer(x.expand(1, 9, 24)))
        assert counted == [5]


def test_a_layer_that_does_more_is_called(monkeypatch):
    """A hook, a parametrization, another forward, another class: what they do is done, with gelu after it."""

    def double(layer, _, y):
        return 2 * y

    class Doubling(Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def doubled(how):
        layer = Linear(24, 40)
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
        elif how == "every forward":
            monkeypatch.setattr(Linear, "forward", lambda layer, x: 2 * F.linear(x, layer.weight, layer.bias))
        elif how == "compiled":
            layer._compiled_call_impl = lambda x: 2 * F.linear(x, layer.weight, layer.bias)  # of layer.compile()
        elif how == "forward":
            layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
        else:
            layer.__class__ = Doubling
        if how in ("hook before", "parametrization"):  # these double the product alone
            torch.nn.init.zeros_(layer.bias)
        return layer

    x = torch.randn(1, 1, 24)
    for how in (
        "hook",
        "hook before",
        "parametrization",
        "forward",
        "compiled",
        "class",
        "global hook",
        "every forward",
    ):
        layer, plain = doubled(how), Linear(24, 8)
        if how == "every forward":
            monkeypatch.setattr(torch.nn.modules.module, "_global_forward_hooks", {})
        weight = getattr(getattr(layer, "parametrizations", None), "weight", None)
        wanted = 2 * F.linear(x, layer.weight if weight is None else weight.original, layer.bias)
        with torch.no_grad():
            close(project(x, plain, layer)[1], wanted, TOLERANCE[torch.float32])
            close(project_gelu(x, layer), F.gelu(wanted), TOLERANCE[torch.float32])


def broken(layer, how):
    if how == "freed weight":
        layer.weight.untyped_storage().resize_(0)
    elif how == "freed bias":
        layer.bias.untyped_storage().resize_(0)
    else:
        shape = {"weight of three axes": (40, 24, 3), "none of that weight": (40, 24, 0), "bias": (20,)}[how]
        setattr(layer, "bias" if how == "bias" else "weight", torch.nn.Parameter(torch.randn(shape)))
    return layer


@pytest.mark.parametrize("how", ["freed weight", "freed bias", "weight of three axes", "none of that weight", "bias"])
def test_parameters_that_torch_cannot_multiply_are_torchs_error(how):
    with torch.no_grad(), pytest.raises(RuntimeError):
        project(torch.randn(1, 24), broken(Linear(24, 40), how))


def test_a_wrong_width_is_torchs_error():
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        project(torch.randn(1, 48), Linear(24, 40))
    with torch.no_grad(), pytest.raises(RuntimeError):
        project(torch.randn(()), Linear(24, 40))


def test_without_the_kernel_torch_computes_it_and_nobody_is_warned(counted, monkeypatch, recwarn):
    monkeypatch.setattr(library, "load", lambda: "no compiler")
    layer, x = Linear(24, 40), torch.randn(1, 24)
    with torch.no_grad():
        assert torch.equal(project(x, layer)[0], layer(x))
    assert counted == [0]
    assert not recwarn.list
