"""A run of the Trainer is the loop that the configuration describes, and goes on exactly where it stopped."""

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lin_attn.data.blocks import IGNORED
from models import CausalLM
from models.optimization import lr_factor, split_by_decay

STEPS = 6
NETWORK = {"vocab_size": 40, "d_model": 16, "n_layers": 1, "n_heads": 2}
OPTIMIZER = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.3, "warmup_steps": 2, "min_lr_ratio": 0.5, "clip": 0.05}


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        tokens = torch.randint(40, (4, 13), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[:, ::5] = IGNORED
        yield {"tokens": tokens[:, :-1], "targets": targets, "n_bytes": torch.full((4,), 9), "start": torch.zeros(4)}


def train(model, steps, folder, **options):
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, enable_checkpointing=False, precision="32-true",
    )  # fmt: skip
    loader = DataLoader(list(batches()), batch_size=None)
    trainer.fit(model, loader, **options)
    return trainer


@pytest.mark.parametrize("clip", [0.05, None])
def test_the_trainer_takes_the_steps_of_a_loop_written_by_hand(tmp_path, clip):
    model = CausalLM(network=NETWORK, optimizer=OPTIMIZER | {"clip": clip, "max_steps": 5})
    twin = copy.deepcopy(model)
    decayed, plain = split_by_decay(twin)
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    for step, batch in enumerate(batches()):
        loss = F.cross_entropy(twin(batch["tokens"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(twin.parameters(), clip) > clip
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * lr_factor(step, 2, 5, 0.5)
        optimizer.step()

    train(model, STEPS, tmp_path)
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_resumed_run_drops_out_what_the_whole_run_would_have(tmp_path):
    def fresh():
        torch.manual_seed(0)
        return CausalLM(network=NETWORK | {"dropout": 0.3}, optimizer=OPTIMIZER | {"max_steps": STEPS})

    whole, first, second = fresh(), fresh(), fresh()
    torch.manual_seed(1)
    train(whole, STEPS, tmp_path)
    torch.manual_seed(1)
    train(first, 3, tmp_path).save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(2)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    second.load_state_dict(saved["state_dict"])
    trainer = Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, enable_checkpointing=False, precision="32-true",
    )  # fmt: skip
    rest = DataLoader(list(batches())[3:] + list(batches())[:3], batch_size=None)
    trainer.fit(second, rest, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert trainer.global_step == STEPS
    for got, wanted in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_a_schedule_without_an_end_is_refused(tmp_path):
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, default_root_dir=tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match="max_steps"):
        trainer.fit(CausalLM(network=NETWORK), DataLoader(list(batches()), batch_size=None))


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(tmp_path):
    model = CausalLM(network=NETWORK, optimizer=OPTIMIZER)
    model.network.head.weight.register_hook(lambda grad: grad * float("nan"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="step 0"):
        train(model, STEPS, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
