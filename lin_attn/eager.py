"""Whether operations run at once, on numbers."""

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.nn import Parameter


def is_eager() -> bool:
    """False under a compiler, a trace, a mode that sees every operation, or a transform of torch.func.

    What is made there is not for others to keep, sizes may not be known, and the dispatcher has work to do.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
        or torch._C._functorch.peek_interpreter_stack()
    )


def is_bare(*tensors: Tensor) -> bool:
    """Whether the dispatcher has nothing to do but for autograd: operations run at once on plain CPU tensors.

    One whose memory was taken away, as FSDP and offloading do between uses, is none.
    """
    if not is_eager():
        return False
    for x in tensors:
        if type(x) not in (Tensor, Parameter) or torch._C._dispatch_keys(x).raw_repr() not in _PLAIN:
            return False
        if x.untyped_storage().nbytes() == 0 and x.numel() > 0:
            return False
    return True


def _plain_keys() -> frozenset[int]:
    """The dispatch keys of tensors that are numbers in memory and no more; a lazy minus, for one, has others."""
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    return frozenset(torch._C._dispatch_keys(x).raw_repr() for x in (torch.empty(0, device="cpu"), inference))


_PLAIN = _plain_keys()
