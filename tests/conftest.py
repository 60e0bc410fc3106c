"""One thread a test process: the tensors are small, and two processes run side by side."""

import pytest
import torch

from lin_attn.kernels.cpu import calls

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """What the CPU kernel should write starts as NaN, and its scratch memory too: what it leaves out shows."""
    monkeypatch.setattr(calls, "poison", True)


def pytest_collection_modifyitems(items):
    """The slow ones first, so that no process waits for another's last minute at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
