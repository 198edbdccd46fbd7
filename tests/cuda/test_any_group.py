"""Groups that no block of the other layouts holds, in Triton's interpreter, against the contract's reference."""

from __future__ import annotations

import pytest
import torch
from cuda_problems import assert_right
from cuda_problems import linear_problem as problem

import qcore
from qcore_cuda.any_group import AnyGroupLinear
from qcore_cuda.eligibility import takes_any_group

SCHEMES = (
    "w4a16-g16", "w8a16-g16", "w4a16-g48-asym", "w8a16-g20-fzp", "wfp4a16-g16", "wfp8a16-g16", "wnf4a16-g10",
    "w4a16-g80-fzp", "w8a16-g6-asym",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 20, 77), (3, 3, 200), (8, 17, 90), (2, 5, 9), (3, 8, 65), (20, 33, 161), (140, 40, 64)]
)
def test_products_are_right(interpreter, scheme, m, n, k, dtype):
    case = problem(scheme, m, n, k, dtype, "same" if m > 2 else "none")
    assert takes_any_group(case.request)
    kernel = AnyGroupLinear(case.request)
    packed = kernel.pack(case.weight)
    assert_right(case, kernel(case.x, packed, case.bias))
    again = kernel.unpack(packed)
    assert torch.equal(again.data, case.weight.data)
    assert torch.equal(again.scale, case.weight.scale)


def test_strided_rows(interpreter):
    case = problem("w4a16-g16-asym", 3, 24, 96, torch.float16, "same")
    x = torch.cat((case.x, case.x), 1)[:, : case.x.shape[1]]
    kernel = AnyGroupLinear(case.request)
    assert_right(case, kernel(x, kernel.pack(case.weight), case.bias))


def test_others_are_left_to_the_usual_kernels():
    for scheme in ("w4a16-g32", "w8a16", "w8a8-g16", "w4a16-g7", "nvfp4"):
        assert not takes_any_group(problem(scheme, 1, 32, 64, torch.bfloat16).request), scheme
    assert isinstance(qcore.Scheme.parse("w4a16-g16").weight, qcore.Format)
