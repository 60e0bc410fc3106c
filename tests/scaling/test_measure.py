"""Measured is what was asked for, beyond what was there before, and nothing is measured under another's name."""

import sys
import time
from dataclasses import replace

import pytest
import torch

from lin_attn.scaling import measure
from lin_attn.scaling.measure import saved_bytes, times
from lin_attn.scaling.plan import PHASES, Point
from lin_attn.scaling.runner import Limits, run_point
from lin_attn.scaling.subjects import KERNELS, Operation, attention, operation

POINT = Point("linear", "auto", "op", "train", "cpu", "float32", 1, 2, 16, 100)
HERE = "tests.scaling.test_measure"
LINUX_ONLY = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def allocates(point: Point) -> Operation:
    """Holds 200 MB of inputs; a call takes `length` MB more, in two steps of which the first is given back in part."""
    inputs = torch.ones(200_000_000, dtype=torch.uint8)

    def run() -> None:
        for part in (2, 1):
            torch.ones(point.length * 1_000_000 // part, dtype=torch.uint8).add_(inputs[0])

    return Operation(run)


@LINUX_ONLY
@pytest.mark.parametrize("megabytes", [40, 400])
def test_the_peak_is_what_a_call_holds_beyond_the_inputs(megabytes):
    row = run_point(replace(POINT, length=megabytes, subject=f"{HERE}:allocates"), Limits(repeats=3))
    assert row.status == "ok", row.detail
    assert row.peak_bytes == pytest.approx(megabytes * 1_000_000, rel=0.05)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("mechanism", "backend"), [("linear", "reference"), ("softmax-flash", "flash"), ("softmax-math", "math")]
)
def test_every_mechanism_is_measured_in_every_phase_and_bytes_agree_between_runs(mechanism, backend, phase):
    point = replace(POINT, mechanism=mechanism, backend=backend, phase=phase)
    first, second = measure(point, repeats=3), measure(point, repeats=3)
    assert first.status == "ok"
    assert first.repeats == 3
    assert 0 < first.seconds_q1 <= first.seconds_median <= first.seconds_q3
    assert (first.saved_bytes is not None) == (phase == "train")
    assert (first.state_bytes is not None) == (phase == "decode")
    assert (first.saved_bytes, first.state_bytes) == (second.saved_bytes, second.state_bytes)


@pytest.mark.parametrize("mechanism", list(KERNELS))
@pytest.mark.parametrize("phase", PHASES)
def test_a_kernel_that_torch_does_not_take_is_no_measurement(mechanism, phase, monkeypatch):
    other = next(kernel for name, kernel in KERNELS.items() if name != mechanism)
    point = replace(POINT, mechanism=mechanism, phase=phase)
    attention(point)
    monkeypatch.setitem(KERNELS, mechanism, other)
    with pytest.raises(ValueError, match=f"{mechanism} was asked for and torch computed"):
        attention(point)


def test_what_is_saved_counts_each_storage_once_and_whole():
    x, y = (torch.ones(1000, requires_grad=True) for _ in range(2))
    assert saved_bytes(lambda: x * y) == 8000
    assert (
        saved_bytes(lambda: (x * x).exp() * x) == 8000
    )  # x three times, its square's exponential once, not the square
    assert saved_bytes(lambda: x[:10] * x[10:20]) == 4000
    assert saved_bytes(lambda: x.detach() * y.detach()) == 0


def test_the_decoded_token_leaves_the_state_where_it_was():
    subject = operation(replace(POINT, phase="decode"))
    first, second = subject.run(), subject.run()
    assert torch.equal(first[0], second[0])
    assert first[1].length == second[1].length == 101


def test_calls_of_microseconds_are_timed_many_at_once_and_long_ones_not_more_often_than_the_budget_allows():
    calls = []
    assert len(times(lambda: calls.append(0), torch.device("cpu"), 4, 5.0)) == 4
    assert len(calls) > 1000
    assert len(times(lambda: time.sleep(0.03), torch.device("cpu"), 99, 0.1)) == 4
    assert len(times(lambda: time.sleep(0.03), torch.device("cpu"), 99, 0.0)) == 3
    known = times(lambda: time.sleep(0.03), torch.device("cpu"), 99, 0.0, [7.0])
    assert known[0] == 7
    assert len(known) == 3


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="repeats is 2; wanted at least 3"):
        measure(POINT, repeats=2)
    with pytest.raises(ValueError, match="subject is 'nowhere:at_all'; wanted module:function"):
        measure(replace(POINT, subject="nowhere:at_all"))
