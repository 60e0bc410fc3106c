"""Each option of a run does what it promises, and nothing else."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from lin_attn.data.blocks import IGNORED
from models import CausalLM
from models.parallel import arrange
from models.step_loss import StepLoss

NETWORK = {"vocab_size": 40, "d_model": 16, "n_layers": 3, "n_heads": 2}
OPTIMIZER = {"lr": 0.02, "warmup_steps": 0, "max_steps": 50, "clip": None}


def batches(count=6, rows=4, length=12):
    """Of very uneven numbers of targets."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(count):
        tokens = torch.randint(40, (rows, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, 1 + 7 * i % length :] = IGNORED
        made.append({"tokens": tokens[:, :-1], "targets": targets, "n_bytes": torch.full((rows,), 9),
                     "start": torch.zeros(rows)})  # fmt: skip
    return made


def train(model, data, folder, **options):
    options = {"max_steps": len(data), "precision": "32-true"} | options
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=None))
    return trainer


def fresh(lr=0.02, **options):
    torch.manual_seed(0)
    return CausalLM(network=NETWORK, optimizer=OPTIMIZER | {"lr": lr}, **options)


class Losses(Callback):
    """The train/loss of each step."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > len(self.losses):
            self.losses.append(trainer.callback_metrics["train/loss"].item())


def test_the_gradient_of_an_accumulated_step_is_that_of_one_batch_of_all_its_targets(tmp_path):
    """A mean of the batches' means would be far off: they have from 4 to 48 targets."""
    data = batches(6)
    together = [{name: torch.cat([one[name] for one in data[i : i + 3]]) for name in data[0]} for i in (0, 3)]
    pieces, whole = fresh(), fresh()
    losses = Losses(), Losses()
    train(pieces, data, tmp_path, max_steps=2, accumulate_grad_batches=3, callbacks=[losses[0]])
    train(whole, together, tmp_path, callbacks=[losses[1]])
    assert losses[0].losses == pytest.approx(losses[1].losses, rel=1e-6)
    for got, wanted in zip(pieces.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_step_taken_up_again_in_its_middle_has_the_same_gradient():
    """Also by another number of processes than it was begun with."""
    model, step = fresh(), StepLoss()
    nll, count = (sum(one) for one in zip(*(model.loss_sum(batch) for batch in batches(2)), strict=True))
    (step.add(nll, count) / 4).backward()
    state = step.state_dict(model, 4)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    for shares in (4, 2):
        model.zero_grad()
        again = StepLoss()
        again.load_state_dict(state, model, shares, torch.device("cpu"))
        again.finish(model.parameters(), shares)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient * 4 * 4096 / count, rtol=1e-6, atol=0)


def kept(network, tokens):
    """Bytes that autograd keeps for backward beyond the parameters, and the gradients."""
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    sizes = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = network(tokens)[0].square().sum()
    return sum(sizes.values()), torch.autograd.grad(loss, list(network.parameters()))


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_activation_checkpointing_keeps_less_and_gives_the_same_gradient(attention):
    """To the last bit, dropout included; what is kept of a block is its input."""
    network = CausalLM(network=NETWORK | {"attention": attention, "dropout": 0.3, "n_layers": 6}).network
    tokens = torch.randint(40, (2, 64))
    plain, gradients = kept(network, tokens)
    arrange(network, activation_checkpointing=True, torch_compile=False, mesh=None)
    less, again = kept(network, tokens)
    assert less < plain / 4
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_and_names_of_one_that_is_not(tmp_path):
    torch._dynamo.reset()
    names, losses = [], (Losses(), Losses())
    for compiled, seen in zip((False, True), losses, strict=True):
        model = fresh(lr=1e-3, torch_compile=compiled)
        train(model, batches(3), tmp_path, callbacks=[seen])
        names.append(list(model.state_dict()))
    assert model.network.blocks[0]._compiled_call_impl is not None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert names[0] == names[1]
    assert losses[1].losses == pytest.approx(losses[0].losses, rel=1e-4)


@pytest.mark.parametrize(("precision", "weights"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_bfloat16_multiplies_in_it_and_learns_as_float32_does(tmp_path, precision, weights):
    exact, rough = Losses(), Losses()
    train(fresh(), batches() * 3, tmp_path, callbacks=[exact])
    model, products = fresh(), set()
    model.network.blocks[0].feed_forward.inner.register_forward_hook(lambda *hook: products.add(hook[2].dtype))
    train(model, batches() * 3, tmp_path, precision=precision, callbacks=[rough])
    assert products == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {weights}
    assert rough.losses == pytest.approx(exact.losses, rel=0.05)  # 8 bits, over 18 steps
    assert rough.losses != exact.losses


def test_averaged_weights_are_the_moving_average_of_those_of_each_step(tmp_path):
    """They are what is left when training ends; the steps themselves are taken by the weights that they average."""

    class Weights(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, module, *_):
            self.seen.append(copy.deepcopy(module.network.state_dict()))

    model, plain = fresh(), fresh()
    train(plain, batches(), tmp_path)
    trainer = train(model, batches(), tmp_path, callbacks=[steps := Weights(), EMAWeightAveraging(decay=0.7)])
    assert trainer.global_step == len(steps.seen) == 6
    for name, value in model.network.state_dict().items():
        torch.testing.assert_close(steps.seen[-1][name], plain.network.state_dict()[name], rtol=0, atol=0)
        average = steps.seen[0][name]
        for weights in steps.seen[1:]:
            average = 0.7 * average + 0.3 * weights[name]
        torch.testing.assert_close(value, average, rtol=1e-5, atol=1e-6)
