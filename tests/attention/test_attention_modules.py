"""The modules are projections around an op, and nothing else: against hand-written projections and explicit loops."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from lin_attn import KVCache, LinearState
from lin_attn.attention import LinearAttention, MultiHeadAttention, SoftmaxAttention
from tests.helpers import BACKENDS, TOLERANCE, loop_linear, loop_softmax, relative, widest

D_MODEL, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 6


def by_hand(module: MultiHeadAttention, x: Tensor, context: Tensor | None = None, **options: object) -> Tensor:
    """Slices of the weight matrices, head by head, and the loops of the oracle, in float64."""
    module, x, context = deepcopy(module).double(), x.double(), None if context is None else context.double()
    source = x if context is None else context

    def heads(x: Tensor, linear: nn.Linear, count: int) -> Tensor:
        weights = linear.weight.view(count, HEAD_DIM, D_MODEL)
        biases = torch.zeros(count, HEAD_DIM) if linear.bias is None else linear.bias.view(count, HEAD_DIM)
        return torch.stack([x @ w.T + b for w, b in zip(weights, biases, strict=True)], dim=1)

    q = heads(x, module.query, HEADS)
    k, v = heads(source, module.key, KV_HEADS), heads(source, module.value, KV_HEADS)
    options |= {"causal": module.causal}
    if isinstance(module, SoftmaxAttention):
        out = loop_softmax(q, k, v, rope=module.rotary is not None, **options)
    else:
        out = loop_linear(q, k, v, rope=module.rope, normalize=module.normalize, **options)["out"]
    if module.output_norm is not None:
        out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.output_norm.weight
    bias = 0 if module.output.bias is None else module.output.bias
    return torch.cat(list(out.unbind(1)), dim=-1) @ module.output.weight.T + bias


def build(kind: type[MultiHeadAttention], **options: object) -> MultiHeadAttention:
    """Parameters are moved off the values they start from, so that one left out shows."""
    torch.manual_seed(0)
    module = kind(D_MODEL, HEADS, KV_HEADS, HEAD_DIM, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module.to(dtype_of(options))


def dtype_of(options: dict[str, object]) -> torch.dtype:
    return widest(str(options.get("backend")))


def some_input(length: int = 7, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(2, length, D_MODEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype)


MASK = torch.tensor([[True, False, True, True, True, False, True], [False, True, True, True, True, True, True]])
KINDS = [
    (kind, options)
    for kind, variants in (
        (LinearAttention, [{"rope": rope, "backend": b} for rope in ("none", "after", "before") for b in BACKENDS]),
        (LinearAttention, [{"normalize": False, "output_norm": True}, {"bias": True}, {}]),
        (SoftmaxAttention, [{}, {"rope": False}, {"output_norm": True}, {"bias": True}]),
    )
    for options in variants
]
EVERY_KIND = pytest.mark.parametrize(
    ("kind", "options"), KINDS, ids=[f"{k.__name__} {' '.join(f'{n}={v}' for n, v in o.items())}" for k, o in KINDS]
)


@EVERY_KIND
@pytest.mark.parametrize("causal", [True, False])
def test_equals_projections_by_hand(kind, options, causal):
    dtype = dtype_of(options)
    module, x = build(kind, causal=causal, **options), some_input(dtype=dtype)
    assert relative(module(x), by_hand(module, x)) <= TOLERANCE[dtype]
    assert relative(module(x, key_mask=MASK), by_hand(module, x, key_mask=MASK)) <= TOLERANCE[dtype]


@EVERY_KIND
def test_attends_to_a_context_of_another_length(kind, options):
    """Positions of queries and keys both start at 0."""
    module, dtype = build(kind, causal=False, **options), dtype_of(options)
    x, context = some_input(5, dtype=dtype), some_input(7, seed=2, dtype=dtype)
    got = module(x, context=context, key_mask=MASK)
    assert relative(got, by_hand(module, x, context, key_mask=MASK)) <= TOLERANCE[dtype]


@EVERY_KIND
def test_pieces_with_the_state_carried_equal_the_whole(kind, options):
    dtype = dtype_of(options)
    module, x = build(kind, **options), some_input(70, dtype=dtype)
    whole, last = module(x, return_state=True)
    state, outs = None, []
    for piece in x.split([20, 1, 0, 48, 1], dim=1):
        out, state = module(piece, state=state, return_state=True)
        outs.append(out)
    assert relative(torch.cat(outs, dim=1), whole) <= TOLERANCE[dtype]
    assert state.length == last.length == 70
    assert isinstance(state, KVCache if kind is SoftmaxAttention else LinearState)
    assert torch.equal(module(x), whole)


def loss_of(module: MultiHeadAttention, dtype: torch.dtype) -> Tensor:
    return (module(some_input(dtype=dtype), key_mask=MASK) * some_input(seed=3, dtype=dtype)).sum()


@EVERY_KIND
def test_every_parameter_has_a_finite_gradient_that_finite_differences_confirm(kind, options):
    """Moved along its own gradient, each parameter changes the loss by |gradient|².

    Where there is no float64 for such small steps, the gradients are those that the reference, so confirmed, has there.
    """
    module, dtype = build(kind, **options), dtype_of(options)

    def loss() -> Tensor:
        return loss_of(module, dtype)

    loss().backward()
    if dtype != torch.float64:
        confirmed = build(kind, **options | {"backend": "reference"})
        loss_of(confirmed, torch.float64).backward()
        for (name, got), wanted in zip(module.named_parameters(), confirmed.parameters(), strict=True):
            assert relative(got.grad, wanted.grad) <= TOLERANCE[dtype], name
        return
    for name, parameter in module.named_parameters():
        gradient, step = parameter.grad, 1e-6
        assert gradient.isfinite().all()
        if kind is SoftmaxAttention and name == "key.bias" and module.rotary is None:
            continue  # the same for all keys of a query: softmax does not see it
        assert gradient.norm() > 1e-6, name
        direction = gradient / gradient.norm()
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        assert ((above - below) / (2 * step)).item() == pytest.approx(gradient.norm().item(), rel=1e-6), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_feature_map_with_parameters_is_learned(backend):
    """It is a submodule: seen by parameters(), state_dict and the optimizer."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HEAD_DIM, HEAD_DIM)

        def forward(self, x: Tensor) -> Tensor:
            return softplus(self.linear(x))

    module = build(LinearAttention, feature_map=Learned(), backend=backend)
    assert "feature_map.linear.weight" in module.state_dict()
    module(some_input(dtype=widest(backend))).square().sum().backward()
    assert module.feature_map.linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [LinearAttention, SoftmaxAttention])
