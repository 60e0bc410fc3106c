"""Whether operations run at once, on numbers."""

import torch


def is_eager() -> bool:
    """False under a compiler, a trace, a mode that sees every operation, or a transform of torch.func.

    What is made there is not for others to keep, sizes may not be known, and the dispatcher has work to do.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
    )
