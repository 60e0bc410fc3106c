"""The kernel is exact for every shape, layout and option, on one thread and on several."""

import random

import pytest
import torch

from lin_attn import Rotary, linear_attention
from lin_attn.kernels.cpu import calls
from tests.helpers import TOLERANCE, assert_close, double, qkv, relative, values_and_gradients
from tests.kernels.helpers import Problem, scattered


@pytest.fixture
def _two_threads(monkeypatch):
    """Used for however little work."""
    monkeypatch.setattr(calls, "_SMALL", 0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seeds", range(12))
def test_a_random_problem_equals_the_float64_reference(seeds, dtype):
    for seed in range(8 * seeds, 8 * seeds + 8):
        problem = Problem(seed, dtype=dtype)
        try:
            assert_close(problem.computed(), problem.wanted(), TOLERANCE[dtype])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {problem.shape}") from error


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 255, 256])
def test_every_head_dim_about_the_vectors_widths(size):
    """As D and as M: the entries of a row that do not fill a vector are the first to be forgotten."""
    for sizes in ((size, 5), (6, size)):
        problem = Problem(size, heads=(1, 2, 2), length=21, size=sizes[0], value_size=sizes[1], causal=True)
        assert_close(problem.computed(), problem.wanted(), TOLERANCE[torch.float32])


LONG = {
    # heads (B, K, G), N, N_k: one head alone, so that a sequence is cut into segments
    "causal": ((1, 1, 2), 700, 700),
    "causal, last segment of one token": ((1, 1, 1), 1025, 1025),
    "three heads on two threads": ((3, 1, 1), 450, 450),
    "all keys": ((1, 1, 2), 333, 700),
    "all keys, one query": ((1, 1, 1), 1, 2500),
    "all keys, one key": ((1, 1, 1), 700, 1),
}


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("seed", range(4))
def test_several_threads_and_segments_give_what_one_thread_gives(case, seed):
    heads, length, keys = LONG[case]
    fixed = {"heads": heads, "length": length, "keys": keys, "causal": case.startswith(("causal", "three"))}
    problem = Problem(seed, max_dim=48, **fixed)
    got = problem.computed()
    assert_close(got, problem.wanted(), TOLERANCE[torch.float32])
    torch.set_num_threads(1)
    assert_close(got, problem.computed(), 1e-6 if problem.options["normalize"] else 2e-6)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("causal", [True, False])
def test_a_sequence_of_thousands_is_cut_and_stays_exact(causal):
    q, k, v = qkv(1, 1, 1, 6001, 16, 16, dtype=torch.float32)
    options = {"rotary": Rotary(16), "causal": causal}
    got = values_and_gradients(q, k, v, backend="cpu", **options)
    wanted = values_and_gradients(*double(q, k, v), backend="chunked", **options)
    assert_close(got, wanted, TOLERANCE[torch.float32])


