"""lin-attn figures writes pictures and the numbers that they show, and refuses what it cannot draw."""

import csv
import math

import pytest


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_pictures_come_with_the_numbers_that_they_show(run, tmp_path, capsys):
    assert run("figures", "--out", tmp_path / "a" / "b") == 0
    told = capsys.readouterr().out.split()
    names = ["rope-decay.csv", "rope-decay.png", "sinusoidal.csv", "sinusoidal.png"]
    assert [path.rpartition("/")[2] for path in told] == names
    folder = tmp_path / "a" / "b"
    for name in names:
        if name.endswith("png"):
            assert (folder / name).read_bytes()[:4] == b"\x89PNG"
    head, *bound = rows(folder / "rope-decay.csv")
    assert head == ["distance", "relative_upper_bound"]
    assert [int(row[0]) for row in bound] == list(range(257))
    # At distance 0 all S_j are j, and at 256 the bound is a third of that and less.
    assert float(bound[0][1]) == pytest.approx(32.5)
    assert float(bound[256][1]) < 32.5 / 3
    head, *table = rows(folder / "sinusoidal.csv")
    assert head == ["position", *map(str, range(128))]
    assert len(table) == 128
    assert float(table[7][1 + 2 * 5]) == pytest.approx(math.sin(7 / 10000 ** (10 / 128)), abs=1e-12)
    assert float(table[7][2 + 2 * 5]) == pytest.approx(math.cos(7 / 10000 ** (10 / 128)), abs=1e-12)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--head-dim", 7, "head_dim"),
        ("--base", 0, "base"),
        ("--distances", 1, "distances"),
        ("--d-model", 9, "d_model"),
        ("--positions", 0, "positions"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(run, tmp_path, capsys, option, value, named):
    assert run("figures", "--out", tmp_path, option, value) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
