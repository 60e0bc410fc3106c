"""Costs by arithmetic are those that torch counts: operations, bytes saved and bytes of state exactly."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lin_attn.ops import linear_chunked
from lin_attn.scaling.cost import cost
from lin_attn.scaling.measure import saved_bytes
from lin_attn.scaling.plan import PHASES, Point
from lin_attn.scaling.subjects import operation
from models.config import NetworkConfig
from models.scaling import language_model, network_cost, with_mechanism

POINT = Point("linear", "chunked", "op", "train", "cpu", "float32", 2, 3, 16, 150)
WAYS = [("linear", "chunked"), ("linear", "auto"), ("linear", "reference"), ("softmax-math", "math")]


def added_product(_: Any, a: torch.Size, b: torch.Size, **__: Any) -> int:
    return 2 * a.numel() * b[-1]


IN_PLACE = {torch.ops.aten.baddbmm_: added_product}  # which the counter leaves out


def counted(run: Callable[[], Any]) -> int:
    """Operations by torch's counter, which looks into the ops that are opaque to it by running them once more."""

    def inside(op: Any) -> Any:
        def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
                op._init_fn(*args, **kwargs)
            return counter.get_total_flops()

        count._get_raw = True  # the tensors, not their shapes
        return count

    ops = torch.ops.lin_attn
    mapping = {
        ops.linear_chunked: inside(linear_chunked._forward),
        ops.linear_chunked_backward: inside(linear_chunked._backward),
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return counter.get_total_flops()


def allocated(run: Callable[[], Any]) -> int:
    """The most that torch's allocator holds at any time of a call."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("mechanism", "backend"), WAYS)
@pytest.mark.parametrize("head_dim", [16, 64])  # chunks of 64 and of 128
def test_operations_are_those_that_torch_counts(mechanism, backend, phase, head_dim):
    point = replace(POINT, mechanism=mechanism, backend=backend, phase=phase, head_dim=head_dim)
    assert cost(point).flops == counted(operation(point).run) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("mechanism", "backend"), [("linear", "auto"), ("softmax-flash", "flash"), ("softmax-math", "math")]
)
def test_bytes_saved_are_those_that_autograd_keeps(mechanism, backend, dtype):
    for length in (150, 513):
        point = replace(POINT, mechanism=mechanism, backend=backend, dtype=dtype, length=length)
        assert cost(point).saved_bytes == saved_bytes(operation(point).forward)


def test_bytes_saved_grow_by_the_same_with_every_token_of_linear_attention():
    saved = [saved_bytes(operation(replace(POINT, length=n)).forward) for n in (1000, 1001, 2000, 3000)]
    a_token = saved[1] - saved[0]
    assert saved[2] - saved[0] == saved[3] - saved[2] == 1000 * a_token
    assert a_token == 4 * (2 * 3 * (3 * 16 + 1) + 16)  # q, k, v and a denominator a head; cos and sin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_of_linear_is_constant_and_of_softmax_grows_with_every_token(dtype):
    for length in (1, 100, 1000):
        point = replace(POINT, phase="decode", dtype=dtype, length=length)
        assert operation(point).state_bytes == cost(point).state_bytes == 2 * 3 * (16 * 16 + 16) * 4
        softmax = replace(point, mechanism="softmax-flash", backend="flash")
        entry = 4 if dtype == "float32" else 2
        assert operation(softmax).state_bytes == cost(softmax).state_bytes == 2 * entry * 2 * 3 * 16 * length


@pytest.mark.parametrize("phase", ["forward", "train"])
@pytest.mark.parametrize(
    ("mechanism", "backend"), [("linear", "chunked"), ("softmax-flash", "flash"), ("softmax-math", "math")]
)
def test_the_peak_grows_as_that_of_the_allocator_to_a_quarter(mechanism, backend, phase):
    """Its growth, since it leaves out what a chunk needs, which is the same at all lengths."""
    short, long = (
        replace(POINT, mechanism=mechanism, backend=backend, phase=phase, batch=1, heads=8, length=n)
        for n in (512, 1024)
    )
    grown = allocated(operation(long).run) - allocated(operation(short).run)
    assert cost(long).peak_bytes - cost(short).peak_bytes == pytest.approx(grown, rel=0.25)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("mechanism", "backend"), [("linear", "auto"), ("softmax-math", "math")])
@pytest.mark.parametrize("fields", [{"n_kv_heads": 1, "ffn": "swiglu"}, {"embedding_size": 8, "head": "bert"}], ids=str)
def test_operations_of_a_model_are_those_that_torch_counts(fields, mechanism, backend, phase, tmp_path):
    network = {"vocab_size": 50, "d_model": 24, "n_layers": 2, "n_heads": 3} | fields
    config = NetworkConfig(**network)
    path = tmp_path / "model.yaml"
    path.write_text(json.dumps({"model": {"init_args": {"network": network}}}))
    point = replace(
        POINT, mechanism=mechanism, backend=backend, phase=phase, level="model", head_dim=8, model=str(path)
    )
    subject = language_model(point)
    assert network_cost(point, config).flops == counted(subject.run)
    assert network_cost(point, config).state_bytes == subject.state_bytes


def test_a_mechanism_takes_the_place_of_another_in_a_network():
    config = NetworkConfig(feature_map="relu", rope="before", normalize=False)
    softmax = with_mechanism(config, "softmax-flash")
    assert softmax == NetworkConfig(attention="softmax")
    assert with_mechanism(config, "linear") == config
    assert with_mechanism(softmax, "linear").attention == "linear"
