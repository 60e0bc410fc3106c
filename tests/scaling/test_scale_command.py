"""lin-attn scale does what its help says, on real processes and short lengths."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from lin_attn.scaling import runner
from lin_attn.scaling.plan import read_rows
from models.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from models.cli import main; sys.exit(main())", "scale"]
SMALL = ["--heads", "2", "--head-dim", "16", "--repeats", "3"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs `lin-attn scale` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main(["scale", *map(str, arguments)])


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(runner, "run_point", lambda *_: pytest.fail("a point was measured"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_softmax_runs_out_of_memory_and_linear_goes_on(run, capsys):
    """At 2048 the weights of 8 heads are 134 MB, of which forward holds two; linear holds 9 MB in all."""
    options = ["--attention", "linear,softmax-math", "--phase", "forward", "--memory-limit", "150M", "--repeats", "3"]
    assert run(*options, "--lengths", "1024:4096") == 0
    rows = read_rows("runs/scaling/scaling.csv")
    assert [row.status for row in rows if row.mechanism == "linear"] == ["ok"] * 3
    softmax = [row.status for row in rows if row.mechanism == "softmax-math"]
    assert softmax == ["ok", "out of memory", "skipped"]
    told = capsys.readouterr()
    assert "6 points to measure: about" in told.err
    assert "out of memory" in told.out
    assert {"scaling.md", "scaling.png", "scaling.svg"} <= {path.name for path in Path("runs/scaling").iterdir()}


@pytest.mark.slow
def test_stopped_by_ctrl_c_it_keeps_what_is_done_and_goes_on_there(tmp_path):
    command = [*COMMAND, *SMALL, "--attention", "linear", "--phase", "forward", "--out", str(tmp_path)]
    command += ["--lengths", "16:128"]
    table = tmp_path / "scaling.csv"
    # A shell's background jobs, this suite among them, may ignore Ctrl-C, and so would their children.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (table.exists() and len(read_rows(table)) >= 1):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "keeps what is done, and the same command goes on" in told
    before = table.read_text()
    done = len(read_rows(table))
    assert 1 <= done < 4
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"{4 - done} points to measure, {done} are there already" in again.stderr
    assert table.read_text().startswith(before)  # the same figures, to the digit
    assert [row.status for row in read_rows(table)] == ["ok"] * 4


def test_a_model_is_measured_from_its_configuration(run):
    options = ["--level", "model", "--model", "lm/debug", "--attention", "softmax-math", "--phase", "train"]
    assert run(*options, "--lengths", "64", "--repeats", "3") == 0
    [row] = read_rows("runs/scaling/scaling.csv")
    assert (row.status, row.level, row.heads, row.head_dim) == ("ok", "model", 2, 16), row.detail
    assert row.saved_bytes > 0
    options = json.loads(Path("runs/scaling/environment.json").read_text())["options"]
    assert options["network"]["d_model"] == 32


def test_a_dry_run_lists_points_with_their_cost_and_starts_nothing(run, nothing_runs, capsys, tmp_path):
    assert run("--dry-run", "--lengths", "1024", "--phase", "train,decode") == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 1 + 6 + 1
    assert "6.442" in table  # GFLOP: 12 · 8 heads · 1024² · 64 of softmax-math
    assert "6.72" in table  # MB saved by linear
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--lengths", "9:3"], "lengths are '9:3'; wanted"),
        (["--phase", "forward,sleep"], "--phase is 'sleep'; wanted one of forward, train, decode"),
        (["--attention", "performer"], "--attention is 'performer'; wanted one of linear, softmax-flash, softmax-math"),
        (["--backend", "abacus"], "--backend is 'abacus'; wanted one of auto"),
        (["--device", "tpu"], "--device is 'tpu'; wanted auto, cpu or cuda"),
        (["--dtype", "int8"], "--dtype is 'int8'; wanted one of float32"),
        (["--level", "op", "--model", "lm/debug"], "--model is lm/debug with --level op"),
        (["--level", "model"], "--model is missing"),
        (["--level", "model", "--model", "lm/debug", "--heads", "2"], "--heads and --head-dim are the network's own"),
        (["--level", "model", "--model", "nowhere"], "there is no configuration nowhere"),
        (["--tokens-per-batch", "1000"], "wanted a multiple of every length, and 256 is none"),
        (["--repeats", "1"], "repeats is 1; wanted at least 3"),
        (["--memory-limit", "lots"], "the size is 'lots'; wanted a number of bytes"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_runs(run, nothing_runs, capsys, tmp_path, arguments, told):
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_other_options_are_refused_until_told_to_start_over(run, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run_point", lambda point, _: runner.row_of(point, "ok", seconds_median=1.0))
    options = [*SMALL, "--lengths", "8", "--phase", "forward"]
    assert run(*options) == 0
    assert run(*options, "--seed", "1") == 2
    assert "seed was 0 and is 1; wanted another --out, or --fresh" in capsys.readouterr().err
    assert run(*options, "--seed", "1", "--fresh") == 0
    assert run(*options, "--seed", "1", "--lengths", "8,16") == 0  # more of the same is no other run
    assert len(read_rows("runs/scaling/scaling.csv")) == 6


def test_help_comes_without_torch():
    code = "import sys, models.cli.scale as s; s.parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
