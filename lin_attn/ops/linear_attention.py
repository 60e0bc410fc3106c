"""Linear attention with rotary position embedding after the feature map (RoFormer, arXiv 2104.09864, eq. 19).

    out_m = Σ_{n≤m} (R_m φ(q_m))ᵀ (R_n φ(k_n)) v_n / Σ_{n≤m} φ(q_m)ᵀ φ(k_n)

The denominator is not rotated: it stays positive, while the numerator's weights may be negative. Numerator and
denominator thus use different queries and keys, and two running sums are carried, S_m = Σ (R_n φ(k_n)) v_nᵀ and
z_m = Σ φ(k_n).

This function fixes the mathematics; `backend` picks who computes it.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from lin_attn.eager import is_eager
from lin_attn.feature_maps import FeatureMap, is_registered
from lin_attn.feature_maps import feature_map as find_feature_map
from lin_attn.ops.backends import check_backend
from lin_attn.ops.checks import check_key_mask, check_qkv, check_rotary
from lin_attn.ops.linear_chunked import chunked
from lin_attn.ops.linear_cpu import fused, reason_against, wants_grad
from lin_attn.ops.linear_reference import Rotation, quadratic, recurrent
from lin_attn.ops.state import LinearState
from lin_attn.positions import Rotary

EPS = 1e-12  # the least magnitude of a denominator, unless the caller says another


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = ...,
    rotary: Rotary | None = ...,
    rope: str = ...,
    normalize: bool = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[False] = ...,
    eps: float = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = ...,
    rotary: Rotary | None = ...,
    rope: str = ...,
    normalize: bool = ...,
    causal: bool = ...,
    key_mask: Tensor | None = ...,
    state: LinearState | None = ...,
    return_state: Literal[True],
    eps: float = ...,
    backend: str = ...,
) -> tuple[Tensor, LinearState]: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] = "elu1",
    rotary: Rotary | None = None,
    rope: str = "after",
    normalize: bool = True,
    causal: bool = True,
    key_mask: Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    eps: float = EPS,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, LinearState]:
    """Kernelized attention in O(N) time, of queries over keys before them or over all keys.

    φ, rotation and sums are computed in float32 (float64 for float64 inputs), under autocast too.

    Args:
        q: queries, (B, H, N, D), floating point.
        k: keys, (B, H_k, N_k, D), with H a multiple of H_k and N_k = N if causal.
        v: values, (B, H_k, N_k, M).
        feature_map: φ: a name (see `lin_attn.feature_map`), or a callable on float32 (…, D) → (…, D′) applied per
            head; autograd then keeps what that callable keeps.
        rotary: the rotation R, or None for no positions. Its head_dim is D′ after φ, D before.
        rope: "after": rotate φ(q) and φ(k) in the numerator only (eq. 19); "before": φ of rotated q and k in both. The
            weights of "after" depend on m − n only; those of "before" on m and n, so that left padding changes them.
        normalize: divide by the sum of unrotated weights; False leaves the numerator.
        causal: query m sees the keys n ≤ m (and the state); otherwise all keys.
        key_mask: (B, N_k) bool, True where the key is real. A query that sees no key gets zeros.
        state: what an earlier call returned for the tokens before these: positions go on from its length.
        return_state: return the state after these tokens as well.
        eps: the least magnitude of a denominator, at which it is held; ≥ 0. It is small, since a denominator may be:
            8 features at −8 make one of 10⁻⁶, which is exact to the last digit all the same.
        backend: "cpu" (fused, float32 and bfloat16 on the CPU), "chunked" (pure PyTorch, O(N)), "reference"
            (quadratic), or "auto", the fastest that can; LIN_ATTN_BACKEND in the environment says what "auto" is.

    Returns:
        The output (B, H, N, M) in q's dtype, or that and a LinearState.

    Raises:
        ValueError: naming the argument that does not fit, what came and what was wanted.
    """
    check_qkv(q, k, v, causal=causal)
    check_key_mask(key_mask, k)
    if rope not in ("after", "before"):
        raise ValueError(f"rope is {rope!r}; wanted 'after' or 'before' the feature map (rotary=None for no rotation)")
    backend = check_backend(backend)
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; wanted a number ≥ 0")

    if state is not None and not isinstance(state, LinearState):
        raise ValueError(f"state is a {type(state).__name__}; wanted the LinearState of an earlier call")

    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    offset = 0 if state is None else state.length
    with _no_autocast(q.device.type):
        phi, dtype = _resolve(feature_map), q.dtype
        if phi is None:  # an arbitrary callable is differentiated by autograd, outside the backends
            assert callable(feature_map)
            if rope == "before" and rotary is not None:
                check_rotary(rotary, q.shape[-1])
                q, k, rotary = rotary(q.to(wide), offset), rotary(k.to(wide), offset), None
            v, before = v.to(wide), (q.shape[:-1], k.shape[:-1])
            q, k = feature_map(q.to(wide)).to(wide), feature_map(k.to(wide)).to(wide)
            if (q.shape[:-1], k.shape[:-1]) != before or q.shape[-1] != k.shape[-1]:
                raise ValueError(
                    f"feature_map gave shapes {tuple(q.shape)} and {tuple(k.shape)}; "
                    f"wanted {tuple(before[0])} and {tuple(before[1])}, each followed by one D′"
                )
            phi = find_feature_map("identity")
        check_rotary(rotary, q.shape[-1])
        sums = _sums(state, k, v, wide)
        rotation: Rotation = None
        if rotary is not None:
            rotation = rotary.tables(max(q.shape[2], k.shape[2]), offset, device=q.device, dtype=wide)

        dims = q.shape[3], v.shape[3]
        if backend == "auto":
            step = q.shape[2] == k.shape[2] == 1 and not wants_grad(q, k, v, *sums)
            backend = fastest(q.device, q.dtype, dims, phi.name, step=step)
        elif backend == "cpu" and (reason := reason_against(q.device, q.dtype, dims, phi.name)) is not None:
            raise ValueError(
                f"backend 'cpu' cannot compute this: {reason}; wanted backend='auto' or 'chunked' for that"
            )
        out, kv, k_sum = _IMPLEMENTATIONS[backend](
            *((q, k, v) if backend in ("cpu", "chunked") else (q.to(wide), k.to(wide), v.to(wide))),
            key_mask,
            sums,
            rotation,
            phi=phi,
            rope=rope,
            normalize=normalize,
            causal=causal,
            eps=eps,
        )
        out = out.to(dtype)
    return (out, LinearState(kv, k_sum, offset + k.shape[2])) if return_state else out


def fastest(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], feature_map: str, *, step: bool) -> str:
    """What "auto" takes for inputs with dims D and M; step: for one token, without gradients."""
    if reason_against(device, dtype, dims, feature_map) is None:
        return "cpu"
    return "recurrent" if step else "chunked"


# "recurrent" is a decode step in plain PyTorch: one update of the sums, no chunk to set up, nothing to keep.
_IMPLEMENTATIONS = {"reference": quadratic, "recurrent": recurrent, "chunked": chunked, "cpu": fused}


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    # Entering a context takes as long as a step of decoding; most calls need none.
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _resolve(feature_map: str | Callable[[Tensor], Tensor]) -> FeatureMap | None:
    """The registered map that is meant, or None for a callable of the user's own."""
    if isinstance(feature_map, str):
        return find_feature_map(feature_map)
    if is_registered(feature_map):
        return feature_map
    if not callable(feature_map):
        raise ValueError(f"feature_map is {feature_map!r}; wanted a name or a callable on (…, D)")
    return None


def _sums(state: LinearState | None, k: Tensor, v: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """S (B, H_k, D, M) and z (B, H_k, D) to start from, of the wide dtype."""
    shape = (*k.shape[:2], k.shape[3], v.shape[3])
    if state is None:
        return _zeros(k, shape, wide), _zeros(k, shape[:3], wide)
    for name, x, wanted in (("kv", state.kv, shape), ("k_sum", state.k_sum, shape[:3])):
        if x.shape != wanted or x.dtype != wide or x.device != k.device:
            raise ValueError(
                f"state.{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}; "
                f"wanted {wide} of shape {tuple(wanted)} on {k.device}"
            )
    return state.kv, state.k_sum


def _zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that nobody writes into, and that no backend gives back as a result."""
    if type(like) in (Tensor, Parameter) and like.is_cpu and is_eager() and math.prod(shape) <= 2**18:
        return _kept_zeros(shape, dtype, like.device)
    return like.new_zeros(shape, dtype=dtype)


@functools.lru_cache(maxsize=16)
def _kept_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that they can be saved for a backward later
        return torch.zeros(shape, dtype=dtype, device=device)
