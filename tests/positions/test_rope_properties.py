"""What RoFormer says of R (§3.2.2, §3.3, §3.4): a group of rotations, two forms, a bound that falls."""

import cmath
import math

import pytest
import torch

from lin_attn import Rotary, linear_attention, softmax_attention
from lin_attn.positions import RopeScaling, rotate
from lin_attn.positions.long_term_decay import relative_upper_bound
from tests.helpers import loop_linear, loop_softmax, qkv, relative, rotation_matrix

ROTARIES = {
    "plain": Rotary(16),
    "base": Rotary(16, 500.0),
    "partial": Rotary(16, rotary_dim=6),
    "linear": Rotary(16, scaling=RopeScaling("linear", 4)),
    "ntk": Rotary(16, scaling=RopeScaling("ntk", 4)),
    "partial ntk": Rotary(16, 100.0, 8, RopeScaling("ntk", 2.5)),
}
EVERY = pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)


def matrix(rotary: Rotary, m: int) -> torch.Tensor:
    """R_m as a matrix: what it makes of the unit vectors."""
    return rotary(torch.eye(16, dtype=torch.float64)[:, None], m)[:, 0].T


def by_hand(rotary: Rotary, m: int) -> torch.Tensor:
    """R_m entry by entry, from the definitions of partial rotation and of both scalings."""
    size, base, place = rotary.rotary_dim or 16, rotary.base, m
    if rotary.scaling is not None and rotary.scaling.kind == "linear":
        place = m / rotary.scaling.factor
    if rotary.scaling is not None and rotary.scaling.kind == "ntk":
        base = base * rotary.scaling.factor ** (size / (size - 2))
    whole = torch.eye(16, dtype=torch.float64)
    whole[:size, :size] = torch.tensor(rotation_matrix(place, size, base))
    return whole


@EVERY
@pytest.mark.parametrize("m", [0, 1, 77, 100_000])
def test_the_element_wise_form_equals_the_matrix_form(rotary, m):
    """Eq. 34 against eq. 15; in float64 an angle of 10⁵ radians has 10⁻¹¹ of them right."""
    assert relative(matrix(rotary, m), by_hand(rotary, m)) <= 1e-10
    x = torch.randn(3, 16, dtype=torch.float64)
    assert relative(rotary(x[:, None], m)[:, 0], x @ by_hand(rotary, m).T) <= 1e-10


@EVERY
def test_tables_alone_rotate_alike(rotary):
    """Kernels take the tables: what is not rotated has cosine 1 and sine 0 in them."""
    x = torch.randn(2, 3, 5, 16, dtype=torch.float64)
    cos, sin = rotary.tables(5, 7, device=x.device, dtype=x.dtype)
    assert cos.shape == sin.shape == (5, 8)
    assert relative(rotate(x, cos, sin), rotary(x, 7)) <= 1e-15
    still = (16 - rotary.rotated) // 2
    assert (cos[:, 8 - still :] == 1).all()
    assert not sin[:, 8 - still :].any()
    assert torch.equal(rotary(x, 7)[..., rotary.rotated :], x[..., rotary.rotated :])


@EVERY
@pytest.mark.parametrize(("m", "n"), [(0, 5), (9, 4), (1000, 1003), (70_001, 3)])
def test_the_transpose_of_one_rotation_times_another_is_that_of_their_distance(rotary, m, n):
    """R_mᵀ R_n = R_{n−m}, negative distances too."""
    assert relative(matrix(rotary, m).T @ matrix(rotary, n), matrix(rotary, n - m)) <= 1e-10


