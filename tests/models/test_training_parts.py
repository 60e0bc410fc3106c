"""The loss, the figures, the optimizer and the draw of a token, each against what defines it."""

import math

import pytest
import torch
import torch.nn.functional as F

from lin_attn.data.blocks import IGNORED
from models import CausalLM
from models.config import OptimizerConfig
from models.loss import CHUNK, cross_entropy_sum, token_nll, token_scores
from models.metrics import LanguageModelMetric
from models.optimization import build_optimizer, lr_factor, split_by_decay
from models.sampling import sample


def problem(tokens=CHUNK + 300, width=16, vocab=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[::7] = IGNORED
    return hidden, weight, targets


def test_chunked_cross_entropy_equals_that_of_torch_in_value_and_gradient():
    hidden, weight, targets = problem()
    loss = cross_entropy_sum(hidden, weight, targets) / 100
    wanted = F.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="sum") / 100
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for got, exact in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight)), strict=True
    ):
        assert (got - exact).norm() / exact.norm() < 1e-5  # float32
    torch.testing.assert_close(token_nll(hidden, weight, targets).double().sum(), loss.detach() * 100)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_and_the_heads_bias_are_those_of_torch_in_value_and_gradient(smoothing):
    hidden, weight, targets = problem()
    bias = torch.randn(50, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = cross_entropy_sum(hidden, weight, targets, bias, smoothing) / 100
    logits = F.linear(hidden.double(), weight.double(), bias.double())
    wanted = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing) / 100
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    leaves = (hidden, weight, bias)
    for got, exact in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        assert (got - exact).norm() / exact.norm() < 1e-5  # float32
    nll, hits = token_scores(hidden, weight, targets, bias)
    assert torch.equal(hits, F.linear(hidden, weight, bias).argmax(-1) == targets)
    exact = F.cross_entropy(logits, targets, reduction="none").float()
    torch.testing.assert_close(nll, exact, rtol=1e-5, atol=1e-5)


def test_chunked_cross_entropy_under_autocast_is_near_and_of_the_parameters_dtype():
    hidden, weight, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, targets)
    grads = torch.autograd.grad(loss, (hidden, weight))
    exact = cross_entropy_sum(hidden, weight, targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)  # bfloat16 has 8 bits
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_logits_of_a_long_batch_never_stand_in_memory_at_once():
    hidden, weight, targets = problem(tokens=4 * CHUNK, vocab=1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        cross_entropy_sum(hidden, weight, targets).backward()
    assert largest == CHUNK * 1000


def test_nothing_to_predict_is_no_loss_and_no_nan():
    hidden, weight, targets = problem(tokens=5)
    loss = cross_entropy_sum(hidden, weight, torch.full_like(targets, IGNORED))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in grads)


def test_figures_are_exact_beyond_what_float32_can_count():
    metric = LanguageModelMetric()
    for _ in range(3):
        metric.update(torch.tensor(2.0**24 + 1, dtype=torch.float64), 2**24 + 1, 2**25 + 2)
    figures = metric.compute()
    assert figures["loss"].item() == 1.0
    assert figures["perplexity"].item() == pytest.approx(math.e, rel=1e-15)
    assert figures["bits_per_byte"].item() == pytest.approx(0.5 / math.log(2), rel=1e-15)


def test_figures_do_not_depend_on_how_tokens_are_batched():
    nll = torch.rand(1000, dtype=torch.float64)
    whole, pieces = LanguageModelMetric(), LanguageModelMetric()
    whole.update(nll.sum(), 1000, 900)
    for piece, n_bytes in zip(nll.split([1, 499, 500]), [1, 399, 500], strict=True):
        pieces.update(piece.sum(), len(piece), n_bytes)
    for name, value in whole.compute().items():
        torch.testing.assert_close(pieces.compute()[name], value, rtol=1e-14, atol=0)


def test_only_matrices_decay_and_each_parameter_is_in_one_group():
    model = CausalLM(network={"d_model": 16, "n_layers": 1, "n_heads": 2, "position": "learned", "max_length": 9})
    decayed, plain = split_by_decay(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in plain} == {n for n in names.values() if "norm" in n or "positions" in n}
    assert len({id(p) for p in decayed + plain}) == len(decayed) + len(plain) == len(list(model.parameters()))
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["fused"]


def test_schedule_rises_linearly_and_falls_along_a_cosine():
    factors = [lr_factor(step, 10, 110, 0.2) for step in range(150)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0
    assert factors[60] == pytest.approx(0.6)  # half-way between 1 and 0.2
    assert factors[110:] == pytest.approx([0.2] * 40)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"lr": 0}, "lr"), ({"betas": (0.9,)}, "betas"), ({"clip": 0}, "clip"), ({"momentum": 1}, "momentum")],
)
def test_a_wrong_field_of_the_optimizer_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        CausalLM(optimizer=fields)


def test_draws_follow_the_distribution_within_top_k_and_top_p():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = probabilities.log().expand(20000, 4)
    generator = torch.Generator().manual_seed(0)

    def frequencies(**options):
        return sample(logits, generator=generator, **options).bincount(minlength=4) / 20000

    spread = 4 * math.sqrt(0.25 / 20000)  # four standard deviations
    assert (frequencies() - probabilities).abs().max() < spread
    assert (frequencies(top_k=2) - torch.tensor([4 / 7, 3 / 7, 0, 0])).abs().max() < spread
    assert (frequencies(top_p=0.6) - torch.tensor([4 / 7, 3 / 7, 0, 0])).abs().max() < spread  # 0.3 crosses 0.6
    sharp = probabilities.square() / probabilities.square().sum()
    assert (frequencies(temperature=0.5) - sharp).abs().max() < spread
    assert frequencies(temperature=0).tolist() == [1, 0, 0, 0]
