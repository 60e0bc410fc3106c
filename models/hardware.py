"""What the machine at hand can do."""

import torch


def has_bf16_products() -> bool:
    """Whether the processor (not a GPU) multiplies matrices in bfloat16 by instructions of its own."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def default_precision() -> str:
    """The trainer's precision where none is asked for: mixed bfloat16 where it is fast, else float32.

    Mixed bfloat16 keeps weights, sums and the loss in float32 and multiplies in bfloat16.
    """
    if torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    if torch.backends.mps.is_available():
        return "32-true"
    return "bf16-mixed" if has_bf16_products() else "32-true"
