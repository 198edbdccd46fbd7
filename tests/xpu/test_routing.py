"""Every call that would reach an Intel GPU is recorded, and held against what torch's ops ask for.

`qcore_xpu_stand_in.constraints` states that on its own; the last tests here show that it notices what is wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_problems import linear_problem
from xpu_problems import NARROW, assert_right, result

from qcore_xpu import aten, int32

pytestmark = pytest.mark.usefixtures("interpreter", "by_torch")


def only(stand_in):
    (call,) = stand_in.calls()
    return call


INT4 = [
    # scheme, K, bias: K', the op's group, rows of scales
    ("w4a16-g128", 4096, "none", 4096, 128, 32),
    ("w4a16-g32-asym", 256, "none", 256, 32, 8),
    ("w4a16-g128-asym", 168, "none", 256, 128, 2),
    ("w4a16-g20", 77, "none", 128, 32, 4),
    ("w4a16-g48-fzp", 100, "none", 192, 64, 3),
    ("w4a16-g7-asym", 5, "none", 32, 32, 1),
    ("w4a16", 77, "none", 96, 96, 1),
    ("w4a16", 4096, "none", 4096, 4096, 1),
    ("w4a16-g128", 4096, "same", 4224, 128, 33),
    ("w4a16-g32-asym", 250, "float32", 288, 32, 9),
    ("w4a16-fzp", 4096, "same", 4224, 128, 33),
    ("w4a16", 77, "same", 128, 32, 4),
    ("w4a16-g20-asym", 77, "same", 160, 32, 5),
]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("scheme", "k", "bias", "columns", "group", "rows"), INT4)
def test_int4(stand_in, scheme, k, bias, columns, group, rows, dtype):
    n = 12
    assert_right(linear_problem(scheme, 3, n, k, dtype, bias=bias))
    call = only(stand_in)
    assert call.op == "int4_mm"
    assert call.group == group
    assert call.shapes == {"x": (3, columns), "words": (n, columns // 8), "scale": (rows, n), "zeros": (rows, n)}
    assert call.dtypes == {"x": dtype, "words": torch.int32, "scale": dtype, "zeros": torch.int8}
    assert call.strides == {"x": (columns, 1), "words": (columns // 8, 1), "scale": (n, 1), "zeros": (n, 1)}
    assert call.tensors["zeros"].min() >= 0
    assert call.tensors["zeros"].max() <= 15


@pytest.mark.parametrize(
    ("scheme", "k"), [("w4a16-g20", 77), ("w4a16-g128", 168), ("w4a16", 77), ("w4a16-g48-fzp", 100)]
)
def test_padding_is_zero_times_zero(stand_in, scheme, k):
    problem = linear_problem(scheme, 2, 8, k)
    problem.x.fill_(1.0)
    result(problem)
    call = only(stand_in)
    group = problem.weight.format.group(k)
    columns = torch.arange(call.shapes["x"][1])
    padded = (columns % call.group >= group) | (columns // call.group * group + columns % call.group >= k)
    assert int((~padded).sum()) == k
    assert torch.equal(call.tensors["x"], (~padded).to(torch.bfloat16).repeat(2, 1))
    codes = int32.PLAIN_INT32.decode(call.tensors["words"], len(columns)) + 8
    assert (codes[:, padded] == 8).all()


def test_the_bias_is_a_group_of_its_own(stand_in):
    problem = linear_problem("w4a16-g32-asym", 2, 8, 64, bias="same")
    result(problem)
    call = only(stand_in)
    assert torch.equal(call.tensors["scale"][2], problem.bias)
    assert torch.equal(call.tensors["scale"][:2], problem.weight.scale.bfloat16())
    assert (call.tensors["zeros"][2] == 8).all()
    assert (call.tensors["x"][:, 64:] == 1 / 32).all()
    assert (int32.PLAIN_INT32.decode(call.tensors["words"], 96)[:, 64:] == 1).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_strided_and_shifted_x_arrive_contiguous(stand_in, dtype):
    wide = torch.randn(4, 200, dtype=dtype)
    for x in (wide[:, 3:99], wide.t()[:96].t(), torch.randn(4 * 96 + 1, dtype=dtype)[1:].view(4, 96)):
        for scheme in ("w4a16-g32", "w8a16", "w8a8"):
            result(replace(linear_problem(scheme, 4, 8, 96, dtype), x=x))
    assert len(stand_in.calls()) == 9  # each has passed `check_int4`, `check_int8` or `check_int`


def test_weights_that_are_views_arrive_in_memory_of_their_own(stand_in):
    rows = torch.randint(-127, 128, (33, 40)).to(torch.int8)[1:]  # 40 bytes into its memory
    case = linear_problem("w8a16", 2, 32, 40)
    weight = case.weight.map(lambda t: rows if t.dtype == torch.int8 else t)
    result(replace(case, weight=weight))
    assert torch.equal(only(stand_in).tensors["codes"], rows)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_weights(stand_in, scale):
    # A bias is added to float32 sums.
    for bias, dtype in (("none", torch.float16), ("same", torch.float32)):
        case = linear_problem("w8a16", 3, 12, 77, torch.float16, bias=bias)
        weight = case.weight.map(lambda t: t.to(scale) if t.is_floating_point() else t)
        stand_in.forget()
        assert_right(replace(case, weight=weight))
        call = only(stand_in)
        assert call.op == "int8_mm"
        assert call.shapes == {"x": (3, 77), "codes": (12, 77), "scale": (12,)}
        assert call.dtypes == {"x": dtype, "codes": torch.int8, "scale": torch.float32}


def test_many_rows_with_a_bias_need_no_op(stand_in):
    assert_right(linear_problem("w8a16", 33, 12, 77, bias="same"))
    assert stand_in.calls() == []
    assert_right(linear_problem("w8a16", 33, 12, 77))
    assert only(stand_in).op == "int8_mm"


@pytest.mark.parametrize("k", [64, 77, 200])
def test_int8_activations(stand_in, k):
    assert_right(linear_problem("w8a8-asym-aasym", 3, 12, k))
    call = only(stand_in)
    assert call.op == "int_mm"
    columns = -(-k // 128) * 128  # as many as there are codes of x, so that these are not copied
    assert call.shapes == {"x": (3, columns), "codes": (columns, 12)}
    assert call.strides == {"x": (columns, 1), "codes": (12, 1)}
    assert set(call.dtypes.values()) == {torch.int8}


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16", "w8a8"])
def test_an_x_without_rows_reaches_no_device(stand_in, scheme):
    assert result(linear_problem(scheme, 0, 12, 64)).shape == (0, 12)
    assert stand_in.calls() == []


# The tests of the test: each of these is a mistake that torch on a device would take for another call, or refuse.


def right_int4():
    return {
        "x": torch.ones(3, 64, dtype=torch.bfloat16),
        "words": torch.zeros(8, 8, dtype=torch.int32),
        "group": 32,
        "scale": torch.ones(2, 8, dtype=torch.bfloat16),
        "zeros": torch.full((2, 8), 8, dtype=torch.int8),
    }


WRONG_INT4 = {
    "x of float32": {"x": torch.ones(3, 64)},
    "x with three dimensions": {"x": torch.ones(1, 3, 64, dtype=torch.bfloat16)},
    "x of another K": {"x": torch.ones(3, 96, dtype=torch.bfloat16)},
    "strided x": {"x": torch.ones(64, 3, dtype=torch.bfloat16).t()},
    "shifted x": {"x": torch.ones(3 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 64)},
    "a group of 33": {"group": 33},
    "a group that does not divide K": {"group": 96},
    "no group": {"group": 0},
    "words in bytes": {"words": torch.zeros(8, 32, dtype=torch.uint8)},
    "transposed words": {"words": torch.zeros(8, 8, dtype=torch.int32).t()},
    "scales of another dtype": {"scale": torch.ones(2, 8)},
    "scales of another group": {"scale": torch.ones(1, 8, dtype=torch.bfloat16)},
    "transposed scales": {"scale": torch.ones(8, 2, dtype=torch.bfloat16).t()},
    "transposed zero points": {"zeros": torch.full((8, 2), 8, dtype=torch.int8).t()},
    "float zero points": {"zeros": torch.full((2, 8), 8.0, dtype=torch.bfloat16)},
    "too few zero points": {"zeros": torch.full((1, 8), 8, dtype=torch.int8)},
    "another device": {"scale": torch.ones(2, 8, dtype=torch.bfloat16, device="meta")},
}


def test_a_right_call_of_int4_passes(stand_in):
    y = aten.int4_mm(**right_int4())
    assert torch.equal(y, torch.full((3, 8), -8.0 * 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("mistake", WRONG_INT4)
def test_a_wrong_call_of_int4_is_caught(stand_in, mistake):
    from qcore_xpu_stand_in.constraints import ConstraintError

    with pytest.raises(ConstraintError, match="expected: "):
        aten.int4_mm(**{**right_int4(), **WRONG_INT4[mistake]})


RIGHT = {
    "int8_mm": (torch.ones(3, 40, dtype=torch.float16), torch.ones(8, 40, dtype=torch.int8), torch.ones(8)),
    "int_mm": (torch.ones(3, 40, dtype=torch.int8), torch.ones(40, 8, dtype=torch.int8)),
}
WRONG = {
    "int8_mm": {
        0: [
            torch.ones(3, 40, dtype=torch.float64),
            torch.ones(40, 3, dtype=torch.float16).t(),
            torch.ones(3, 41, dtype=torch.float16),
        ],
        1: [torch.ones(8, 40), torch.ones(40, 8, dtype=torch.int8).t(), torch.ones(9, 40, dtype=torch.int8)],
        2: [torch.ones(8, 1), torch.ones(8, dtype=torch.float16), torch.ones(16)[::2]],
    },
    "int_mm": {
        0: [torch.ones(3, 40), torch.ones(40, 3, dtype=torch.int8).t(), torch.ones(3, 41, dtype=torch.int8)],
        1: [torch.ones(40, 8), torch.ones(8, 40, dtype=torch.int8).t(), torch.ones(320, dtype=torch.int8)],
    },
}


@pytest.mark.parametrize("op", RIGHT)
def test_calls_of_the_int8_ops(stand_in, op):
    from qcore_xpu_stand_in.constraints import ConstraintError

    call, right = getattr(aten, op), RIGHT[op]
    assert (call(*right) == 40).all()
    for place, mistakes in WRONG[op].items():
        for mistake in mistakes:
            with pytest.raises(ConstraintError, match="expected: "):
                call(*(mistake if i == place else value for i, value in enumerate(right)))


def test_sums_that_int32_does_not_hold_are_caught(stand_in):
    from qcore_xpu_stand_in.constraints import ConstraintError

    with pytest.raises(ConstraintError, match="fit int32"):
        aten.int_mm(torch.ones(1, 1 << 17, dtype=torch.int8), torch.ones(1 << 17, 1, dtype=torch.int8))
