"""What is measured at level op: attention on random inputs, as a call without arguments that can be repeated.

    linear         lin_attn.linear_attention with φ = elu + 1 and RoPE after it, by the backend that the point names
    softmax-flash  lin_attn.softmax_attention with RoPE, by torch's flash kernel: O(N) memory, O(N²) time
    softmax-math   the same, by plain matrix products, which hold all N² weights

All are causal. A phase is one call: *forward* without gradients; *train* forward and the gradients of q, k and v for a
random gradient of the output; *decode* one token on a state at position N, which is left as it is, so that each repeat
is at that position.

Letters: B batch, H heads, N length, D head dim.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lin_attn import KVCache, LinearState, Rotary, linear_attention, softmax_attention
from lin_attn.scaling.plan import Point

KERNELS = {"softmax-flash": SDPBackend.FLASH_ATTENTION, "softmax-math": SDPBackend.MATH}


@dataclass(frozen=True)
class Operation:
    """One call of what is measured.

    Attributes:
        run: makes the call, whole; what it returns is dropped.
        forward: the part of it whose results autograd goes back from; train only.
        state_bytes: the size of the state that the call starts from; decode only.
    """

    run: Callable[[], Any]
    forward: Callable[[], Any] | None = None
    state_bytes: int | None = None


def build(point: Point) -> Operation:
    """The operation of a point, by the subject that it names.

    Raises:
        ValueError: if there is no such subject, or it cannot do what the point asks.
    """
    module, _, name = point.subject.partition(":")
    try:
        subject: Callable[[Point], Operation] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"subject is {point.subject!r}; wanted module:function ({error})") from error
    return subject(point)


def operation(point: Point) -> Operation:
    """Attention alone, on inputs (B, H, N, D) of a normal distribution.

    Raises:
        ValueError: if the kernel that the mechanism names does not compute these shapes here.
    """
    shape = (point.batch, point.heads, 1 if point.phase == "decode" else point.length, point.head_dim)
    dtype = getattr(torch, point.dtype)
    generator = torch.Generator(point.device).manual_seed(point.seed)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=point.device)

    attend = attention(point)
    q, k, v = (random(*shape).requires_grad_(point.phase == "train") for _ in range(3))
    if point.phase == "forward":
        return Operation(torch.no_grad()(lambda: attend(q, k, v)))
    if point.phase == "train":
        cotangent = random(*shape)
        return Operation(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), cotangent), lambda: attend(q, k, v))
    state = random_state(point, point.heads, random)
    return Operation(torch.no_grad()(lambda: attend(q, k, v, state=state, return_state=True)), state_bytes=state.nbytes)


def attention(point: Point) -> Callable[..., Any]:
    """The mechanism of a point as a function of q, k and v."""
    rotary = Rotary(point.head_dim)
    if point.mechanism == "linear":
        return lambda q, k, v, **options: linear_attention(q, k, v, rotary=rotary, backend=point.backend, **options)

    def softmax(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        with kernel(point.mechanism):
            return softmax_attention(q, k, v, rotary=rotary, **options)

    check_kernel(point)
    return softmax


def kernel(mechanism: str) -> AbstractContextManager[None]:
    """Within it, torch computes softmax attention by the kernel that the mechanism names."""
    return sdpa_kernel(KERNELS[mechanism]) if mechanism in KERNELS else nullcontext()


def random_state(point: Point, kv_heads: int, random: Callable[..., Tensor]) -> LinearState | KVCache:
    """A state at position N as random keys could have left it, without the cost of reading them."""
    shape = (point.batch, kv_heads, point.length, point.head_dim)
    dtype = getattr(torch, point.dtype)
    if point.mechanism != "linear":
        return KVCache(random(*shape, dtype=dtype), random(*shape, dtype=dtype), point.length)
    wide = torch.promote_types(dtype, torch.float32)
    kv = random(point.batch, kv_heads, point.head_dim, point.head_dim, dtype=wide)
    return LinearState(kv, point.length * (1 + random(*kv.shape[:3], dtype=wide).abs()), point.length)


def check_kernel(point: Point) -> None:
    """Sees which kernel torch really takes for such heads, since some are only a preference.

    Raises:
        ValueError: if it is another one than the mechanism names, or torch has none.
    """
    queries, keys = (1, 8) if point.phase == "decode" else (8, 8)
    dtype = getattr(torch, point.dtype)
    q, k = (torch.zeros(1, 1, n, point.head_dim, dtype=dtype, device=point.device) for n in (queries, keys))
    with kernel(point.mechanism), _Calls() as calls, torch.set_grad_enabled(point.phase == "train"):
        try:
            torch.nn.functional.scaled_dot_product_attention(
                q.requires_grad_(point.phase == "train"), k, k, is_causal=queries > 1
            )
        except RuntimeError as error:
            raise ValueError(
                f"{point.mechanism} has no kernel on {point.device} for {point.dtype} and head_dim {point.head_dim}"
            ) from error
    if any("flash" in name for name in calls.names) != (point.mechanism == "softmax-flash"):
        raise ValueError(f"{point.mechanism} was asked for and torch computed {', '.join(calls.names)}")


class _Calls(TorchDispatchMode):
    """Notes the names of the operators that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
