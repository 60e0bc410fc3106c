"""Tables of angles, kept for the next who asks: all layers of a model, and all steps of a training, use the same."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor]

CAPACITY = 128 * 2**20  # bytes

_kept: OrderedDict[Hashable, Tables] = OrderedDict()  # the one used last stands last
_lock = Lock()


def kept_tables(key: Hashable, make: Callable[[], Tables]) -> Tables:
    """make(), or what it gave for an equal key before, unless that went to make room; nobody may write into it.

    Under a compiler, or a mode that sees every operation, it is made anew: what is made there is not for others.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return make()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    with torch.inference_mode(False):  # so that it can be saved for a backward later
        tables = make()
    if sum(table.nbytes for table in tables) <= CAPACITY:
        with _lock:
            _kept[key] = tables
            while sum(table.nbytes for pair in _kept.values() for table in pair) > CAPACITY:
                _kept.popitem(last=False)
    return tables