@pytest.mark.parametrize("gradient", ["expanded", "scattered", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_layout_of_the_incoming_gradient_changes_nothing(gradient, dtype):
    """A sum's gradient is one number expanded with strides of 0."""
    q, k, v = qkv(length=70, size=8, dtype=dtype)
    out = linear_attention(q, k, v, rotary=Rotary(8), backend="cpu")
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    grad = {
        "expanded": torch.ones((), dtype=dtype).expand(out.shape),
        "scattered": scattered(grad, random.Random(0)),
        "transposed": grad.transpose(1, 2).contiguous().transpose(1, 2),
    }[gradient]
    got = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    wanted = torch.autograd.grad(out, (q, k, v), grad.clone(memory_format=torch.contiguous_format))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("layout", ["heads outside", "heads inside", "off by one", "gaps", "one row"])
@pytest.mark.parametrize("heads", [(1, 2, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_whole_vectors_are_used_where_they_lie(layout, heads, dtype):
    """Values, outputs and gradients of values go without a copy, unless it is in a last chunk or at an odd address."""

    def laid_out(x):
        if layout == "heads inside":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "off by one":
            return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
        if layout == "one row":
            return x[:, :, :1].expand(x.shape)
        return x if layout == "heads outside" else torch.cat((x, x), dim=3)[..., : x.shape[3]]

    for length in (32, 80, 107):
        batch, kv_heads, groups = heads
        drawn = qkv(batch, kv_heads * groups, kv_heads, length, 32, 64, dtype=dtype)
        inputs = [laid_out(x.detach()).requires_grad_() for x in drawn]
        got = values_and_gradients(*inputs, rotary=Rotary(32), backend="cpu")
        wanted = values_and_gradients(*double(*inputs), rotary=Rotary(32), backend="reference")
        assert_close(got, wanted, TOLERANCE[dtype])


def test_hidden_values_that_lie_as_operands_may_be_anything():
    q, k, v = qkv(length=64, size=32, value_size=32, dtype=torch.float32)
    mask = torch.rand(2, 64, generator=torch.Generator().manual_seed(1)) > 0.3
    dirty = torch.where(mask[:, None, :, None], v.detach(), torch.nan).requires_grad_()
    got, wanted = (values_and_gradients(q, k, x, rotary=Rotary(32), key_mask=mask, backend="cpu") for x in (dirty, v))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_offsets_in_memory_may_pass_two_to_the_31():
    """Rows 2²⁶ elements apart, of which only the touched pages are ever there."""
    length, step = 70, 2**26
    q, k, v = (x.detach() for x in qkv(1, 1, 1, length, 8, 8, dtype=torch.bfloat16))

    def spread(x):
        memory = torch.empty(step * (length - 1) + 8, dtype=torch.bfloat16)
        view = memory.as_strided(x.shape, (0, 0, step, 1))
        view.copy_(x)
        return view

    try:
        far = [spread(x) for x in (q, k, v)]
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    assert far[0].stride(2) * (length - 1) > 2**31
    got, wanted = (linear_attention(*x, rotary=Rotary(8), backend="cpu") for x in (far, (q, k, v)))
    assert torch.equal(got, wanted)


def test_a_step_of_decoding_without_gradients_equals_the_forward_pass_with_them():
    """Without gradients the operator's dispatch is skipped and one token has its own loop."""
    for seed in range(40):
        problem = Problem(seed, length=1, causal=True)
        with torch.no_grad():
            out, after = linear_attention(
                problem.q,
                problem.k,
                problem.v,
                state=problem.state,
                return_state=True,
                backend="cpu",
                **problem.options,
            )
        wanted = problem.computed("chunked")
        assert_close(
            {"out": out, "kv": after.kv, "k_sum": after.k_sum},
            {name: wanted[name] for name in ("out", "kv", "k_sum")},
            TOLERANCE[torch.float32],
        )


def test_a_view_with_negated_entries_is_read_as_such():
    """The imaginary part of a conjugate is a view whose sign torch changes when it is read."""
    for length in (1, 5):
        z = torch.randn(1, 2, length, 8, dtype=torch.complex64)
        x = z.conj().imag
        assert x.is_neg()
        got, wanted = (linear_attention(x, x, x, backend=backend) for backend in ("cpu", "reference"))
        assert relative(got, wanted) <= TOLERANCE[torch.float32]


def test_elu1_and_its_slope_are_exact_entry_by_entry_and_positive_far_below():
    """z of one key is φ(k), and its gradient φ′(k). Below −86 the exponential leaves float32's normal numbers."""
    x = torch.cat((torch.linspace(-85, 20, 952), torch.tensor([0.0, -0.0, 1e-30, -1e-30, -3e38, -1e4, -200, -87])))
    k = x.view(1, 60, 1, 16).requires_grad_()
    _, state = linear_attention(k, k, k, return_state=True, backend="cpu")
    slope = torch.autograd.grad(state.k_sum.sum(), k)[0]
    flat = k.detach().double().flatten()
    wanted, wanted_slope = torch.where(flat > 0, flat + 1, flat.clamp(max=0).exp()), flat.clamp(max=0).exp()
    normal = flat >= -86
    for got, exact in ((state.k_sum, wanted), (slope, wanted_slope)):
        got = got.detach().double().flatten()
        assert ((got - exact).abs() / exact)[normal].max() <= 3e-7
        assert (got > 0).all()
        assert (got[~normal] <= 1e-37).all()
    nan = torch.full_like(k, float("nan"))
    assert linear_attention(k, nan, k, return_state=True, backend="cpu")[1].k_sum.isnan().all()


@pytest.mark.parametrize("size", [5, 64])
def test_bfloat16_results_are_float32s_rounded_to_nearest(size, monkeypatch):
    """Where the products are float32's. Cut off instead, every result would be too small."""
    monkeypatch.setattr(calls, "has_bf16_products", lambda: False)
    q, k, v = qkv(length=70, size=size + size % 2, value_size=size, dtype=torch.bfloat16)
    options = {"rotary": Rotary(size + size % 2), "backend": "cpu"}
    got = values_and_gradients(q, k, v, **options)
    wide = values_and_gradients(*(x.detach().float().requires_grad_() for x in (q, k, v)), **options)
    assert torch.equal(got["out"], wide["out"].bfloat16())
    assert torch.equal(got["kv"], wide["kv"])


def test_a_step_that_sees_no_key_gives_zeros():
    """Neither a state nor a key of its own: the sum of weights is 0, and held at eps."""
    x = torch.randn(2, 4, 1, 6)
    out = linear_attention(x, x, x, key_mask=torch.tensor([[False], [True]]), backend="cpu")
    assert not out[0].any()
    assert relative(out[1], x[1]) <= 1e-6
