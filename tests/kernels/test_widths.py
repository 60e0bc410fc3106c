"""The kernel gives the same with vectors of other widths than this machine's, and with products in bfloat16.

Without the processor's instruction for them, those are computed in float32 from operands that are rounded alike.
"""

import pytest
import torch

from lin_attn.kernels.cpu import calls, library
from lin_attn.kernels.cpu.build import target_flags
from tests.helpers import TOLERANCE, assert_close
from tests.kernels.helpers import Problem, compiled

pytestmark = pytest.mark.slow  # a library is compiled for each width


@pytest.fixture(scope="module", params=[4, 16], ids="{} floats".format)
def kernel(request, tmp_path_factory):
    # Few lanes with this machine's registers, 32 of them where it has AVX-512, as NEON has; many with 16.
    target = target_flags()[0] if request.param == 4 else []
    flags = ["-O1", *target, f"-DLIN_ATTN_LANES={request.param}", "-Wno-psabi"]
    return compiled(tmp_path_factory.mktemp("kernel"), *flags)


@pytest.fixture
def _of_that_width(kernel, monkeypatch):
    for module in (library, calls):
        monkeypatch.setattr(module, "load", lambda: kernel)


@pytest.mark.usefixtures("_of_that_width")
def test_float32_equals_the_float64_reference():
    for seed in range(60):
        problem = Problem(seed)
        assert_close(problem.computed(), problem.wanted(), TOLERANCE[torch.float32])


@pytest.mark.usefixtures("_of_that_width")
@pytest.mark.parametrize("products", [False, True], ids=["products in float32", "products in bfloat16"])
def test_bfloat16_equals_the_float64_reference(products, monkeypatch):
    monkeypatch.setattr(calls, "has_bf16_products", lambda: products)
    for seed in range(60):
        problem = Problem(seed, dtype=torch.bfloat16)
        assert_close(problem.computed(), problem.wanted(), TOLERANCE[torch.bfloat16])
