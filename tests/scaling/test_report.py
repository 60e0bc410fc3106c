"""The report says what the rows say, in Markdown and in a terminal."""

import re
from dataclasses import replace

import pytest

from lin_attn.scaling.report import write_report
from tests.scaling.test_plots import LENGTHS, run_of


def cells(text, *start):
    """The first line of a printed table that begins with these cells, split where two spaces are: its other cells."""
    split = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    return next(line for line in split if tuple(line[: len(start)]) == start)[len(start) :]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "new"
    text = write_report(run_of(), folder, {"torch": "2.13.0", "cpu_cores": 2, "gpu": None})
    return text, (folder / "scaling.md").read_text(encoding="utf-8"), folder


def test_exponents_are_those_of_the_rows(report):
    text, _, _ = report
    assert cells(text, "forward", "time", "linear") == ["1.00", "1.00 to 1.00", "1.0000", "6 from 256"]
    assert cells(text, "forward", "time", "softmax-flash")[0] == "2.00"
    assert cells(text, "train", "peak memory", "softmax-flash")[0] == "1.00"
    assert cells(text, "train", "peak memory", "softmax-math") == ["2.00", "2.00 to 2.00", "1.0000", "4 from 256"]
    assert cells(text, "train", "saved bytes", "linear")[0] == "1.00"
    assert cells(text, "decode", "state bytes", "linear")[:2] == ["0.00", "0.00 to 0.00"]
    assert cells(text, "decode", "state bytes", "softmax-flash")[0] == "1.00"


def test_crossovers_and_longest_lengths(report):
    text, _, _ = report
    # 1e-3 + 3e-6 N = 1e-9 N² at N = 3,303.
    ratio = 1e-9 * 8192**2 / (1e-3 + 3e-6 * 8192)
    assert cells(text, "forward", "time", "linear", "softmax-flash") == ["about 3,300", f"{ratio:.2f}× at 8,192"]
    assert cells(text, "train", "peak memory", "linear", "softmax-math")[0] == "the shortest, 256"
    assert cells(text, "train", "peak memory", "linear ≈", "softmax-flash") == ["–", "alike at 8,192"]
    assert cells(text, "train", "softmax-math") == ["2,048", "out of memory at 4,096 (a / of 2 GiB)"]
    assert cells(text, "train", "linear") == ["8,192", "nothing longer was tried"]


def test_both_renderings_are_whole(report):
    text, markdown, folder = report
    assert max(map(len, text.splitlines())) <= 100
    assert (folder / "scaling.png").stat().st_size > 10_000
    assert "scaling.svg" in markdown
    assert "Measured with torch 2.13.0; cpu cores 2." in markdown
    assert "Measured with torch 2.13.0; cpu cores 2." in text
    assert "| 4,096 | 13.3 ms, 16.0 MiB | 16.8 ms, 16.0 MiB | out of memory |" in markdown
    assert "| 8,192 | 25.6 ms, 32.0 MiB | 67.1 ms, 32.0 MiB | skipped |" in markdown
    assert "| 8,192 | 100 µs, 130 KiB |" in markdown
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    for found in re.findall(r"^\| .* \|$", markdown, re.MULTILINE):
        if "---" not in found:
            assert all(cell.strip() in text for cell in found.strip("|").split("|"))


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves the pictures out, which take a second each."""
    monkeypatch.setattr("lin_attn.scaling.report.draw", lambda found, paths: None)


def test_settings_and_backends_do_not_mix(tmp_path, undrawn):
    fast = [replace(row, backend="a backend of a long name") for row in run_of() if row.mechanism == "linear"]
    slow = [
        replace(row, dtype="bfloat16", seconds_median=1e-12 * row.length**2) if row.status == "ok" else row
        for row in run_of()
        if row.mechanism == "linear"
    ]
    text = write_report(run_of() + fast + slow, tmp_path, {})
    first, second = text.split("op level, cpu, bfloat16")
    assert cells(first, "forward", "time", "linear (chunked)")[0] == "1.00"
    assert cells(first, "forward", "time", "linear (a backend of a long name)")[0] == "1.00"
    assert cells(second, "forward", "time", "linear (chunked)")[0] == "2.00"
    assert "softmax" not in second
    assert max(map(len, text.splitlines())) <= 100


def test_few_lengths_and_no_rows_are_said(tmp_path, undrawn):
    text = write_report(run_of(LENGTHS[:3]), tmp_path, {})
    assert cells(text, "forward", "time", "linear") == ["–", "–", "–", "3 from 256: too few"]
    with pytest.raises(ValueError, match="no rows"):
        write_report([], tmp_path, {})