def test_half_precision_modules_keep_their_angles(kind):
    """Cast to bfloat16, a module at position 1,000,000 differs from itself in float32 by rounding alone."""
    module = build(kind).bfloat16()
    x, late = some_input(9).bfloat16(), some_input(9, seed=2).bfloat16()
    _, state = module(x, return_state=True)
    if kind is SoftmaxAttention:
        assert relative(module(x), build(kind)(x.double())) <= 0.03
        return
    state = state._replace(length=1_000_000)
    got = module(late, state=state)
    wide = module.float()
    wanted = wide(late.float(), state=state)
    assert relative(got, wanted) <= 0.02, "weights are equal; activations are rounded four times"


@pytest.mark.parametrize("kind", [LinearAttention, SoftmaxAttention])
def test_a_saved_module_loads_with_nothing_missing(kind):
    module, other = build(kind, output_norm=True), kind(D_MODEL, HEADS, KV_HEADS, HEAD_DIM, output_norm=True).double()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(some_input()), module(some_input()))


X = torch.randn(2, 5, 8)
WRONG = {
    "heads that do not divide": ("n_kv_heads", lambda kind: kind(8, 4, 3)),
    "size that does not divide": ("d_model", lambda kind: kind(9, 4)),
    "no heads": ("n_heads", lambda kind: kind(8, 0)),
    "no key heads": ("n_kv_heads", lambda kind: kind(8, 4, 0)),
    "no size": ("d_model", lambda kind: kind(0, 4)),
    "odd head_dim": ("head_dim", lambda kind: kind(12, 4)),
    "unknown rope": ("rope", lambda kind: kind(8, 2, rope="rotary")),
    "base of zero": ("base", lambda kind: kind(8, 2, rope_base=0.0)),
    "context and causal": ("context", lambda kind: kind(8, 2)(X, context=X)),
    "context and state": ("context", lambda kind: kind(8, 2, causal=False)(X, context=X, return_state=True)),
    "x of another size": ("x", lambda kind: kind(8, 2)(torch.randn(2, 5, 6))),
    "x of two axes": ("x", lambda kind: kind(8, 2)(X[0])),
    "context of another size": ("context", lambda kind: kind(8, 2, causal=False)(X, context=torch.randn(2, 5, 6))),
    "mask of another length": ("key_mask", lambda kind: kind(8, 2)(X, key_mask=torch.ones(2, 4, dtype=torch.bool))),
    "mask of the queries, not of the context": (
        "key_mask",
        lambda kind: kind(8, 2, causal=False)(X, context=X[:, :3], key_mask=torch.ones(2, 5, dtype=torch.bool)),
    ),
    "state of another kind": ("state", lambda kind: kind(8, 2)(X, state=(X, X))),
}


@pytest.mark.parametrize("kind", [LinearAttention, SoftmaxAttention])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong, kind):
    argument, call = WRONG[wrong]
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        call(kind)


@pytest.mark.parametrize("option", [{"feature_map": "elu"}, {"backend": "cuda"}])
def test_an_unknown_name_is_an_error_at_the_latest_when_called(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        LinearAttention(8, 2, **option)(X)


@pytest.mark.parametrize("kind", [LinearAttention, SoftmaxAttention])
def test_a_typo_is_a_type_error(kind):
    with pytest.raises(TypeError):
        kind(8, 2, ropes="after")
    with pytest.raises(TypeError):
        kind(8, 2)(X, mask=None)
