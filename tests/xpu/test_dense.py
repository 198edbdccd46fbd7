"""Products with float activations through a dequantized weight, interpreted, against the contract's reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from xpu_triton_problems import CPU, check, kernel_for, linear_problem

from qcore import Scheme
from qcore.contracts.conv2d import _problem, _request, _Shape
from qcore.contracts.inputs import Draw

pytestmark = pytest.mark.usefixtures("interpreter")

SCHEMES = (
    "w8a16",
    "w8a16-asym",
    "w8a16-fzp",
    "w8a16-g32",
    "w8a16-g32-asym",
    "w8a16-g96-fzp",
    "w4a16-asym",
    "w4a16-g32-fzp",
    "w4a16-g96-asym",
    "w4a16-g128",
)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 20, 77), (3, 3, 300), (17, 33, 168), (2, 129, 5)])
def test_every_scheme_is_right_for_every_size(scheme, m, n, k):
    dtype = (torch.bfloat16, torch.float16, torch.float32)[m % 3]
    check(linear_problem(scheme, m, n, k, dtype, ("none", "same", "float32")[n % 3]))


@pytest.mark.parametrize(
    "kind",
    [{"weights": "codes"}, {"weights": "zeros"}, {"weights": "tiny"}, {"inputs": "large"}, {"strides": "rows"}],
    ids=lambda kind: "-".join(kind.values()),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_codes_and_odd_inputs_are_right(kind, dtype):
    check(linear_problem("w8a16-g32-asym", 4, 20, 160, dtype, **kind))


@pytest.mark.parametrize(("out", "x"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("bias", ["none", "same"])
def test_results_of_another_dtype_are_rounded_once(out, x, bias):
    case = linear_problem("w8a16-g64-asym", 5, 20, 128, x, bias)
    assert check(replace(case, request=replace(case.request, out_dtype=out))).dtype == out


@pytest.mark.parametrize(("scheme", "seed"), [("w4a16-fzp", 22), ("w4a16-g1024-fzp", 13)])
def test_equal_numbers_of_long_groups_are_not_rounded_alike(scheme, seed):
    """Seeds with which a weight in bfloat16 exceeds what is allowed 3.5 and 1.2 times."""
    draw, case = Draw(torch.Generator().manual_seed(seed)), linear_problem(scheme, 4, 33, 8192, torch.bfloat16)
    weight = draw.weight(33, 8192, draw.fill(Scheme.parse(scheme)).weight)
    check(replace(case, x=case.x.abs(), weight=weight))


@pytest.mark.parametrize("scheme", ["w4a16-g96-asym", "w8a16-g32-asym", "w4a16-fzp"])
def test_dense_weights_are_those_of_the_formula(scheme):
    from qcore_triton.weights import Weight
    from qcore_xpu.dense import dense

    case = linear_problem(scheme, 1, 37, 300, weights="codes")
    kernel = kernel_for(case.request)
    packed = kernel.pack(case.weight)
    weight = Weight(packed["data"], packed["scale"], packed.get("zero"), *kernel.sizes)
    expected = case.weight.dequantize(torch.float64)
    # Triton's interpreter cuts float32 off where it makes bfloat16 of it; a GPU rounds.
    for dtype, rtol in ((torch.float32, 2**-22), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        torch.testing.assert_close(dense(weight, dtype, 0, 37).double(), expected, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(dense(weight, torch.float32, 16, 21), dense(weight, torch.float32, 0, 37)[16:])


@pytest.mark.parametrize("scheme", ["w4a16-g64-asym", "w8a16-asym"])
@pytest.mark.parametrize("bias", ["none", "same", "float32"])
def test_a_weight_dequantized_in_parts_gives_the_same(monkeypatch, scheme, bias):
    from qcore_xpu import dense

    case = linear_problem(scheme, 3, 50, 128, torch.bfloat16, bias)
    whole, parts = check(case), []
    monkeypatch.setattr(dense, "_CHUNK", 20 * 128)
    kept = dense.dense
    monkeypatch.setattr(dense, "dense", lambda *args: parts.append(kept(*args)) or parts[-1])
    torch.testing.assert_close(check(case), whole)
    assert [len(part) for part in parts] == [16, 16, 16, 2]


@pytest.mark.parametrize("contract", ["linear", "conv2d"])
def test_a_bias_of_another_dtype_is_added_before_rounding(contract):
    from qcore.contracts import CONTRACTS

    judge, scheme, dtype = CONTRACTS[contract], "w8a16-g32-asym", torch.float16
    case = linear_problem(scheme, 4, 32, 512, dtype, "float32")
    if contract == "conv2d":
        draw, shape = Draw(torch.Generator().manual_seed(3)), _Shape("one", (1, 64, 3, 3), 32, (3, 3), bias=True)
        case = _problem(draw, _request(draw.fill(Scheme.parse(scheme)), CPU, dtype, shape), shape)
    product = judge.reference(replace(case, bias=torch.zeros(32)))
    product = product[0].reshape(32, -1)[:, 0]
    case = replace(case, bias=-product.float() + 2**-12)
    error = (check(case).double() - judge.reference(case))[0].abs().max()
    # Rounded first, the product alone would be off by 2**-11 of itself.
    assert error < product.abs().max() * 2**-14


def test_autocast_narrows_nothing():
    case = linear_problem("w8a16-asym", 4, 20, 64)
    with torch.autocast("cpu", torch.bfloat16):
        check(case)


@pytest.fixture
def tf32():
    """OneDNN's products, which the user lets round float32."""
    products = torch.backends.mkldnn.matmul
    products.fp32_precision = "tf32"
    yield products
    products.fp32_precision = "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_products_change_a_setting_and_only_they(monkeypatch, tf32, dtype):
    from qcore_xpu import dense

    seen, linear = [], dense.F.linear
    monkeypatch.setattr(dense.F, "linear", lambda *args: seen.append(tf32.fp32_precision) or linear(*args))
    check(linear_problem("w8a16-asym", 4, 20, 64, dtype))
    assert seen == ["ieee" if dtype == torch.float32 else "tf32"]
    assert tf32.fp32_precision == "tf32"


def test_notes_say_what_a_dequantized_weight_costs():
    assert "saves memory" in kernel_for(linear_problem("w8a16-asym", 1, 16, 64).request).note
    assert "slower than the unquantized" in kernel_for(linear_problem("w4a16-asym", 1, 16, 64).request).note
