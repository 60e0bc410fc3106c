"""Rotary embedding: R_m as the paper writes it, exact far out, a function of m − n in scores, and a pure one."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lin_attn import Rotary, linear_attention
from lin_attn.positions import rotate, tables
from tests.helpers import relative, rotation_matrix

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def vectors(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("size", [2, 6, 64])
@pytest.mark.parametrize("base", [10000.0, 100, 500000.0])
def test_equals_explicit_rotation_matrices(size, base):
    x = vectors(2, 3, 5, size)
    got = Rotary(size, base)(x, 7)
    wanted = torch.stack([x[:, :, n] @ torch.tensor(rotation_matrix(7 + n, size, base)).T for n in range(5)], dim=2)
    assert relative(got, wanted) <= 1e-14
    assert not torch.equal(got, x)


@pytest.mark.parametrize("position", [0, 1, 511, 1_000_000, 100_000_000])
def test_far_positions_rotate_right(position):
    """Float32 in and out, to 1e-6: against sines and cosines of float64 angles, one pair at a time."""
    got = Rotary(64)(torch.ones(1, 64), position)[0]
    for i in range(32):
        angle = position * 10000.0 ** (-2 * i / 64)
        wanted = (math.cos(angle) - math.sin(angle), math.sin(angle) + math.cos(angle))
        assert got[2 * i : 2 * i + 2].tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("shift", [1, -3, 4096, 1_000_000])
def test_scores_depend_on_the_distance_only(shift):
    q, k = vectors(1, 9, 32), vectors(1, 9, 32).flip(0, 1)
    rotary = Rotary(32)
    near = rotary(q, 5) @ rotary(k, 5).mT
    assert relative(rotary(q, 5 + shift) @ rotary(k, 5 + shift).mT, near) <= 1e-9
    assert relative(rotary(q, 5 + shift) @ rotary(k, 5).mT, near) > 0.01


@HALVES
def test_half_precision_rounds_the_result_and_nothing_before(dtype):
    """Positions made in bfloat16 would have 407 distinct values among the first 600."""
    x = vectors(1, 2, 600, 8, dtype=dtype)
    got = Rotary(8)(x, 1_000_000)
    assert got.dtype == dtype
    assert torch.equal(got, Rotary(8)(x.float(), 1_000_000).to(dtype))


def test_lengths_are_kept():
    x = vectors(2, 3, 50, 16)
    torch.testing.assert_close(Rotary(16)(x, 12345).norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_positions_and_offset_agree(dtype):
    x, steps = vectors(2, 3, 5, 8), torch.arange(9, 14)
    wanted = Rotary(8)(x, 9)
    assert torch.equal(Rotary(8)(x, positions=steps.to(dtype)), wanted)
    assert torch.equal(Rotary(8)(x, positions=steps.to(dtype).expand(2, 5)), wanted)
    assert torch.equal(Rotary(8)(x[:, 0], positions=steps.to(dtype).expand(2, 5)), wanted[:, 0])
    assert torch.equal(Rotary(8)(x[0, 0], positions=steps.to(dtype)), wanted[0, 0])


def test_each_sequence_of_a_batch_has_its_own_positions():
    x = vectors(2, 3, 5, 8)
    positions = torch.stack((torch.arange(5), torch.tensor([7, 0, 3, 3, 1_000_000])))
    got = Rotary(8)(x, positions=positions)
    for b in range(2):
        for n in range(5):
            wanted = x[b, :, n] @ torch.tensor(rotation_matrix(int(positions[b, n]), 8)).T
            assert relative(got[b, :, n], wanted) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_x_is_not_written_to_and_not_shared(dtype):
    x = vectors(2, 3, 5, 8, dtype=dtype).requires_grad_()
    copy, version = x.detach().clone(), x._version
    out = Rotary(8)(x)
    out.detach().zero_()
    assert torch.equal(x, copy)
    assert x._version == version


def test_gradients_equal_finite_differences():
    """Of both forms: x at an odd offset in memory cannot be seen as complex numbers."""
    x = vectors(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Rotary(4)(x, 3), x)
    flat = vectors(25).requires_grad_()
    assert torch.autograd.gradcheck(lambda flat: Rotary(4)(flat[1:].view(2, 3, 4), 3), flat)


VIEWS = {
    "odd offset and stride": lambda x: x[:, :, :5, 1:9],
    "one token of a fused projection": lambda x: x[:1, :1, 0:1, :8],
    "one token at an odd offset": lambda x: x[:1, :1, 0:1, 3:11],
    "pairs not adjacent": lambda x: x[..., :5].mT[..., :2],
    "expanded": lambda x: x[:, :1, :, 0:8].expand(-1, 4, -1, -1),
    "transposed": lambda x: x.transpose(1, 2)[..., :8],
    "every other": lambda x: x[..., ::2][..., :4],
    "empty": lambda x: x[:, :, :0, :8],
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_layout_changes_nothing(view):
    """But the last bit: complex multiplication may fuse a product and a sum where the plain form does not."""
    x = VIEWS[view](vectors(2, 3, 7, 11, dtype=torch.float32))
    rotary = Rotary(x.shape[-1])
    dense = x.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(rotary(x, 3), rotary(dense, 3), rtol=0, atol=2 * torch.finfo(torch.float32).eps * 4)


def test_minus_sine_rotates_back():
    x = vectors(2, 5, 8)
    cos, sin = Rotary(8).tables(5, 3, device=x.device, dtype=x.dtype)
    assert relative(rotate(rotate(x, cos, sin), cos, -sin), x) <= 1e-15


CPU = torch.device("cpu")


@pytest.fixture
def _nothing_kept(monkeypatch):
    monkeypatch.setattr(tables, "_kept", type(tables._kept)())
    monkeypatch.setattr(tables, "_kept_bytes", 0)
    monkeypatch.setattr(tables, "_latest", None)


def kept(length=5, offset=3, base=10000.0, dtype=torch.float32):
    return Rotary(8, base).tables(length, offset, device=CPU, dtype=dtype)


@pytest.mark.usefixtures("_nothing_kept")
def test_tables_are_made_once_for_equal_rotations_and_anew_for_others():
    first = kept()
    assert all(a is b for a, b in zip(first, kept(), strict=True))
    others = [kept(6), kept(offset=4), kept(base=100.0), kept(dtype=torch.float64)]
    assert all(a is not b for other in others for a, b in zip(first, other, strict=True))
    for (cos, sin), (offset, base) in zip(others[1:3], ((4, 10000.0), (3, 100.0)), strict=True):
        angles = torch.arange(offset, offset + 5)[:, None] * base ** (-torch.arange(0, 8, 2) / 8).double()
        assert relative(cos, angles.cos()) <= 1e-7
        assert relative(sin, angles.sin()) <= 1e-7


@pytest.mark.usefixtures("_nothing_kept")
def test_tables_made_in_inference_mode_serve_a_backward_pass():
    x = torch.randn(1, 1, 5, 8)
    with torch.inference_mode():
        linear_attention(x, x, x, rotary=Rotary(8), backend="chunked")
    x.requires_grad_()
    for backend in ("reference", "chunked", "cpu"):
        linear_attention(x, x, x, rotary=Rotary(8), backend=backend).sum().backward()


@pytest.mark.usefixtures("_nothing_kept")
def test_kept_tables_are_bounded_in_bytes_and_those_not_used_for_longest_go(monkeypatch):
    one = sum(table.nbytes for table in kept())
    monkeypatch.setattr(tables, "CAPACITY", 3 * one)
    first, *_ = [kept(offset=offset)[0] for offset in (0, 1, 2)]
    assert kept(offset=0)[0] is first
    second = kept(offset=1)[0]
    kept(offset=0), kept(offset=3)  # 2 was used least recently
    assert kept(offset=0)[0] is first
    assert kept(offset=1)[0] is second
    assert sum(table.nbytes for pair in tables._kept.values() for table in pair) <= 3 * one
    kept(length=16)  # more than there is room for: made, not kept
    assert kept(offset=0)[0] is first


@pytest.mark.usefixtures("_nothing_kept")
def test_steps_of_decoding_take_rows_of_one_table():
    cos, sin = kept(length=600, offset=0)
    for position in (0, 1, 255, 256, 300, 599):
        step_cos, step_sin = kept(length=1, offset=position)
        assert torch.equal(step_cos, cos[position : position + 1])
        assert torch.equal(step_sin, sin[position : position + 1])
    for position in range(600):
        kept(length=1, offset=position)
    assert len(tables._kept) <= tables.MOST
    assert tables._kept_bytes == sum(table.nbytes for pair in tables._kept.values() for table in pair)


@pytest.mark.usefixtures("_nothing_kept")
def test_tables_of_a_trace_are_not_kept_for_others():
    with FakeTensorMode():
        assert isinstance(kept()[0], FakeTensor)
    assert not isinstance(kept()[0], FakeTensor)
    with FakeTensorMode():
        assert isinstance(kept()[0], FakeTensor)
    compiled = torch.compile(lambda x: linear_attention(x, x, x, rotary=Rotary(8)), fullgraph=True, backend="aot_eager")
    compiled(torch.randn(1, 1, 9, 8))
    assert len(tables._kept) == 1


X = torch.randn(2, 3, 5, 8)
WRONG = {
    "odd head_dim": ("head_dim", lambda: Rotary(7)),
    "head_dim of zero": ("head_dim", lambda: Rotary(0)),
    "negative head_dim": ("head_dim", lambda: Rotary(-2)),
    "base of zero": ("base", lambda: Rotary(8, 0.0)),
    "base is nan": ("base", lambda: Rotary(8, float("nan"))),
    "x of another size": ("x", lambda: Rotary(6)(X)),
    "x of one axis": ("x", lambda: Rotary(8)(torch.randn(8))),
    "x of integers": ("x", lambda: Rotary(8)(X.long())),
    "float positions": ("positions", lambda: Rotary(8)(X, positions=torch.arange(5.0))),
    "bool positions": ("positions", lambda: Rotary(8)(X, positions=torch.ones(5, dtype=torch.bool))),
    "too few positions": ("positions", lambda: Rotary(8)(X, positions=torch.arange(4))),
    "positions of another batch": ("positions", lambda: Rotary(8)(X, positions=torch.zeros(3, 5, dtype=torch.long))),
    "positions of three axes": ("positions", lambda: Rotary(8)(X, positions=torch.zeros(2, 1, 5, dtype=torch.long))),
    "offset and positions": ("offset", lambda: Rotary(8)(X, 3, positions=torch.arange(5))),
    "offset is a fraction": ("offset", lambda: Rotary(8)(X, 0.5)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong):
    argument, call = WRONG[wrong]
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        call()
