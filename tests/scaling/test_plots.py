"""The picture shows what was measured, what failed and where, and is read without colours."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from lin_attn.scaling.plan import Row
from lin_attn.scaling.plots import draw, duration, settings, size

LENGTHS = [256 << i for i in range(6)]


def run_of(lengths=LENGTHS, **changes):
    """Rows as a run leaves them: linear O(N), softmax-flash O(N²) in time, softmax-math also in memory, up to 2,048."""
    rows = []
    for mechanism, backend in (("linear", "chunked"), ("softmax-flash", "flash"), ("softmax-math", "math")):
        for phase in ("forward", "train", "decode"):
            for n in lengths:
                row = Row(mechanism, backend, "op", phase, "cpu", "float32", 1, 8, 64, n, "ok")
                if mechanism == "softmax-math" and phase != "decode" and n >= 4096:
                    status = "out of memory" if n == 4096 else "skipped"
                    rows.append(replace(row, status=status, detail="a | of 2 GiB", **changes))
                    continue
                step = 1 if mechanism == "linear" else n
                seconds = 1e-4 if phase == "decode" and mechanism == "linear" else 1e-3 + 3e-6 * n
                seconds = seconds if mechanism == "linear" else 1e-9 * n * (n if phase != "decode" else 300)
                rows.append(
                    replace(
                        row,
                        seconds_median=seconds,
                        seconds_q1=0.9 * seconds,
                        seconds_q3=1.2 * seconds,
                        peak_bytes=40000 + 4096 * n * (step if mechanism == "softmax-math" else 1),
                        saved_bytes=6144 * n if phase == "train" else None,
                        state_bytes=(133120 if mechanism == "linear" else 4096 * n) if phase == "decode" else None,
                        repeats=5,
                        **changes,
                    )
                )
    return rows


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws rows and gives the axes instead of files."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: figures.append(self))

    def drawing(rows):
        draw(settings(rows), [tmp_path / "a.png"])
        return figures[-1].axes

    return drawing


def test_every_measured_value_is_drawn_with_its_quartiles(drawn):
    axes = drawn(run_of())
    assert len(axes) == 6
    bars = {container.get_label(): container for container in axes[0].containers}
    assert list(bars) == ["linear", "softmax-flash", "softmax-math"]
    line, _, (ranges,) = bars["softmax-flash"]
    assert list(line.get_xdata()) == LENGTHS
    assert list(line.get_ydata()) == pytest.approx([1e-9 * n * n for n in LENGTHS])
    for n, segment in zip(LENGTHS, ranges.get_segments(), strict=True):
        assert list(segment[:, 1]) == pytest.approx([0.9e-9 * n * n, 1.2e-9 * n * n])
    state = {container.get_label(): container[0] for container in axes[5].containers}
    assert list(state["linear"].get_ydata()) == [133120] * 6


def test_a_failure_is_a_cross_in_sight_where_it_happened(drawn):
    axes = drawn(run_of())
    for panel in (axes[0], axes[1], axes[3], axes[4]):
        (cross,) = [line for line in panel.lines if line.get_marker() == "X"]
        assert list(cross.get_xdata()) == [4096]
        assert panel.get_xlim()[0] < 4096 < panel.get_xlim()[1]
        assert 0.8 < cross.get_ydata()[0] < 1
        highest = max(container[0].get_ydata().max() for container in panel.containers)
        assert panel.transData.transform((4096, highest))[1] < cross.get_transform().transform((4096, 0.95))[1]
        assert [text.get_text() for text in panel.texts] == ["out of memory", "∝ N", "∝ N²"]
    assert not [line for panel in (axes[2], axes[5]) for line in panel.lines if line.get_marker() == "X"]


def test_curves_are_told_apart_by_colour_by_marker_and_with_the_help_of_lines(drawn):
    lines = [container[0] for container in drawn(run_of() + run_of(backend="cpu"))[0].containers]
    assert len(lines) == len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 6
    assert len({line.get_linestyle() for line in lines}) == 4


def test_guides_have_their_slopes(drawn):
    panel = drawn(run_of())[0]
    slopes = []
    for line in panel.lines:
        if line.get_color() == "0.65":
            (x0, x1), (y0, y1) = line.get_xdata(), line.get_ydata()
            slopes.append(pytest.approx(2) if (y1 / y0) > (x1 / x0) ** 1.5 else pytest.approx(1))
    assert slopes == [1, 2]


def test_equal_rows_give_equal_files_and_a_run_without_any_success_is_drawn(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw(settings(run_of(LENGTHS[:2])), [tmp_path / name])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    lost = [Row("linear", "cpu", "op", "train", "cpu", "float32", 1, 8, 64, 256, "crash")]
    draw(settings(lost), [tmp_path / "c.svg"])
    assert "crash" in (tmp_path / "c.svg").read_text()
    assert ">linear<" in (tmp_path / "c.svg").read_text()


def test_settings_keep_apart_what_cannot_be_compared():
    rows = run_of() + run_of(dtype="bfloat16") + run_of(level="model") + run_of(batch=4)
    assert [len(setting.curves) for setting in settings(rows)] == [9] * 4
    assert len({setting.title for setting in settings(rows)}) == 4
    # Tokens a batch held constant: the batch falls as the length grows, in one curve.
    rows = [replace(row, batch=16384 // row.length) for row in run_of()]
    (setting,) = settings(rows)
    assert "batch 64 to 2" in setting.title
    assert [len(curve.rows) for curve in setting.curves] == [6] * 9
    # The same point again: the last counts.
    (setting,) = settings(run_of() + [replace(row, seconds_median=1.0) for row in run_of()])
    assert set(setting.curves[0].values("seconds_median").values()) == {1.0}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (duration(2.5e-7), "0.25 µs"),
        (duration(9.9996e-4), "1.00 ms"),
        (duration(0.0123), "12.3 ms"),
        (duration(125.4), "125 s"),
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1024), "1.00 KiB"),
        (size(1024**2 - 1), "1.00 MiB"),
        (size(20.04 * 1024**2), "20.0 MiB"),
        (size(3.25 * 1024**3), "3.25 GiB"),
    ],
)
def test_units_are_readable(text, wanted):
    assert text == wanted
