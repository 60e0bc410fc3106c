"""xPos: faded products equal explicit loops, for softmax and linear attention, at any length and position."""

import math

import pytest
import torch

from lin_attn import linear_attention, softmax_attention
from lin_attn.attention import LinearAttention, SoftmaxAttention
from lin_attn.ops import xpos_linear_attention
from lin_attn.positions import XPos
from tests.helpers import BACKENDS, PHI, TOLERANCE, double, qkv, relative, widest
from tests.positions.oracles import xpos, xpos_weight

EXACT = 1e-11  # float64
SHORT = XPos(6, decay_base=1.5)  # stretches of 5 positions: every test crosses some


def loop_linear_xpos(q, k, v, fading, *, normalize=True, key_mask=None):
    """Numerator and denominator one pair at a time; the denominator fades and is not rotated."""
    batch, heads, length, size = q.shape
    pairs = [(2 * i / size + fading.gamma) / (1 + fading.gamma) for i in range(size // 2) for _ in range(2)]
    out = torch.zeros(batch, heads, length, v.shape[3], dtype=torch.float64)

    def phi(x):
        return torch.tensor(PHI["elu1"](x.detach().numpy()))

    for b in range(batch):
        for h in range(heads):
            shared = h // (heads // k.shape[1])
            for m in range(length):
                numerator, denominator = torch.zeros(v.shape[3], dtype=torch.float64), 0.0
                for n in range(m + 1):
                    if key_mask is None or key_mask[b, n]:
                        query, key = phi(q[b, h, m]), phi(k[b, shared, n])
                        numerator += xpos_weight(fading, m, n, query, key) * v[b, shared, n].detach()
                        decay = [z ** ((m - n) / fading.decay_base) for z in pairs]
                        denominator += sum(d * x * y for d, x, y in zip(decay, query, key, strict=True))
                out[b, h, m] = numerator / denominator if normalize and denominator else numerator
    return out


@pytest.mark.parametrize("fading", [XPos(6), SHORT, XPos(6, base=100, decay_base=4, gamma=0.1)], ids=str)
@pytest.mark.parametrize("masked", [True, False])
def test_softmax_equals_explicit_loops_in_value_and_gradient(fading, masked):
    q, k, v = qkv(length=13)
    mask = torch.rand(2, 13, generator=torch.Generator().manual_seed(5)) > 0.4 if masked else None
    got = softmax_attention(q, k, v, rotary=fading, key_mask=mask)
    wanted = xpos(fading)(q, k, v, key_mask=mask)
    assert relative(got, wanted) <= EXACT
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, wanted)), strict=True):
        assert relative(a, b) <= EXACT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_linear_equals_explicit_loops(backend, normalize, masked):
    dtype = widest(backend)
    q, k, v = qkv(length=13, dtype=dtype)
    mask = torch.rand(2, 13, generator=torch.Generator().manual_seed(5)) > 0.4 if masked else None
    options = {"normalize": normalize, "key_mask": mask}
    got = xpos_linear_attention(q, k, v, xpos=SHORT, backend=backend, **options)
    assert relative(got, loop_linear_xpos(*double(q, k, v), SHORT, **options)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_linear_equal_finite_differences(normalize):
    q, k, v = qkv(1, 2, 1, 6, 4, 3)

    def op(q, k, v):
        fading = XPos(4, decay_base=1.0)  # stretches of 3
        out, state = xpos_linear_attention(q, k, v, xpos=fading, normalize=normalize, return_state=True)
        return out, state.kv, state.k_sum

    assert torch.autograd.gradcheck(op, (q, k, v))


OPS = {
    "softmax": lambda q, k, v, fading=SHORT, **options: softmax_attention(q, k, v, rotary=fading, **options),
    "linear": lambda q, k, v, fading=SHORT, **options: xpos_linear_attention(q, k, v, xpos=fading, **options),
}
BOTH = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@BOTH
@pytest.mark.parametrize("cuts", [[1] * 23, [7, 16], [3, 0, 5, 1, 14]])
def test_pieces_with_the_state_carried_equal_the_whole(op, cuts):
    """Wherever the stretches begin."""
    q, k, v = qkv(length=23)
    state, outs = None, []
    for rows in torch.arange(23).split(cuts):
        out, state = op(q[:, :, rows], k[:, :, rows], v[:, :, rows], state=state, return_state=True)
        outs.append(out)
    assert relative(torch.cat(outs, dim=2), op(q, k, v)) <= EXACT
    assert state.length == 23


@BOTH
def test_left_padding_changes_nothing_and_may_be_nan(op):
    q, k, v = qkv(1, length=12)
    nan = [torch.full_like(x[:, :, :4], float("nan")) for x in (k, v)]
    padded = [torch.cat((torch.zeros_like(q[:, :, :4]), q), dim=2)]
    padded += [torch.cat((a, b), dim=2) for a, b in zip(nan, (k, v), strict=True)]
    mask = torch.arange(16)[None] >= 4
    leaves = [x.detach().requires_grad_() for x in padded]
    options = {"feature_map": "exp"} if op is OPS["linear"] else {}  # its derivative at NaN is NaN
    for gradient in torch.autograd.grad(op(*leaves, key_mask=mask, **options).square().sum(), leaves):
        assert gradient.isfinite().all()
        assert not gradient[:, :, :4].any()
    out = op(*padded, key_mask=mask)[:, :, 4:]
    alone = op(q, k, v)
    assert relative(out, alone) <= EXACT
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, alone)), strict=True):
        assert a.isfinite().all()
        assert relative(a, b) <= EXACT


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_far_beyond_where_the_factors_would_overflow_it_is_exact(op, dtype):
    """ζ_0^(−n/b) at n = 600 and b = 2 is e^376. Float64 does not overflow there and is the truth, by one stretch."""
    fading, whole = XPos(8, decay_base=2.0), XPos(8, decay_base=2.0)
    q, k, v = qkv(1, 2, 1, 600, 8, 8, dtype=dtype)
    out = op(q, k, v, fading=fading)
    wide = [x.detach().double() for x in (q, k, v)]
    distances = torch.arange(600)[:, None] - torch.arange(600)
    fade = whole.decay(distances.clamp(min=0), dtype=torch.float64)  # (N, N, D)
    turned = [whole.rotary(x) for x in wide[:2]]
    if op is OPS["softmax"]:
        scores = torch.einsum("bhmd,bhnd,mnd->bhmn", turned[0], turned[1].expand_as(turned[0]), fade) / math.sqrt(8)
        wanted = scores.masked_fill(distances < 0, -math.inf).softmax(-1) @ wide[2]
    else:
        maps = [torch.where(x >= 0, x + 1, x.clamp(max=0).exp()) for x in wide[:2]]
        turned = [whole.rotary(x) for x in maps]
        weights = [torch.einsum("bhmd,bhnd,mnd->bhmn", a, b.expand_as(a), fade).tril() for a, b in (turned, maps)]
        wanted = weights[0] @ wide[2] / weights[1].sum(-1, keepdim=True)
    assert relative(out, wanted) <= {torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


@BOTH
def test_a_sequence_may_begin_anywhere(op):
    """After 10⁶ positions of which nothing is left, the output is that of the sequence alone."""
    q, k, v = qkv(length=9, dtype=torch.float32)
    alone, first = op(q, k, v, return_state=True)
    if op is OPS["linear"]:
        late = first._replace(kv=first.kv * 0, k_sum=first.k_sum * 0, length=1_000_000)
        assert relative(op(q, k, v, state=late), alone) <= 1e-5
    else:
        hidden = torch.zeros(2, 9, dtype=torch.bool)
        assert relative(op(q, k, v, state=first._replace(key_mask=hidden)), alone) <= 1e-5


@BOTH
def test_no_output_depends_on_a_later_token(op):
    q, k, v = qkv(length=12)
    out = op(q, k, v)
    for gradient in torch.autograd.grad(out[:, :, :7].sum(), (k, v)):
        assert not gradient[:, :, 7:].any()


def test_without_decay_in_reach_it_is_rope():
    q, k, v = qkv(length=20)
    still = XPos(6, decay_base=1e12)
    assert relative(OPS["softmax"](q, k, v, still), softmax_attention(q, k, v, rotary=still.rotary)) <= 1e-9
    assert relative(OPS["linear"](q, k, v, still), linear_attention(q, k, v, rotary=still.rotary)) <= 1e-9


def test_what_a_key_adds_to_linear_attention_fades_with_distance_and_softmax_keeps_it():
    """A key of value 1 among others of value 0: its share of the numerator falls below any bound."""
    fading = XPos(8, decay_base=8)
    q = k = torch.ones(1, 1, 200, 8, dtype=torch.float64)
    v = torch.zeros(1, 1, 200, 1, dtype=torch.float64)
    v[:, :, 0] = 1
    faded = xpos_linear_attention(q, k, v, xpos=fading, normalize=False)[0, 0, :, 0].abs()
    assert faded[150:].max() < 1e-2 * faded[:4].max()
    assert softmax_attention(q, k, v, rotary=fading)[0, 0, -1, 0] > 0.5 / 200


def test_traced_without_a_graph_break_the_numbers_are_the_same():
    torch._dynamo.reset()
    q, k, v = qkv(length=12, dtype=torch.float32)
    for op in OPS.values():
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        assert relative(compiled(q, k, v, XPos(6)), op(q, k, v, XPos(6))) <= 1e-5


WRONG = {
    "odd head_dim": ("head_dim", lambda: XPos(5)),
    "base of zero": ("base", lambda: XPos(4, base=0)),
    "no decay base": ("decay_base", lambda: XPos(4, decay_base=0)),
    "endless decay base": ("decay_base", lambda: XPos(4, decay_base=math.inf)),
    "no gamma": ("gamma", lambda: XPos(4, gamma=0.0)),
    "linear_attention itself": ("rotary", lambda: linear_attention(*qkv(), rotary=XPos(6))),
    "softmax of both sides": ("rotary", lambda: softmax_attention(*qkv(), rotary=XPos(6), causal=False)),
    "another head_dim": ("xpos", lambda: xpos_linear_attention(*qkv(), xpos=XPos(4))),
    "another kind": ("xpos", lambda: xpos_linear_attention(*qkv(), xpos=XPos(6).rotary)),
    "more keys": ("causal", lambda: xpos_linear_attention(*qkv(keys=9), xpos=XPos(6))),
    "module of both sides": ("causal", lambda: SoftmaxAttention(12, 2, rotary=XPos(6), causal=False)),
    "before the feature map": ("rope", lambda: LinearAttention(12, 2, rotary=XPos(6), rope="before")),
    "rope says none": ("rotary", lambda: LinearAttention(12, 2, rotary=XPos(6), rope="none")),
    "two bases": ("rope_base", lambda: SoftmaxAttention(12, 2, rotary=XPos(6), rope_base=100.0)),
    "rotary by name": ("rotary", lambda: SoftmaxAttention(12, 2, rotary="xpos")),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong):
    argument, call = WRONG[wrong]
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        call()
