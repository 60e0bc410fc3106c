"""The compiled kernel as functions of ctypes; csrc/problem.h is the other side."""

import ctypes
import functools
import warnings
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

from lin_attn.kernels.cpu.build import BuildError, build


class TensorView(ctypes.Structure):
    """A tensor of four axes: its address, and strides in elements."""

    _fields_ = (("data", c_void_p), ("stride", c_int64 * 4))


class Problem(ctypes.Structure):
    """csrc/problem.h's Problem, field by field."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "dim", "value_dim")),
        *((name, TensorView) for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")),
        ("key_mask", c_void_p),
        ("key_mask_stride", c_int64 * 2),
        *((name, c_void_p) for name in ("cos", "sin", "kv", "k_sum", "new_kv", "new_k_sum")),
        *((name, c_void_p) for name in ("grad_new_kv", "grad_new_k_sum", "grad_kv", "grad_k_sum")),
        *((name, c_void_p) for name in ("denominators", "slopes")),
        ("eps", c_float),
        *((name, c_int32) for name in ("feature_map", "rope", "causal", "bf16_tensors", "bf16_products")),
        *((name, c_int32) for name in ("threads", "poison")),
    )


@functools.cache
def load() -> ctypes.CDLL | str:
    """The library, built if need be, or why there is none."""
    try:
        library = ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        return str(error)
    library.lin_attn_built.restype = c_int64
    if library.lin_attn_built(0) != ctypes.sizeof(Problem):
        return "the library and lin_attn/kernels/cpu/library.py describe different problems"
    for name in ("lin_attn_forward", "lin_attn_backward", "lin_attn_step"):
        getattr(library, name).argtypes = [ctypes.POINTER(Problem)]
    library.lin_attn_attend.argtypes = [ctypes.POINTER(Problem), c_void_p, c_int64, c_void_p, c_int32, c_int32]
    library.lin_attn_project.argtypes = [c_void_p, c_void_p, *[c_int64] * 3, c_int32, c_int32]
    library.lin_attn_project.restype = None
    return library


@functools.cache
def unusable() -> str | None:
    """None if the kernel can be called, else the reason, of which a warning is given once."""
    library = load()
    if not isinstance(library, str):
        return None
    warnings.warn(
        f"linear attention goes without its fused CPU kernel, several times slower: {library}. Install a C++ compiler "
        "(g++ or clang++) or name one in CXX; LIN_ATTN_BACKEND=chunked goes without it on purpose",
        RuntimeWarning,
        stacklevel=2,
    )
    return library


def usable() -> bool:
    """Whether the kernel can be called, for those who go without it as well and need no warning."""
    return not isinstance(load(), str)


def describe() -> str:
    """What was built, in words, or why nothing was."""
    library = load()
    if isinstance(library, str):
        return library
    products = ("float32 products", "bfloat16 products", "bfloat16 products in tiles (AMX)")[library.lin_attn_built(2)]
    return f"vectors of {library.lin_attn_built(1)} floats, {products}, {library._name}"


def call(name: str, problem: Problem, *arguments: Any) -> None:
    """Calls lin_attn_`name`.

    Raises:
        MemoryError: if the kernel's scratch memory was not to be had.
    """
    library = load()
    assert not isinstance(library, str), library
    if getattr(library, f"lin_attn_{name}")(ctypes.byref(problem), *arguments) != 0:
        raise MemoryError(f"no scratch memory for linear attention ({name}) on the CPU")
