"""Tables of angles, kept for the next who asks: all layers of a model, and all steps of a training, use the same."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

import torch
from torch import Tensor

from lin_attn.eager import is_eager

Tables = tuple[Tensor, Tensor]

CAPACITY = 128 * 2**20  # bytes; of a row for a step, the row's
MOST = 256  # tables: each step of decoding has its own

_kept: OrderedDict[Hashable, Tables] = OrderedDict()  # the one used last stands last
_kept_bytes = 0
_lock = Lock()
_latest: tuple[Hashable, Tables] | None = None  # what the next layer of a model asks for too: no hash, no lock


def kept_tables(key: Hashable, make: Callable[[], Tables]) -> Tables:
    """make(), or what it gave for an equal key before, unless that went to make room; nobody may write into it.

    Where operations do not run at once it is made anew: what is made there is not for others.
    """
    global _kept_bytes, _latest
    if not is_eager():
        return make()
    latest = _latest
    if latest is not None and latest[0] == key:
        return latest[1]
    with _lock:
        tables = _kept.get(key)
        if tables is not None:
            _kept.move_to_end(key)
            _latest = key, tables
            return tables
    with torch.inference_mode(False):  # so that it can be saved for a backward later
        tables = make()
    size = _bytes(tables)
    if size <= CAPACITY:
        _latest = key, tables
        with _lock:
            if key not in _kept:  # another thread may have been quicker
                _kept[key] = tables
                _kept_bytes += size
            while _kept_bytes > CAPACITY or len(_kept) > MOST:
                gone, its_tables = _kept.popitem(last=False)
                _kept_bytes -= _bytes(its_tables)
                if _latest is not None and _latest[0] == gone:
                    _latest = None
    return tables


def _bytes(tables: Tables) -> int:
    return tables[0].nbytes + tables[1].nbytes
