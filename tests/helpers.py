"""Oracles that share no code with lin_attn: explicit loops in float64 and rotation matrices built entry by entry.

Letters: B batch, H heads of q, K heads of k and v, N length, D head dim, M value head dim, m query, n key.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lin_attn import LinearState, Rotary, linear_attention

BACKENDS = ("reference", "chunked", "cpu")  # every backend of linear_attention that the properties are shown for
LINEAR_BACKENDS = tuple(name for name in BACKENDS if name != "reference")  # those that promise O(N)
ROPES = ("none", "after", "before")

# ‖a−b‖/‖b‖ that DESIGN.md promises, plus float64: sums of a few hundred rounded terms. float16 has 3 more bits than
# bfloat16, and its outputs and gradients are rounded once, from float32.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def widest(name: str) -> torch.dtype:
    """The widest dtype that a backend takes: the one in which it is held to the float64 truth, to TOLERANCE[dtype].

    The name may be that of a test case, with the backend as one of its words.
    """
    return torch.float32 if "cpu" in name.split() else torch.float64


FLOAT64_BACKENDS = tuple(name for name in BACKENDS if widest(name) == torch.float64)  # finite differences need it


def takes(backend: str, *, dtype: torch.dtype = torch.float32, feature_map: str = "elu1") -> bool:
    """Whether the backend computes this; `test_backends.py` shows that it refuses what it does not."""
    return backend != "cpu" or (dtype in (torch.float32, torch.bfloat16) and feature_map != "exp")


def relative(a: Tensor, b: Tensor) -> float:
    """‖a−b‖/‖b‖ in float64; 0 for two zeros or two empties, infinite if a is not finite."""
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    a, b = a.detach().double(), b.detach().double()
    difference, size = (a - b).norm().item(), b.norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else difference


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor of wanted within the relative tolerance; errors are named."""
    errors = {name: relative(got[name], wanted[name]) for name in wanted}
    assert got.keys() == wanted.keys()
    assert all(error <= tolerance for error in errors.values()), f"beyond {tolerance}: {errors}"


def rotation_matrix(m: int, size: int, base: float = 10000.0) -> np.ndarray:
    """R_m of RoFormer's eq. 15, (D, D), entry by entry."""
    matrix = np.zeros((size, size))
    for i in range(size // 2):
        angle = m * base ** (-2 * i / size)
        matrix[2 * i, 2 * i] = matrix[2 * i + 1, 2 * i + 1] = math.cos(angle)
        matrix[2 * i, 2 * i + 1], matrix[2 * i + 1, 2 * i] = -math.sin(angle), math.sin(angle)
    return matrix


PHI: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "elu1": lambda x: np.array([e + 1 if e >= 0 else math.exp(e) for e in x]),
    "relu": lambda x: np.array([max(e, 0.0) for e in x]),
    "squared_relu": lambda x: np.array([max(e, 0.0) ** 2 for e in x]),
    "exp": lambda x: np.array([math.exp(e - max(x)) for e in x]),
    "identity": lambda x: x,
}


