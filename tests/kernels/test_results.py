"""Memory of large results is given to the next one, and never to two at a time."""

import gc
import os

import pytest
import torch

from lin_attn import linear_attention
from lin_attn.kernels.cpu import results
from tests.helpers import assert_close

LARGE = (results.LARGE // 4,)  # of float32


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch):
    monkeypatch.setenv("LIN_ATTN_KEPT_MIB", "128")
    results.release()
    yield
    results.release()


def empty(shape, dtype):
    strides = torch.empty(shape, device="meta").stride()
    return results.empty(shape, strides, dtype)


def kept_bytes():
    return sum(map(len, results._kept))


def test_the_next_result_lies_where_the_last_one_was():
    first = empty(LARGE, torch.float32)
    first.fill_(1.0)
    address = first.data_ptr()
    del first
    assert kept_bytes() == results.LARGE
    assert empty(LARGE, torch.float32).data_ptr() == address


def test_memory_in_use_is_not_given_away():
    first = empty(LARGE, torch.float32).fill_(1.0)
    view = first[5:].view(torch.int32)  # keeps the storage, like any view
    del first
    gc.collect()
    assert kept_bytes() == 0
    second = empty(LARGE, torch.float32).fill_(2.0)
    assert view.view(torch.float32).eq(1.0).all()
    assert second.eq(2.0).all()


def test_another_size_gets_memory_of_its_own():
    del_me = empty(LARGE, torch.float32)
    address = del_me.data_ptr()
    del del_me
    larger = empty((2 * LARGE[0],), torch.float32)
    assert larger.data_ptr() != address
    assert kept_bytes() == results.LARGE
    assert empty((LARGE[0] // 2, 4), torch.bfloat16).data_ptr() == address  # as many bytes


def test_no_more_is_kept_than_the_limit_allows(monkeypatch):
    monkeypatch.setenv("LIN_ATTN_KEPT_MIB", "16")
    tensors = [empty(LARGE, torch.float32) for _ in range(6)]
    tensors.clear()
    assert kept_bytes() == 16 * 2**20


def test_unless_said_otherwise_it_is_an_eighth_of_the_memory(monkeypatch):
    monkeypatch.delenv("LIN_ATTN_KEPT_MIB")
    assert 0 < results.limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


def test_what_is_too_large_to_keep_drives_nothing_out(monkeypatch):
    monkeypatch.setenv("LIN_ATTN_KEPT_MIB", "16")
    del_me = empty(LARGE, torch.float32)
    del del_me
    too_large = empty((8 * LARGE[0],), torch.float32)
    del too_large
    assert kept_bytes() == results.LARGE


def test_a_result_is_a_tensor_like_any_other():
    with torch.device("meta"):  # a default for the caller's tensors, not for this one
        q = torch.randn(1, 4, 16384, 64, device="cpu")
        with torch.no_grad():
            out = linear_attention(q, q, q, backend="cpu")
    assert out.device.type == "cpu"
    assert not out._is_view()
    assert out.is_contiguous()
    out.add_(torch.ones((), requires_grad=True))
    out.detach_()


def test_nothing_is_kept_on_request(monkeypatch):
    monkeypatch.setenv("LIN_ATTN_KEPT_MIB", "0")
    tensor = empty(LARGE, torch.float32)
    tensor.untyped_storage().resize_(8)  # torch's own, which can be resized
    del tensor
    assert kept_bytes() == 0


@pytest.mark.parametrize("value", ["-1", "much", ""])
def test_a_limit_that_is_no_number_is_refused(value, monkeypatch):
    monkeypatch.setenv("LIN_ATTN_KEPT_MIB", value)
    with pytest.raises(ValueError, match="LIN_ATTN_KEPT_MIB"):
        results.limit()


def test_training_in_kept_memory_gives_the_same_again():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 16384, 64, generator=generator, requires_grad=True) for _ in range(3))
    cotangent = torch.randn(q.shape, generator=generator)

    def step():
        out = linear_attention(q, k, v, backend="cpu")
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent)]

    first = step()
    copies = [x.clone() for x in first]
    for x in first:
        x.fill_(float("nan"))
    del first, x
    assert kept_bytes() == 64 * 2**20
    for again, copy in zip(step(), copies, strict=True):
        assert torch.equal(again, copy)
    assert_close({"out": copies[0]}, {"out": linear_attention(q, k, v, backend="chunked").double()}, 1e-4)