@EVERY
def test_norms_are_kept_and_the_rotation_is_one(rotary):
    x = torch.randn(4, 50, 16, dtype=torch.float64)
    torch.testing.assert_close(rotary(x, 12_345).norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.linalg.det(matrix(rotary, 321)).item() == pytest.approx(1, rel=1e-12)


@EVERY
@pytest.mark.parametrize("shift", [1, 4096, 1_000_000])
def test_outputs_do_not_change_when_all_positions_shift(rotary, shift):
    """Of softmax attention, and of linear attention after φ; a state at a position with nothing in it shifts them."""
    q, k, v = qkv(size=16, length=9)
    for op in (softmax_attention, linear_attention):
        here, state = op(q, k, v, rotary=rotary, return_state=True)
        if op is softmax_attention:
            there = op(rotary(q, shift), rotary(k, shift), v)
        else:
            empty = state._replace(kv=state.kv * 0, k_sum=state.k_sum * 0, length=shift)
            there = op(q, k, v, rotary=rotary, state=empty)
        assert relative(there, here) <= 1e-8


@pytest.mark.parametrize("rope", ["after", "before"])
def test_partial_and_scaled_rotation_reach_linear_attention(rope):
    """Against loops over features that are rotated by hand."""
    q, k, v = qkv(size=16, length=9)
    for name in ("partial", "linear", "partial ntk"):
        rotary = ROTARIES[name]
        got = linear_attention(q, k, v, rotary=rotary, rope=rope)
        if rope == "before":
            turned = [torch.stack([x[:, :, n] @ by_hand(rotary, n).T for n in range(9)], dim=2) for x in (q, k)]
            wanted = loop_linear(*turned, v)["out"]
        else:
            maps = [torch.where(x >= 0, x + 1, x.clamp(max=0).exp()) for x in (q, k)]
            turned = [torch.stack([x[:, :, n] @ by_hand(rotary, n).T for n in range(9)], dim=2) for x in maps]
            tops, bottoms = (
                (a.unflatten(1, (2, 2)) @ b[:, :, None].mT).flatten(1, 2).tril() for a, b in (turned, maps)
            )
            wanted = tops @ v.repeat_interleave(2, 1) / bottoms.sum(-1, keepdim=True)
        assert relative(got, wanted) <= 1e-11


def test_partial_rotation_reaches_softmax_attention():
    q, k, v = qkv(size=16, length=9)
    rotary = ROTARIES["partial"]
    turned = [torch.stack([x[:, :, n] @ by_hand(rotary, n).T for n in range(9)], dim=2) for x in (q, k)]
    assert relative(softmax_attention(q, k, v, rotary=rotary), loop_softmax(*turned, v)) <= 1e-11


@pytest.mark.parametrize("kind", ["linear", "ntk"])
def test_scaling_maps_the_slowest_angle_of_the_new_length_onto_that_of_the_old(kind):
    """Linear: all of them; NTK: the fastest pair keeps its angle."""
    plain, scaled = Rotary(64), Rotary(64, scaling=RopeScaling.between(kind, 128, 512))
    ratio = plain.frequencies() / scaled.frequencies()
    assert ratio[-1].item() == pytest.approx(4)
    assert ratio[0].item() == pytest.approx(4 if kind == "linear" else 1)
    assert (ratio.diff() >= -1e-12).all()


def explicit_bound(distance: int, size: int) -> float:
    """(1 / (D/2)) Σ_j |Σ_{i<j} e^(i·distance·θ_i)|, term by term."""
    sums = [sum(cmath.exp(1j * distance * 10000 ** (-2 * i / size)) for i in range(j)) for j in range(1, size // 2 + 1)]
    return sum(abs(s) for s in sums) / (size // 2)


def test_the_relative_upper_bound_equals_its_definition():
    distances = torch.tensor([0, 1, 7, 50, 255, 100_000])
    wanted = [explicit_bound(d, 128) for d in distances.tolist()]
    assert relative_upper_bound(Rotary(128), distances).tolist() == pytest.approx(wanted, rel=1e-9)


def test_the_upper_bound_decays_with_distance():
    """(D/2 + 1)/2 at distance 0; means over stretches of 50 fall, and 250 away it is a third of where it began."""
    bound = relative_upper_bound(Rotary(128), torch.arange(251))
    assert bound[0].item() == pytest.approx((64 + 1) / 2)
    assert bound[0] == bound.max()
    stretches = bound[1:].view(5, 50).mean(1)
    assert (stretches.diff() < 0).all()
    assert bound[-1] < bound[0] / 3
    assert torch.equal(relative_upper_bound(Rotary(128), -torch.arange(251)), bound)


def test_inner_products_stay_below_the_bound():
    """|(R_m q)ᵀ (R_n k)| ≤ max_i |h_i+1 − h_i| · Σ_j |S_j|, for vectors drawn at random, at every distance."""
    generator = torch.Generator().manual_seed(0)
    rotary, distances = Rotary(16), torch.arange(400)
    sums = relative_upper_bound(rotary, distances) * 8
    for _ in range(50):
        q, k = torch.randn(2, 16, generator=generator, dtype=torch.float64)
        products = rotary(q.expand(400, 16)) @ k
        h = torch.view_as_complex(q.view(8, 2)) * torch.view_as_complex(k.view(8, 2)).conj()
        steps = torch.cat((h, h.new_zeros(1))).diff().abs().max()
        assert (products.abs() <= steps * sums + 1e-12).all()


WRONG = {
    "odd rotary_dim": ("rotary_dim", lambda: Rotary(16, rotary_dim=5)),
    "rotary_dim of zero": ("rotary_dim", lambda: Rotary(16, rotary_dim=0)),
    "rotary_dim beyond the head": ("rotary_dim", lambda: Rotary(16, rotary_dim=18)),
    "ntk of one pair": ("rotary_dim", lambda: Rotary(16, rotary_dim=2, scaling=RopeScaling("ntk", 2))),
    "scaling by name": ("scaling", lambda: Rotary(16, scaling="ntk")),
    "unknown scaling": ("scaling", lambda: RopeScaling("dynamic", 2)),
    "shrinking": ("factor", lambda: RopeScaling("linear", 0.5)),
    "factor is nan": ("factor", lambda: RopeScaling("linear", math.nan)),
    "shorter length": ("length", lambda: RopeScaling.between("ntk", 512, 128)),
    "no original length": ("original_length", lambda: RopeScaling.between("ntk", 0, 128)),
    "distances of floats": ("distances", lambda: relative_upper_bound(Rotary(4), torch.arange(3.0))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong):
    argument, call = WRONG[wrong]
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        call()
