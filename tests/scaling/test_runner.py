"""A point that fails is a row, the rest goes on, and what is done is not done again."""

import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch

from lin_attn.scaling import runner
from lin_attn.scaling.plan import Point, read_rows, row_of
from lin_attn.scaling.runner import Limits, check_limits, missing, open_folder, run_point, run_points
from lin_attn.scaling.subjects import Operation
from lin_attn.scaling.worker import limit_memory

POINT = Point(
    "linear", "auto", "op", "forward", "cpu", "float32", 1, 2, 16, 100, subject="tests.scaling.test_runner:fate"
)
LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")


def fate(point: Point) -> Operation:
    """A subject that comes to the end that its seed names."""
    ends = (
        lambda: os.kill(os.getpid(), signal.SIGSEGV),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: os._exit(3),
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: time.sleep(100),
        lambda: torch.ones(100_000_000),
    )
    return Operation(ends[point.seed])


@pytest.mark.parametrize(
    ("seed", "status", "detail"),
    [
        (0, "crash", "ended by SIGSEGV"),
        (1, "out of memory", "killed by the system"),
        (2, "crash", "ended with exit status 3"),
        (3, "error", "inconsistent tensor size"),
        (4, "timeout", "was not done after 5 s"),
        pytest.param(5, "out of memory", "ran out of memory within 100 MiB", marks=LINUX_ONLY),
    ],
)
def test_whatever_becomes_of_a_process_there_is_a_row(seed, status, detail):
    begun = time.monotonic()
    limits = Limits(timeout=5 if status == "timeout" else 60, memory=None if seed < 5 else 100 * 2**20)
    row = run_point(replace(POINT, seed=seed), limits)
    assert (row.status, row.seconds_median, row.peak_bytes) == (status, None, None)
    assert detail in row.detail
    assert time.monotonic() - begun < 60


@pytest.fixture
def fake(monkeypatch):
    """Points are answered at once, by a table from (mechanism, length) to a status, "ok" by default."""
    statuses, asked = {}, []

    def answer(point, limits):
        asked.append((point.mechanism, point.length))
        status = statuses.get((point.mechanism, point.length), "ok")
        if status == "stop":
            raise KeyboardInterrupt
        return row_of(point, status)

    monkeypatch.setattr(runner, "run_point", answer)
    return statuses, asked


POINTS = [replace(POINT, mechanism=m, length=n) for n in (1, 2, 4, 8) for m in ("linear", "softmax-math")]


@pytest.mark.parametrize("status", ["out of memory", "timeout"])
def test_longer_points_of_a_mechanism_that_has_run_out_are_skipped_and_say_so(fake, tmp_path, status):
    statuses, asked = fake
    statuses["softmax-math", 2] = status
    rows = list(run_points(POINTS, [], tmp_path / "scaling.csv", Limits()))
    assert [row.status for row in rows if row.mechanism == "linear"] == ["ok"] * 4
    softmax = [row for row in rows if row.mechanism == "softmax-math"]
    assert [row.status for row in softmax] == ["ok", status, "skipped", "skipped"]
    assert softmax[3].detail == f"{status} at length 2 already"
    assert len(asked) == 6
    assert read_rows(tmp_path / "scaling.csv") == rows


def test_a_crash_does_not_end_a_mechanism(fake, tmp_path):
    fake[0]["linear", 2] = "crash"
    rows = run_points(POINTS, [], tmp_path / "scaling.csv", Limits())
    assert [row.status for row in rows if row.mechanism == "linear"] == ["ok", "crash", "ok", "ok"]


def test_a_run_that_was_stopped_measures_only_what_is_missing(fake, tmp_path):
    statuses, asked = fake
    table, environment = tmp_path / "scaling.csv", {"options": {"seed": 0, "network": (1, 2)}}
    statuses.update({("linear", 1): "crash", ("softmax-math", 2): "out of memory", ("linear", 8): "stop"})
    with pytest.raises(KeyboardInterrupt):
        list(run_points(POINTS, open_folder(tmp_path, environment, fresh=False), table, Limits()))
    assert [row.status for row in read_rows(table)] == ["crash", "ok", "ok", "out of memory", "ok", "skipped"]
    asked.clear()
    statuses.clear()
    rows = open_folder(tmp_path, environment, fresh=False)
    list(run_points(missing(POINTS, rows), rows, table, Limits()))
    assert asked == [("linear", 1), ("linear", 8)]  # what crashed has another chance; what ran out of memory has not
    statuses_now = {(row.mechanism, row.length): row.status for row in read_rows(table)}
    assert len(read_rows(table)) == len(statuses_now) == len(POINTS)
    assert statuses_now["softmax-math", 8] == "skipped"
    assert missing(POINTS, open_folder(tmp_path, environment, fresh=True)) == POINTS


def test_runs_with_other_options_are_not_mixed(fake, tmp_path):
    open_folder(tmp_path, {"options": {"seed": 0, "repeats": 5}}, fresh=False)
    with pytest.raises(ValueError, match="seed was 0 and is 1; wanted another --out, or --fresh"):
        open_folder(tmp_path, {"options": {"seed": 1, "repeats": 5}}, fresh=False)
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(ValueError, match="does not say with which options"):
        open_folder(tmp_path, {"options": {}}, fresh=False)
    open_folder(tmp_path, {"options": {}}, fresh=True)


def test_limits_that_cannot_be_kept_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="repeats is 1; wanted at least 3"):
        check_limits(Limits(repeats=1), "cpu")
    with pytest.raises(ValueError, match="point timeout is 0 s; wanted a positive"):
        check_limits(Limits(timeout=0), "cpu")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="memory limit is 7 bytes, which darwin cannot enforce"):
        limit_memory(7, torch.device("cpu"))
    assert limit_memory(None, torch.device("cpu")) is None
