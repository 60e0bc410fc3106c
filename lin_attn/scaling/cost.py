"""What a call of attention costs by arithmetic: operations, and bytes kept and held.

Operations are those of matrix products, two for each multiplication and its addition, as torch's FlopCounterMode counts
them; what is done element by element (φ, rotation, softmax, running sums) is not counted and is O(N·D) or a small part.
Bytes saved and bytes of state are exact; the peak is its largest terms. Tests hold them against what torch counts.

Letters: T = B·H sequences of one head, K of keys and values (B·H_k), N length, D head dim, C chunk; e bytes of an entry
of the inputs, w of an entry of the sums (float32 at least).
"""

import time
from dataclasses import dataclass

import torch

from lin_attn.ops.linear_attention import fastest
from lin_attn.ops.linear_cpu import backward_flops, forward_flops
from lin_attn.scaling.plan import Point

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Cost:
    """The cost of one call.

    Attributes:
        flops: operations of matrix products.
        saved_bytes: kept from forward to backward, inputs included; None but in train, and where it is not derived.
        state_bytes: of the state at position N; None but in decode.
        peak_bytes: held at once beyond the inputs, to the largest terms; None where it is not derived.
    """

    flops: int
    saved_bytes: int | None = None
    state_bytes: int | None = None
    peak_bytes: int | None = None


def cost(point: Point, *, kv_heads: int | None = None) -> Cost:
    """The cost of attention alone at a point.

    Args:
        point: mechanism, phase and shape.
        kv_heads: H_k, by default H.

    Raises:
        ValueError: for a mechanism whose cost is not known.
    """
    kv_heads = point.heads if kv_heads is None else kv_heads
    if point.mechanism == "linear":
        return _linear(point, kv_heads)
    if point.mechanism in ("softmax-flash", "softmax-math"):
        return _softmax(point, kv_heads)
    raise ValueError(f"the mechanism is {point.mechanism!r}, whose cost is not known; wanted linear or softmax-…")


def matmul_rate(point: Point, size: int = 1024) -> float:
    """Operations a second of this machine on a product of two size × size matrices, in the point's dtype."""
    generator = torch.Generator(point.device).manual_seed(0)  # the global numbers are the caller's
    x = torch.randn(size, size, generator=generator, device=point.device).to(getattr(torch, point.dtype))
    best = float("inf")
    for _ in range(4):
        begun = time.perf_counter()
        (x @ x).sum().item()  # a number has to be computed before it is read, on every device
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def expected_seconds(flops: int, rate: float, repeats: int, timeout: float) -> float:
    """A rough estimate of how long a point's process takes.

    Attention reaches about a third of the rate of large products. A process starts in 3 s; one call gives the peak,
    part of one what is saved, and a few more the time.
    """
    call = 3 * flops / rate
    timings = repeats if call < 1 else 3
    return min(timeout, 3 + (2 + timings) * call)


def _linear(point: Point, kv_heads: int) -> Cost:
    """Linear attention, by the backend's way of computing.

    Saved, but by "reference": q, k, v, e·N·D·(T + 2K); S and z that came in, w·K·(D² + D); cos and sin, w·N·D; the
    denominators, w·N·T. Held at the peak: the output, in train the gradients of q, k, v as well, and what is saved
    beside the inputs. State: S and z.
    """
    T, K, N, D = point.batch * point.heads, point.batch * kv_heads, point.length, point.head_dim
    e = BYTES[point.dtype]
    w = max(e, 4)
    state = w * K * (D * D + D)
    if point.phase == "decode":
        return Cost(linear_flops(point, kv_heads), state_bytes=state)
    made = state + w * N * (D + T)
    out, inputs = e * N * D * T, e * N * D * (T + 2 * K)
    quadratic = point.backend == "reference"
    if point.phase == "forward":
        return Cost(linear_flops(point, kv_heads), peak_bytes=None if quadratic else out + made)
    return Cost(
        linear_flops(point, kv_heads),
        saved_bytes=None if quadratic else inputs + made,
        peak_bytes=None if quadratic else out + inputs + made + w * N * T,
    )


