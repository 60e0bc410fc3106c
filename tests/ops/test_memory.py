"""Linear: what is kept for backward, and what is held at once, grow with exponent 1 in N."""

import math

import pytest
import torch
from torch import Tensor

from lin_attn import Rotary, linear_attention, softmax_attention
from tests.helpers import LINEAR_BACKENDS, qkv

LENGTHS = (256, 1024, 4096, 16384)
HEADS = 4


def exponent(sizes: dict[int, float]) -> float:
    """Of a power law through the first and the last point."""
    (first, a), *_, (last, b) = sizes.items()
    return math.log(b / a) / math.log(last / first)


def saved_elements(length: int, size: int, dtype: torch.dtype, **options: object) -> float:
    """What autograd keeps, each storage once."""
    stores: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        stores[storage.data_ptr()] = storage.nbytes() // x.element_size()
        return x

    inputs = qkv(1, HEADS, HEADS, length, size, size, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = linear_attention(*inputs, rotary=Rotary(size), **options)
    out.sum().backward()
    return sum(stores.values())


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_saved_for_backward_is_the_inputs_and_little_more(backend, dtype, causal):
    """At most half as much again as q, k and v, for heads small and large: nothing of size D·M a token or a chunk."""
    for size in (16, 64):
        lengths = LENGTHS if size == 16 else LENGTHS[:3]
        saved = {n: saved_elements(n, size, dtype, causal=causal, backend=backend) for n in lengths}
        for length, elements in saved.items():
            assert elements / (length * HEADS) <= 1.5 * (2 * size + size), f"at length {length}"
        if size == 16:  # of larger heads the incoming state is 8 % at 256 tokens
            assert exponent(saved) == pytest.approx(1, abs=0.01)


def peak_bytes(length: int, **options: object) -> int:
    """The most that is allocated at any time, forward and backward, beside the inputs."""
    inputs = qkv(1, 2, 2, length, 16, 16, dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        linear_attention(*inputs, rotary=Rotary(16), **options).sum().backward()
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_peak_memory_is_linear(backend, causal):
    """Below 1 is the constant work space of a chunk. The quadratic form shows what this would see: 2."""
    assert exponent({n: peak_bytes(n, causal=causal, backend=backend) for n in (1024, 4096)}) <= 1.05
    assert exponent({n: peak_bytes(n, causal=causal, backend="reference") for n in (256, 512)}) > 1.7


@pytest.mark.parametrize("backend", LINEAR_BACKENDS)
def test_the_state_does_not_grow_and_the_cache_does(backend):
    inputs = {length: qkv(length=length, dtype=torch.bfloat16) for length in (1, 64, 1000)}
    states = {n: linear_attention(*x, return_state=True, backend=backend)[1] for n, x in inputs.items()}
    assert {state.nbytes for state in states.values()} == {2 * 2 * (6 * 5 + 6) * 4}
    assert {state.kv.untyped_storage().nbytes() for state in states.values()} == {2 * 2 * 6 * 5 * 4}
    caches = {n: softmax_attention(*x, return_state=True)[1] for n, x in inputs.items()}
    assert exponent({n: cache.nbytes for n, cache in caches.items()}) == pytest.approx(1)
