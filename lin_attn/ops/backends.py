"""Who can compute `linear_attention`, and on this machine in particular.

    reference   quadratic, for clarity: the truth that the others are tested against
    chunked     pure PyTorch, O(N), on every device
    cpu         fused, in C++, compiled for the processor on first use; float32 and bfloat16

Naming one never falls back to another; "auto" takes the fastest that can do what is asked. LIN_ATTN_BACKEND in the
environment names one for all calls that do not.
"""

import os

import torch

from lin_attn.kernels import cpu

BACKENDS = ("auto", "reference", "chunked", "cpu")


def usable_backends() -> dict[str, str | None]:
    """Each backend with None if it is usable here, or with the reason why it is not."""
    return {"reference": None, "chunked": None, "cpu": cpu.unusable()}  # the first two are plain PyTorch


def check_backend(backend: str) -> str:
    """The backend, or for "auto" what LIN_ATTN_BACKEND says.

    Raises:
        ValueError: if there is none of that name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; wanted one of {', '.join(map(repr, BACKENDS))}")
    chosen = _from_environment() if backend == "auto" else backend
    if chosen not in BACKENDS:
        raise ValueError(f"LIN_ATTN_BACKEND is {chosen!r}; wanted one of {', '.join(map(repr, BACKENDS))}")
    return chosen


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _from_environment() -> str:
    return os.environ.get("LIN_ATTN_BACKEND") or "auto"
