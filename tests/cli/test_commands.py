"""Each command does what its help says, from training to generated text."""

import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lin_attn.data import TextCorpus
from models import CausalLM
from models.checkpoint import load_checkpoint
from models.cli import COMMANDS, main
from models.cli.configs import config_folder
from models.cli.training import claim_version
from tests.cli.conftest import DEBUG

CONFIG_FILE = str(config_folder() / "lm" / "debug.yaml")
QUIET = ["--trainer.enable_progress_bar", "false"]


def last_figure(metrics, name):
    """The last value of a figure in a metrics.csv."""
    with metrics.open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]][-1]


def test_fit_leaves_logs_curves_checkpoints_and_its_configuration(trained):
    names = {path.name for path in trained.rglob("*") if path.is_file()}
    assert {"metrics.csv", "curves.png", "fit.yaml", "best.ckpt", "last.ckpt"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    with (trained / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    figures = {name for row in rows for name, value in row.items() if value}
    assert {"train/loss", "train/tokens_per_second", "train/grad_norm"} <= figures
    assert {"train/mfu", "train/data_wait", "train/peak_memory_gb"} <= figures
    assert {"val/loss", "val/perplexity", "val/bits_per_byte"} <= figures


def test_fit_ends_with_its_figure_its_files_and_a_sample(trained):
    printed = (trained.parents[2] / "printed.txt").read_text()
    figure = float(re.search(r"validation bits per byte: ([0-9.]+)", printed)[1])
    assert figure == pytest.approx(last_figure(trained / "metrics.csv", "val/bits_per_byte"), abs=1e-4)
    for name in ("curves.png", "metrics.csv", "best.ckpt", "last.ckpt"):
        assert re.search(rf"\S+{name}", printed)
    sample = printed.partition("sample (temperature 0.8):\n\n")[2]
    assert len(sample) > 50


def test_a_checkpoint_is_read_without_unpickling_and_gives_the_same_model_again(trained):
    path = trained / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["hyper_parameters"]["network"]["d_model"] == 32
    by_lightning = CausalLM.load_from_checkpoint(path, weights_only=True).eval()
    by_us = load_checkpoint(path)
    tokens = torch.randint(257, (2, 30))
    assert torch.equal(by_lightning(tokens), by_us(tokens))
    assert by_us.tokenizer is not None
    assert by_us.tokenizer.decode([104, 105, 256]) == b"hi"


def test_validate_gives_the_figure_that_fit_ended_with(run, trained, books, capsys):
    config = trained / "fit.yaml"
    checkpoint = trained / "checkpoints" / "last.ckpt"
    assert run("validate", "-c", config, "--ckpt_path", checkpoint, *QUIET) == 0
    wanted = last_figure(trained / "metrics.csv", "val/bits_per_byte")
    [printed] = re.findall(r"val/bits_per_byte\W+([0-9.]+)", capsys.readouterr().out)
    assert float(printed) == pytest.approx(wanted, rel=1e-6)


def test_predict_accounts_for_every_byte_of_the_test_text(run, trained, tmp_path):
    config, checkpoint = trained / "fit.yaml", trained / "checkpoints" / "last.ckpt"
    assert run("predict", "-c", config, "--ckpt_path", checkpoint, "--trainer.default_root_dir", tmp_path, *QUIET) == 0
    [table] = tmp_path.rglob("predictions.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert int(row["targets"]) == int(row["n_bytes"]) + 1  # the bytes and the document's end
        assert float(row["bits_per_byte"]) == pytest.approx(float(row["bits"]) / int(row["n_bytes"]), abs=1e-4)

    assert run("test", "-c", config, "--ckpt_path", checkpoint, "--trainer.default_root_dir", tmp_path, *QUIET) == 0
    [metrics] = (path for path in tmp_path.rglob("metrics.csv") if "test/bits_per_byte" in path.read_text())
    figure = last_figure(metrics, "test/bits_per_byte")
    bits, n_bytes = sum(float(row["bits"]) for row in rows), sum(int(row["n_bytes"]) for row in rows)
    assert bits / n_bytes == pytest.approx(figure, rel=1e-4)


def test_generate_repeats_itself_by_seed_and_stops_before_a_stop(run, trained, capsys):
    checkpoint = trained / "checkpoints" / "last.ckpt"
    arguments = ["generate", "--checkpoint", checkpoint, "--prompt", "The ", "--max-new-tokens", "80", "--seed", "1"]
    texts = []
    for extra in ([], [], ["--stop", "e"]):
        assert run(*arguments, *extra) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("The ")
    continuation = texts[0][4:-1]
    assert texts[2] == "The " + continuation.partition("e")[0] + "\n"


def test_a_resumed_run_says_what_its_checkpoint_replaces_and_goes_on(run, trained, books, capsys):
    checkpoint = trained / "checkpoints" / "last.ckpt"
    changes = ["--model.network.d_model", "64", "--model.optimizer.lr", "0.5", "--trainer.max_steps", "25"]
    assert run(*DEBUG, "--data.source", books, "--ckpt_path", checkpoint, *changes) == 0
    out = capsys.readouterr().out
    assert "network.d_model=32, which replaces 64" in out
    assert "optimizer.lr=0.003, which replaces 0.5" in out
    assert torch.load("runs/debug/version_0/checkpoints/last.ckpt", weights_only=True)["global_step"] == 25


def test_last_means_the_newest_whole_checkpoint_of_the_runs_or_a_new_run(run, books, capsys):
    again = [*DEBUG, "--data.source", books, "--ckpt_path", "last", "--trainer.val_check_interval", "5"]
    last = [f"runs/debug/version_{i}/checkpoints/last.ckpt" for i in range(3)]
    options = ["--last_checkpoint.every_n_train_steps", "2", "--model.activation_checkpointing", "true"]
    assert run(*again, *options, "--trainer.max_steps", "5") == 0
    assert "begins anew" in capsys.readouterr().out
    assert run(*again, *options, "--trainer.max_steps", "8") == 0
    assert f"goes on from {last[0]}" in capsys.readouterr().out
    Path(last[1]).write_bytes(b"")
    assert run(*again, *options, "--trainer.max_steps", "10") == 0
    assert f"goes on from {last[1].replace('last', 'previous')}" in capsys.readouterr().out
    assert torch.load(last[2], weights_only=True)["global_step"] == 10
    with open("runs/debug/version_2/fit.yaml") as file:
        assert "activation_checkpointing: true" in file.read()  # which a checkpoint does not replace
    assert run("validate", *DEBUG[1:], "--data.source", books, "--ckpt_path", last[1]) == 2
    assert f"{last[1].replace('last', 'previous')} is whole" in capsys.readouterr().err


def test_averaged_weights_and_sharding_together_are_refused(books, tmp_path):
    averaged = ["--trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging", "--trainer.strategy", "fsdp2"]
    command = [sys.executable, "-m", "models.cli", *DEBUG, "--data.source", str(books), *averaged]
    command += ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.precision", "32-true"]
    environment = {**os.environ, "LIN_ATTN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("lin-attn")]
    assert "WeightAveraging" in line


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_documents(run, books, capsys):
    assert (
        run(*DEBUG, "--data.source", books, "--model.optimizer.lr", "1e30", "--model.optimizer.warmup_steps", "0") == 2
    )
    error = capsys.readouterr().err
    assert "at step" in error
    assert "book" in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fit", "-c", "configs/lm/debugg.yaml"], "configs/lm/debugg.yaml"),
        ([*DEBUG, "--model.network.d_modle", "3"], "d_modle"),
        ([*DEBUG, "--model.network.d_model", "33"], "d_model"),
        ([*DEBUG, "--model", "models.Foo"], "no attribute 'Foo'"),
        ([*DEBUG, "--data", "lin_attn.data.Foo"], "no attribute 'Foo'"),
        ([*DEBUG, "--trainer.max_stps", "3"], "max_stps"),
        ([*DEBUG, "--data.source", "no/such/folder"], "no/such/folder"),
        ([*DEBUG, "--trainer.max_steps", "-1", "--trainer.max_epochs", "1"], "max_steps"),
        ([*DEBUG, "--ckpt_path", "no.ckpt"], "no.ckpt"),
        ([*DEBUG, "--model.network.vocab_size", "100"], "vocab_size"),
        ([*DEBUG, "--ckpt_path", CONFIG_FILE], "cannot be read"),
        ([*DEBUG, "--trainer.gradient_clip_val", "1"], "optimizer.clip"),
        ([*DEBUG, "--trainer.devices", "0"], "devices"),
        ([*DEBUG, "--trainer.default_root_dir", "/proc/nowhere"], "/proc/nowhere"),
        ([*DEBUG, "--data.block_length", "0"], "block_length"),
        ([*DEBUG, "--data.block_length", "100000000"], "block_length"),
        (["validate", *DEBUG[1:]], "ckpt_path"),
        (["generate", "--checkpoint", "no.ckpt"], "no.ckpt"),
        (["generate"], "--checkpoint"),
        (["translate"], "translate"),
    ],
)
def test_a_mistake_is_told_by_name_and_without_a_traceback(run, capsys, arguments, named):
    try:
        status = run(*arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lin-attn")]
    assert named in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--tempreture", "1"], "--model"),
        (["generate", "--model", "x", "--tempreture", "1"], "--tempreture"),
        (["evaluate", "--model", "x", "--split", "dev"], "--split"),
        (["convert", "a", "b", "--to", "tf"], "--to"),
        (["zoo", "a", "b"], "b"),
        (["scale", "--mechanisms", "foo"], "--mechanisms"),
        (["fit", "--model.network.attention", "linnear"], "linnear"),
    ],
)
def test_a_mistake_among_the_arguments_is_one_line_and_nothing_else(run, capsys, arguments, named):
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("lin-attn")
    assert named in line


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "foreign"])
def test_a_damaged_checkpoint_is_refused_by_name(run, trained, tmp_path, capsys, damage):
    path = tmp_path / "broken.ckpt"
    if damage == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        whole = (trained / "checkpoints" / "last.ckpt").read_bytes()
        path.write_bytes({"truncated": whole[: len(whole) // 2], "text": b"hello", "empty": b""}[damage])
    assert run("generate", "--checkpoint", path) == 2
    assert "broken.ckpt" in capsys.readouterr().err


def test_a_temperature_of_zero_is_greedy_and_the_text_ends_with_its_document(run, trained, capsys):
    checkpoint = trained / "checkpoints" / "last.ckpt"
    assert (
        run("generate", "--checkpoint", checkpoint, "--prompt", "The", "--temperature", "0", "--max-new-tokens", 9) == 0
    )
    model = load_checkpoint(checkpoint)
    end = model.tokenizer.end_id
    prompt = torch.tensor([[end, *model.tokenizer.encode("The").tolist()]])
    expected = model.generate(prompt, 9, temperature=0, stop_token=end)[0]
    assert capsys.readouterr().out == model.tokenizer.decode(expected).decode("utf-8", "replace") + "\n"


def test_two_runs_at_once_write_to_two_folders(tmp_path):
    assert [claim_version(tmp_path) for _ in range(3)] == [0, 1, 2]


@pytest.mark.slow
def test_two_processes_train_and_report_once(books, tmp_path):
    """Gloo on the CPU; the figure of two processes is that of one over the same weights."""
    two = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    two += ["--trainer.precision", "32-true"]
    command = [
        sys.executable,
        "-m",
        "models.cli",
        *DEBUG,
        "--data.source",
        str(books),
        *two,
        "--trainer.max_steps",
        "10",
    ]
    environment = {**os.environ, "LIN_ATTN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation bits per byte") == 1
    run_folder = tmp_path / "runs" / "debug" / "version_0"
    model = load_checkpoint(run_folder / "checkpoints" / "last.ckpt")
    data = TextCorpus(str(books), block_length=64, batch_size=8, cache_dir=str(tmp_path / "cache"))
    metric = model.new_metric("val")
    for batch in data.val_dataloader():
        model.evaluate(batch, metric)
    wanted = metric.compute()["bits_per_byte"].item()
    assert last_figure(run_folder / "metrics.csv", "val/bits_per_byte") == pytest.approx(
        wanted, rel=1e-6
    )  # float32 logits


def test_env_names_versions_devices_and_backends(run, capsys):
    assert run("env") == 0
    out = capsys.readouterr().out
    for name in ("torch", "CPU", "cuda", "backend chunked", "configurations"):
        assert name in out


def test_help_lists_every_command_within_two_seconds():
    start = time.perf_counter()
    code = "import sys; from models.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 2
    assert all(command in done.stdout for command in COMMANDS)


def test_no_arguments_print_the_help(capsys):
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out
