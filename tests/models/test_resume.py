"""A run that is killed and resumed is the run that was never interrupted, to the last bit."""

import random
import signal

import pytest
import torch

from tests.models.runs import Kill, fit, in_processes, read_curve, write_corpus

STEPS, EVERY = 26, 3
DROPOUT = {"network": {"dropout": 0.2}}
RUNS = {
    "linear": {},
    "dropout": DROPOUT,
    "softmax": {"network": {"dropout": 0.2, "attention": "softmax", "n_kv_heads": 1}},
    "accumulation": DROPOUT | {"trainer": {"accumulate_grad_batches": 3}},  # which no epoch's batches divide by
    "workers": DROPOUT | {"data": {"num_workers": 2}},
    "many epochs": DROPOUT | {"data": {"batch_size": 25}, "trainer": {"accumulate_grad_batches": 2}},
    "bf16-mixed": DROPOUT | {"trainer": {"precision": "bf16-mixed"}},
    "bf16-true": DROPOUT | {"trainer": {"precision": "bf16-true", "accumulate_grad_batches": 2}},
    "averaged weights": DROPOUT | {"ema": 0.9},
    "recomputed": {
        "network": {"dropout": 0.2, "ffn": "swiglu", "norm": "rms", "tie_embeddings": False},
        "model": {"activation_checkpointing": True},
        "data": {"num_workers": 1},
    },
}


def checkpoint(folder, name="last.ckpt"):
    return torch.load(folder / "checkpoints" / name, weights_only=True)


def assert_same(a, b):
    """Equal to the last bit: nested values with tensors."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_same(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["backward", "validation"])
def test_a_run_that_a_signal_ends_saves_first_and_goes_on_exactly(number, place, tmp_path):
    """In the middle of a step of three batches, whose gradients the checkpoint holds; no other checkpoint is due."""
    options = RUNS["accumulation"] | {"steps": 9, "every": 99, "log": tmp_path / "log"}
    for kind in ("whole", "stopped"):
        write_corpus(tmp_path / kind / "text")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert in_processes(fit, whole, **options) == [0]
    assert in_processes(fit, stopped, kill=(4, place, number), **options) == [128 + number]
    last = stopped / "checkpoints" / "last.ckpt"
    assert f"stopped by {number.name} at step" in options["log"].read_text()
    assert str(last) in options["log"].read_text()
    assert in_processes(fit, stopped, resume=last, seed=5, **options) == [0]
    assert read_curve(whole / "curve") == read_curve(stopped / "curve")
    assert_same(checkpoint(whole)["state_dict"], checkpoint(stopped)["state_dict"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_five_random_steps_is_the_one_that_was_not(name, tmp_path):
    options = RUNS[name]
    folders = {kind: tmp_path / kind for kind in ("whole", "killed")}
    for folder in folders.values():
        write_corpus(folder / "text")
    log = tmp_path / "log"
    whole, killed = folders.values()
    assert in_processes(fit, whole, steps=STEPS, every=EVERY, log=log, **options) == [0]

    draws = random.Random(name)
    for step in sorted(draws.sample(range(1, STEPS), 5)):
        kill = (step, draws.choice(Kill.PLACES))
        last = killed / "checkpoints" / "last.ckpt"
        seed = step if last.exists() else 0  # a resumed run does not draw what it was seeded with
        run = {"steps": STEPS, "every": EVERY, "kill": kill, "resume": last, "seed": seed}
        assert in_processes(fit, killed, log=log, **run, **options) == [-9], kill
    assert in_processes(fit, killed, steps=STEPS, every=EVERY, resume=last, seed=99, log=log, **options) == [0]

    curves = [read_curve(folder / "curve") for folder in (whole, killed)]
    assert curves[0].keys() == curves[1].keys()
    assert [step for kind, step in curves[0] if kind == "step"] == list(range(1, STEPS + 1))
    assert curves[0] == curves[1]
    saved = [checkpoint(folder) for folder in (whole, killed)]
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "random_states"):
        assert_same(saved[0][part], saved[1][part])
