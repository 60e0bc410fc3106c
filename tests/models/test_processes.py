"""Two processes train as one does on the same batches, and go on from each other's checkpoints (gloo, on the CPU)."""

import signal

import pytest
import torch
import torch.distributed

from models.checkpoint import load_checkpoint
from models.metrics import LanguageModelMetric
from tests.models.runs import fit, in_processes, read_curve, write_corpus

STEPS, HALF = 8, 3  # an epoch has 4
# Float32 sums in another order, and AdamW divides small gradients by small roots.
EQUAL = {"rel": 1e-5}
ONE = {"data": {"batch_size": 8, "block_length": 32}, "trainer": {"accumulate_grad_batches": 2}}
TWO = {
    name: {
        "data": {"batch_size": 4, "block_length": 32},
        "trainer": {"accumulate_grad_batches": 2, "strategy": name, "devices": 2},
    }
    for name in ("ddp", "fsdp2")
}


def figures(curve):
    """The losses of a curve; the draws beside them are each process's own."""
    return {key: float.fromhex(values[0]) for key, values in curve.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A whole run of one process, one by each strategy, and to half of the steps, by name of the folder's files."""
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder / "text")
    log = folder / "log"
    assert in_processes(fit, folder, steps=STEPS, curve="one.curve", checkpoints="one", log=log, **ONE) == [0]
    assert in_processes(fit, folder, steps=HALF, curve="x", checkpoints="one-half", log=log, **ONE) == [0]
    for name, options in TWO.items():
        for steps, kind in ((STEPS, name), (HALF, f"{name}-half")):
            run = {"steps": steps, "curve": f"{kind}.curve", "checkpoints": kind, "log": log, "ranks": 2, **options}
            assert in_processes(fit, folder, **run) == [0, 0]
    return folder


@pytest.mark.parametrize("strategy", TWO)
def test_two_processes_have_the_losses_of_one(runs, strategy):
    """Also in the epoch's last step, whose batches are short and of uneven numbers of targets, and in validation."""
    one, two = (figures(read_curve(runs / f"{name}.curve")) for name in ("one", strategy))
    assert {kind for kind, _ in one} == {"step", "validation"}
    assert two == pytest.approx(one, **EQUAL)


def test_a_signal_to_one_process_ends_both_with_a_checkpoint(runs, tmp_path):
    run = {"steps": STEPS, "curve": "signal.curve", "checkpoints": "signal", "every": 99, "log": runs / "log"}
    kill = (2, "backward", signal.SIGTERM)  # to the first
    assert in_processes(fit, runs, kill=kill, ranks=2, **run, **TWO["ddp"]) == [128 + signal.SIGTERM, 0]
    last = runs / "signal" / "last.ckpt"
    assert in_processes(fit, runs, resume=last, ranks=2, **run, **TWO["ddp"]) == [0, 0]
    assert figures(read_curve(runs / "signal.curve")) == pytest.approx(figures(read_curve(runs / "ddp.curve")), **EQUAL)


@pytest.mark.parametrize("strategy", TWO)
def test_the_checkpoint_of_two_processes_is_the_model_of_one(runs, strategy):
    saved = [torch.load(runs / name / "last.ckpt", weights_only=True) for name in ("one", strategy)]
    assert [list(one["state_dict"]) for one in saved] == [list(saved[0]["state_dict"])] * 2
    tokens = torch.arange(40)[None]
    one, two = (load_checkpoint(runs / name / "last.ckpt")(tokens) for name in ("one", strategy))
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("strategy", TWO)
@pytest.mark.parametrize("first", ["one", "two"])
def test_a_run_goes_on_with_another_number_of_processes(runs, strategy, first, tmp_path):
    half, options, ranks = ("one-half", TWO[strategy], 2) if first == "one" else (f"{strategy}-half", ONE, 1)
    curve = f"{strategy} after {first}"
    run = {
        "steps": STEPS,
        "curve": f"{curve}.curve",
        "checkpoints": curve,
        "resume": runs / half / "last.ckpt",
        "seed": 7,
    }
    assert in_processes(fit, runs, log=runs / "log", ranks=ranks, **run, **options) == [0] * ranks
    went_on = figures(read_curve(runs / f"{curve}.curve"))
    assert [step for kind, step in went_on if kind == "step"] == list(range(HALF + 1, STEPS + 1))
    whole = figures(read_curve(runs / "one.curve"))
    assert went_on == pytest.approx({key: whole[key] for key in went_on}, **EQUAL)


def _reduce(path):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    metric = LanguageModelMetric()
    for i in range(rank, 10, 2):
        metric.update(torch.tensor(2.0**24 + i, dtype=torch.float64), 2**24 + 1, 3)
    loss = metric.compute()
    torch.save({"loss": loss["loss"], "tokens": metric.count}, path / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_figures_are_reduced_exactly_over_processes(tmp_path):
    """Sums and counts beyond what float32 holds."""
    assert in_processes(_reduce, tmp_path, ranks=2, log=tmp_path / "log") == [0, 0]
    wanted = sum(2.0**24 + i for i in range(10)) / (10 * (2**24 + 1))
    assert [torch.load(tmp_path / f"{rank}.pt")["loss"].item() for rank in range(2)] == [wanted, wanted]