def loop_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: str | Callable[[np.ndarray], np.ndarray] = "elu1",
    rope: str = "none",
    normalize: bool = True,
    causal: bool = True,
    key_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Eq. 19, one query and one key at a time: "out", and the sums "kv" and "k_sum" over all keys."""
    phi = PHI[phi] if isinstance(phi, str) else phi
    qs, ks, vs = (x.detach().double().numpy() for x in (q, k, v))
    batch, heads, length, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    out = np.zeros((batch, heads, length, v.shape[3]))
    features = len(phi(ks[0, 0, 0]))
    kv, k_sum = np.zeros((batch, kv_heads, features, v.shape[3])), np.zeros((batch, kv_heads, features))

    def both(x: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """What x puts into the numerator and into the denominator."""
        if rope == "before":
            feature = phi(rotation_matrix(position, len(x)) @ x)
            return feature, feature
        feature = phi(x)
        return (rotation_matrix(position, len(feature)) @ feature if rope == "after" else feature), feature

    def real(b: int, n: int) -> bool:
        return key_mask is None or bool(key_mask[b, n])

    for b in range(batch):
        for h in range(heads):
            shared = h // (heads // kv_heads)
            for m in range(length):
                numerator, denominator = np.zeros(v.shape[3]), 0.0
                q_num, q_den = both(qs[b, h, m], m)
                for n in range(m + 1 if causal else keys):
                    if real(b, n):
                        k_num, k_den = both(ks[b, shared, n], n)
                        numerator += (q_num @ k_num) * vs[b, shared, n]
                        denominator += q_den @ k_den
                if normalize and denominator:
                    numerator = numerator / denominator
                out[b, h, m] = numerator
        for h in range(kv_heads):
            for n in range(keys):
                if real(b, n):
                    k_num, k_den = both(ks[b, h, n], n)
                    kv[b, h] += np.outer(k_num, vs[b, h, n])
                    k_sum[b, h] += k_den
    return {"out": torch.tensor(out), "kv": torch.tensor(kv), "k_sum": torch.tensor(k_sum)}


def loop_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rope: bool = False,
    bias: Tensor | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention, one query and one key at a time; zeros where no key is visible."""
    qs, ks, vs = (x.detach().double().numpy() for x in (q, k, v))
    batch, heads, length, size = q.shape
    keys = k.shape[2]
    out = np.zeros((batch, heads, length, v.shape[3]))
    biases = None if bias is None else bias.detach().double().expand(batch, heads, length, keys).numpy()
    for b in range(batch):
        for h in range(heads):
            shared = h // (heads // k.shape[1])
            for m in range(length):
                scores = {}
                for n in range(m + 1 if causal else keys):
                    if key_mask is not None and not key_mask[b, n]:
                        continue
                    query, key = qs[b, h, m], ks[b, shared, n]
                    if rope:
                        query, key = rotation_matrix(m, size) @ query, rotation_matrix(n, size) @ key
                    scores[n] = query @ key * (1 / math.sqrt(size) if scale is None else scale)
                    scores[n] += 0 if biases is None else biases[b, h, m, n]
                total = sum(math.exp(score) for score in scores.values())
                for n, score in scores.items():
                    out[b, h, m] += math.exp(score) / total * vs[b, shared, n]
    return torch.tensor(out)


def qkv(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 7,
    size: int = 6,
    value_size: int = 5,
    *,
    keys: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (B, H, N, D), k (B, K, N_k, D), v (B, K, N_k, M): leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    keys = length if keys is None else keys
    shapes = ((batch, heads, length, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, value_size))
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )


def random_state(k: Tensor, v: Tensor, length: int = 11, seed: int = 1) -> LinearState:
    """Sums as `length` earlier keys could have left them, leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(k.dtype, torch.float32)
    kv = torch.randn(*k.shape[:2], k.shape[3], v.shape[3], generator=generator, dtype=torch.float64)
    k_sum = torch.rand(*k.shape[:2], k.shape[3], generator=generator, dtype=torch.float64) + 0.5
    return LinearState((3 * kv).to(wide).requires_grad_(), (length * k_sum).to(wide).requires_grad_(), length)


def rope_options(rope: str, head_dim: int) -> dict[str, object]:
    """Keywords of linear_attention for "none", "after" and "before"."""
    return {} if rope == "none" else {"rotary": Rotary(head_dim), "rope": rope}


def values_and_gradients(
    q: Tensor, k: Tensor, v: Tensor, state: LinearState | None = None, *, seed: int = 2, **options: object
) -> dict[str, Tensor]:
    """out, kv, k_sum of linear_attention and the gradients of a random weighting of all three, by name."""
    out, after = linear_attention(q, k, v, state=state, return_state=True, **options)  # type: ignore[call-overload]
    outputs = {"out": out, "kv": after.kv, "k_sum": after.k_sum}
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum() for x in outputs.values()
    )
    inputs = {"grad of q": q, "grad of k": k, "grad of v": v}
    if state is not None:
        inputs |= {"grad of kv": state.kv, "grad of k_sum": state.k_sum}
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)  # type: ignore[arg-type]
    return outputs | {
        name: torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(inputs.items(), gradients, strict=True)
    }


def double(*tensors: Tensor | LinearState) -> tuple[Tensor | LinearState, ...]:
    """The same numbers as float64 leaves."""
    return tuple(
        LinearState(*double(x.kv, x.k_sum), x.length)  # type: ignore[arg-type]
        if isinstance(x, LinearState)
        else x.detach().double().requires_grad_()
        for x in tensors
    )
