"""Functions of single elements of strided operands, against torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from contract_problems import one_thread  # noqa: F401
from float_steps import Runner, run
from torch import Tensor
from torch.nn import functional as F
from vulkan_problems import vulkan  # noqa: F401

from qcore_vulkan.steps.operand import Operand
from qcore_vulkan.steps.pointwise import BINARY, UNARY, binary, convert, fill, unary, where

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 2.5, -3.5, 1e-30, -1e-30, 1e-5, 100.0, -100.0]
REFERENCE = {
    "copy": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 1.5),
    "softplus": lambda x: F.softplus(x, 2.0, 20.0),
    "clamp": lambda x: x.clamp(-0.75, 1.25),
}
PARAMETERS = {"leaky_relu": (0.1, 0.0), "elu": (1.5, 0.0), "softplus": (2.0, 20.0), "clamp": (-0.75, 1.25)}
EXACT = {
    "copy", "neg", "abs", "sign", "relu", "floor", "ceil", "round", "trunc", "clamp", "logical_not", "isnan", "isinf",
}  # fmt: skip


def reference(name: str, x: Tensor) -> Tensor:
    function = REFERENCE.get(name) or getattr(torch, name)
    return function(x)


def assert_close(name: str, got: Tensor, expected: Tensor, ulps: float = 4.0, slack: float | Tensor = 2.0**-23) -> None:
    """``slack``: allowed beside the relative error, where terms cancel."""
    if got.dtype in (torch.bool, torch.int32):
        assert torch.equal(got, expected.to(got.dtype)), name
        return
    finite = expected.isfinite() & (expected.abs() < 3.4e38)
    assert torch.equal(got.isnan(), expected.isnan()), name
    assert torch.equal(got[~finite & ~expected.isnan()].double().float(), expected[~finite & ~expected.isnan()].float())
    error = ((got.double() - expected).abs() - slack)[finite]
    allowed = ulps * 2.0**-24 * expected[finite].abs()
    assert (error <= allowed + 1e-37).all(), f"{name}: {(error / allowed * ulps).max()} ulp"


def samples(count: int = 4000) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(count // 2, generator=generator) * 4
    logs = torch.exp(torch.randn(count // 2, generator=generator) * 5) * wide.sign()
    return torch.cat((torch.tensor(SPECIAL), wide, logs))


@pytest.mark.parametrize("name", [name for name in UNARY if name != "bitwise_not"])
def test_functions_of_one_element(vulkan, name):  # noqa: F811
    x = samples()
    p, q = PARAMETERS.get(name, (0.0, 0.0))
    got = run(vulkan, unary, name, x, p=p, q=q)
    expected = reference(name, x.double())
    if name in EXACT:
        expected = reference(name, x)
        assert (
            torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
            if got.dtype != torch.bool
            else torch.equal(got, expected)
        )
        return
    # sinh and cosh square a half; tan has the angle's absolute error, which grows near its poles.
    slack = 2.0**-23 + 4e-10 * expected.square().clamp(max=1e30) if name == "tan" else 2.0**-23
    assert_close(name, got, expected, 8.0 if name in ("sinh", "cosh", "tan") else 4.0, slack)


INTS = torch.tensor([0, 1, -1, 5, -5, 7, -7, 100, 2**31 - 1, -(2**31) + 1])


@pytest.mark.parametrize("name", ["copy", "neg", "abs", "sign", "relu", "bitwise_not", "logical_not"])
def test_functions_of_integers(vulkan, name):  # noqa: F811
    expected = INTS if name == "copy" else getattr(torch, name)(INTS)
    assert torch.equal(
        run(vulkan, unary, name, INTS), expected.to(torch.bool if name == "logical_not" else torch.int32)
    )


def test_integers_are_clamped_and_bools_negated(vulkan):  # noqa: F811
    bools = torch.tensor([True, False, True])
    assert run(vulkan, unary, "clamp", INTS, p=-5, q=math.inf).tolist() == INTS.clamp(-5).tolist()
    assert run(vulkan, unary, "bitwise_not", bools).tolist() == [False, True, False]


SPECIAL_PAIRS = list(
    itertools.product([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0, -2.5, 3.0, 0.5], repeat=2)
)
FLOATS = [name for name in BINARY if not name.startswith("bitwise")]
FUSED = {
    "silu_mul": lambda x, y: F.silu(x) * y,
    "gelu_mul": lambda x, y: F.gelu(x) * y,
    "gelu_tanh_mul": lambda x, y: F.gelu(x, approximate="tanh") * y,
}


@pytest.mark.parametrize("name", FLOATS)
def test_functions_of_two_floats(vulkan, name):  # noqa: F811
    generator = torch.Generator().manual_seed(2)
    pairs = torch.randn(2, 1000, generator=generator) * 3
    if name == "pow":
        pairs[0] = pairs[0].abs() + 0.01
    x, y = torch.cat((torch.tensor(SPECIAL_PAIRS).t(), pairs), 1)
    function = FUSED.get(name) or getattr(torch, name)
    expected = function(x, y) if name in ("remainder", "fmod", "floor_divide") else function(x.double(), y.double())
    got = run(vulkan, binary, name, x, y)
    slack = 2.0**-22 * (1 + y.double().abs().nan_to_num(0.0, 0.0)) if name.startswith("gelu") else 2.0**-23
    if name == "floor_divide":  # of infinities torch itself makes either NaN or Inf
        usual = x.isfinite() & y.isfinite()
        got, expected = got[usual], expected[usual]
    assert_close(name, got, expected.double() if got.dtype == torch.float32 else expected, 8.0, slack)


@pytest.mark.parametrize("name", [name for name in BINARY if name not in ("div", *FUSED)])
def test_functions_of_two_integers(vulkan, name):  # noqa: F811
    x, y = torch.tensor(list(itertools.product([0, 1, -1, 7, -7, 12, 1000], [1, -1, 2, -2, 3, -3, 12]))).t()
    if name == "pow":
        y = y.abs().clamp(max=9)
    expected = getattr(torch, name)(x.int(), y.int())
    assert torch.equal(run(vulkan, binary, name, x, y), expected)


def test_quotients_of_whole_floats_are_exact(vulkan):  # noqa: F811
    x, y = torch.tensor(list(itertools.product(range(-50, 51), (1, 2, 3, 7, 49, -3)))).float().t()
    assert torch.equal(run(vulkan, binary, "floor_divide", x, y), torch.floor_divide(x, y))
    assert torch.equal(run(vulkan, binary, "remainder", x, y), torch.remainder(x, y))
    assert torch.equal(run(vulkan, binary, "div", x, y), x / y)


def test_numbers_as_operands(vulkan):  # noqa: F811
    x, ints = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)), torch.arange(-4, 4)
    assert torch.equal(run(vulkan, binary, "sub", 1.0, x), 1.0 - x)
    assert torch.equal(run(vulkan, binary, "mul", x, 3), x * 3)
    assert torch.equal(run(vulkan, binary, "sub", 3, ints), (3 - ints).int())
    assert torch.equal(run(vulkan, binary, "gt", ints, 1), ints > 1)
    assert torch.allclose(run(vulkan, binary, "pow", 10000.0, x), torch.pow(10000.0, x), rtol=5e-7)


VIEWS = {
    "transposed": lambda x: x.transpose(0, 2),
    "sliced": lambda x: x[1:, ::2, 1:-2],
    "aligned slice": lambda x: x[..., 4:12],
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1),
    "one row": lambda x: x[2, 3],
    "scalar": lambda x: x[1, 2, 3],
    "one column": lambda x: x[..., 5:6],
    "six dimensions": lambda x: x.unflatten(2, (2, 2, 4)).unflatten(0, (3, 1)).permute(5, 1, 0, 3, 4, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strided_operands(vulkan, name):  # noqa: F811
    x = VIEWS[name](torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(run(vulkan, unary, "copy", x), x)
    assert torch.equal(run(vulkan, binary, "add", x, x.contiguous()), x + x)


@pytest.mark.parametrize(
    "shapes",
    [((3, 1, 5), (4, 1)), ((1,), (2, 3)), ((), (7,)), ((2, 4, 8), (8,)), ((5, 1), (1, 6)), ((), ()), ((1, 4), (9, 4))],
)
def test_operands_are_broadcast(vulkan, shapes):  # noqa: F811
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(5)) for shape in shapes)
    got = run(vulkan, binary, "mul", x, y)
    assert torch.equal(got, x * y)
    assert torch.equal(run(vulkan, where, x > 0, x, y), torch.where(x > 0, x, y))


def test_choices_between_numbers_and_integers(vulkan):  # noqa: F811
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(6))
    mask = x > 0
    assert torch.equal(run(vulkan, where, mask, x, -math.inf), torch.where(mask, x, -math.inf))
    assert torch.equal(run(vulkan, where, mask, 0.0, x), torch.where(mask, 0.0, x))
    assert torch.equal(run(vulkan, where, mask, 0.0, 1.5), torch.where(mask, 0.0, 1.5))
    assert torch.equal(run(vulkan, where, mask, torch.arange(5), 7), torch.where(mask, torch.arange(5), 7).int())


@pytest.mark.parametrize("target", [torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("source", [torch.float32, torch.int64, torch.bool])
def test_conversions(vulkan, source, target):  # noqa: F811
    x = torch.tensor([[0.0, 1.0, -1.75, 300.5, 2.0], [-0.0, 0.25, 16777216.0, -5.0, 7.0]]).to(source).t()
    assert torch.equal(run(vulkan, convert, x, target), x.to(target))


def test_results_in_a_region(vulkan):  # noqa: F811
    base, x = torch.randn(4, 3, 8), torch.randn(4, 2, 4)
    runner = Runner(vulkan)
    whole = convert(runner.b, runner.operand(base), torch.float32)
    region = whole.slice(1, 1, 2).slice(2, 3, 4)
    unary(runner.b, "neg", runner.operand(x), region)
    fill(runner.b, whole.select(1, 0), 2.5)
    base[:, 1:, 3:7], base[:, 0] = -x, 2.5
    assert torch.equal(runner.read(whole)[0], base)


def test_wrong_dtypes_are_refused(vulkan):  # noqa: F811
    runner = Runner(vulkan)
    floats, ints = runner.operand(torch.zeros(3)), runner.operand(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="one dtype"):
        binary(runner.b, "add", floats, ints)
    with pytest.raises(ValueError, match="exp is a function of float32"):
        unary(runner.b, "exp", ints)
    with pytest.raises(ValueError, match="div is no function of"):
        binary(runner.b, "div", ints, ints)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        unary(runner.b, "neg", floats, Operand(floats.ref, (2,), (1,), torch.float32).broadcast_to((2, 3)))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[1:, 3:]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_become_float32_and_integers(vulkan, dtype, view):  # noqa: F811
    x = view((torch.randn(4, 8, generator=torch.Generator().manual_seed(7)) * 100).to(dtype))
    assert torch.equal(run(vulkan, convert, x, torch.float32), x.float())
    assert torch.equal(run(vulkan, convert, x, torch.int32), x.int())


def flagged(device, step, *args) -> tuple[Tensor, int]:
    """The result, and the word of the flag."""
    runner = Runner(device)
    flag = runner.b.output(4)
    runner.b.fill(flag, 0)
    operands = [runner.operand(x) if isinstance(x, Tensor) else x for x in args]
    made, word = runner.read(step(runner.b, *operands, bad=flag), Operand(flag, (1,), (1,), torch.int32))
    return made, int(word)


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("add", 2**31 - 5, 5), ("add", -(2**31) + 5, -6), ("sub", -(2**31), 1), ("sub", 2**31 - 1, -1),
        ("mul", 2**16, 2**15), ("mul", -(2**31), -1), ("mul", 46341, 46341), ("mul", -65536, 32769),
    ],
)  # fmt: skip
def test_overflow_sets_a_flag(vulkan, name, x, y):  # noqa: F811
    many = torch.tensor([3, x, -3])
    assert flagged(vulkan, binary, name, many, torch.tensor([y, y, y]))[1] == 2
    assert flagged(vulkan, binary, name, many, y)[1] == 2
    assert flagged(vulkan, binary, "maximum", many, y)[1] == 0


def test_results_that_just_fit_set_no_flag(vulkan):  # noqa: F811
    for name, x, y in (("add", 2**31 - 5, 4), ("sub", -(2**31), 0), ("mul", -(2**16), 2**15), ("mul", 46340, 46340)):
        got, flag = flagged(vulkan, binary, name, torch.tensor([x]), torch.tensor([y]))
        assert (got.item(), flag) == (getattr(torch, name)(torch.tensor(x), torch.tensor(y)).item(), 0)


@pytest.mark.parametrize(
    ("value", "flag"), [(2.0**31, 2), (-(2.0**31), 0), (-3e9, 2), (math.nan, 2), (2147483520.0, 0)]
)
def test_floats_that_do_not_fit_set_a_flag(vulkan, value, flag):  # noqa: F811
    got, said = flagged(vulkan, convert, torch.tensor([1.5, value]), torch.int32)
    assert said == flag
    assert flag or got.tolist() == [1, int(value)]


def test_numbers_that_do_not_fit_are_refused(vulkan):  # noqa: F811
    with pytest.raises(ValueError, match="does not fit int32"):
        run(vulkan, binary, "add", INTS, 2**31)