def computed_by(point: Point) -> str:
    """The backend of linear attention, and for "auto" what it is here."""
    if point.backend != "auto":
        return point.backend
    dims, dtype = (point.head_dim, point.head_dim), getattr(torch, point.dtype)
    return fastest(torch.device(point.device), dtype, dims, "elu1", step=point.phase == "decode")


def linear_flops(point: Point, kv_heads: int) -> int:
    """Operations of linear attention.

    A chunk of C queries and keys takes, forward, q̃ k̃ᵀ and P v on the scores, 2C²D each a query head; q̃ S, 2CD² a query
    head, and S ← S + k̃ᵀ v, 2CD² a key head. Backward scans twice. Rightwards: g vᵀ, Q k̃, g Sᵀ and S; leftwards: g vᵀ,
    Qᵀ q̃, q̃ k̃ᵀ, Pᵀ g, dS ← dS + q̃ᵀ g, and v dSᵀ, k̃ dS a key head. Together, with a head of keys a query head,

        forward Σ 4C²D + 4CD²       train Σ 16C²D + 14CD²        summed over chunks

    which is linear in N since C does not grow. "cpu" computes the same, in chunks of 32. A step of decode in plain
    PyTorch is q̃ S and q̂ z, 2D² + 2D; the outer product k̃ vᵀ is done element by element. "reference" forms q̃ k̃ᵀ, q̂ k̂ᵀ
    and P v over all N², and q̃ S and k̃ᵀ v; in train each product with two gradients again twice, those with sums that
    need none once, or not at all.
    """
    T, K, N, D = point.batch * point.heads, point.batch * kv_heads, point.length, point.head_dim
    length = 1 if point.phase == "decode" else N
    train = point.phase == "train"
    backend = computed_by(point)
    if backend == "cpu":
        q, k = (point.batch, point.heads, length, D), (point.batch, kv_heads, length, D)
        return forward_flops(q, k, k, True) + (backward_flops(q, k, k, True) if train else 0)
    if backend == "reference":
        squares = 6 * T * length**2 * D
        return squares * (3 if train else 1) + 2 * T * length * D * D * (2 if train else 1) + 2 * K * length * D * D
    if backend == "recurrent":
        return 2 * T * D * D + 2 * T * D
    C = 64 if 2 * D <= 64 else 128
    sizes = [C] * (length // C) + [length % C] * (length % C > 0)
    scores, sums = sum(c * c for c in sizes) * D, length * D * D
    if train:
        return 16 * T * scores + 2 * (3 * T + 4 * K) * sums
    return 4 * T * scores + 2 * (T + K) * sums


def _softmax(point: Point, kv_heads: int) -> Cost:
    """Softmax attention by torch's kernels (flash: Dao 2023, arXiv 2307.08691, §2 and 3.1).

    Forward q kᵀ and P v, 2D each a pair of query and key; backward dV, dP, dQ and dK, and by flash q kᵀ again, since P
    was not kept. Math works on all N² pairs, flash on the N(N+1)/2 that are visible (to whole blocks).

    Saved: rotated q and k, and v, the two rotations' tables (w·N·D each), and by flash the output and a logarithm a
    row, w·N·T; by math, which computes in w, the weights, w·N²·T. At the peak, flash holds in forward the rotated q and
    k, the output and one copy, in train as many as eight tensors of q's size; math three matrices of N² in train, in
    forward two and a mask of bytes. State: the cache of k and v.
    """
    T, K, N, D = point.batch * point.heads, point.batch * kv_heads, point.length, point.head_dim
    e = BYTES[point.dtype]
    w = max(e, 4)
    if point.phase == "decode":
        return Cost(4 * T * (N + 1) * D, state_bytes=2 * e * K * N * D)
    train, inputs = point.phase == "train", N * D * (T + 2 * K)
    if point.mechanism == "softmax-flash":
        return Cost(
            (14 if train else 4) * T * D * N * (N + 1) // 2,
            saved_bytes=e * (inputs + N * D * T) + w * N * T + 2 * w * N * D if train else None,
            peak_bytes=(8 if train else 4) * e * N * D * T,
        )
    weights = w * N * N * T
    return Cost(
        (12 if train else 4) * T * N * N * D,
        saved_bytes=w * inputs + weights + 2 * w * N * D if train else None,
        peak_bytes=3 * weights if train else 2 * weights + N * N * T,
    )
