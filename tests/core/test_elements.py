"""Elements, scale types and what a `QTensor` of any of them can do."""

import json
import math
from pathlib import Path

import pytest
import torch

import qcore
from qcore.formats import Element, find_element, registered_elements
from qcore.formats.scales import exponents
from qcore.weights.parts import parts
from qcore.weights.schemes import SHORT_NAMES, TABLE_SCHEMES, Scheme

TABLES = json.loads((Path(__file__).parents[1] / "fixtures" / "foreign" / "ml_dtypes.json").read_text())
FORMATS = [
    "int4-g16-asym", "int4-g16-fzp", "int8", "int4-g16-asym/plain_int32", "fp8", "fp8-g16", "fp8_e5m2-g16-fzp",
    "fp8-g16-e8m0", "fp4-g16-e8m0", "fp4-g16-e4m3", "fp4-g16-e4m3d", "nf4-g16", "fp4_bnb-g16",
]  # fmt: skip


def weight(text, n=6, k=64, seed=0):
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return qcore.quantize(dense, text, "minmax" if "asym" in text or "fzp" in text else "absmax")


def equal(a, b):
    return torch.equal(a.dequantize(torch.float32), b.dequantize(torch.float32))


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp4"])
def test_every_code_is_that_of_ml_dtypes(name):
    found, expected = find_element(name).values, [float(value) for value in TABLES[name]]
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine == other or (math.isnan(mine) and math.isnan(other))
        assert math.copysign(1, mine) == math.copysign(1, other) or math.isnan(mine)


def test_every_exponent_is_that_of_ml_dtypes():
    found = exponents(torch.arange(255, dtype=torch.uint8)).tolist()
    assert found == [float(value) for value in TABLES["e8m0"][:255]]


@pytest.mark.parametrize("name", list(registered_elements()))
def test_nearest_is_nearest(name):
    element = find_element(name)
    x = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 3
    if element.is_integer:
        x = x * 20
    codes = element.nearest(x)
    every = torch.arange(element.code_range[0], element.code_range[1] + 1).to(element.code_dtype)
    values = element.decode(every)
    values = values[torch.isfinite(values)].double()
    least = (x.double()[:, None] - values).abs().min(1).values
    assert torch.equal((x.double() - element.decode(codes).double()).abs(), least)


def test_ties_go_to_even_and_zero_keeps_its_sign():
    found = find_element("fp4").nearest(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.2, -0.0, 9.0, -9.0]))
    assert found.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8, 7, 15]


@pytest.mark.parametrize("text", FORMATS)
def test_text_codes_and_layout_go_round(text):
    fmt, qt = qcore.Format.parse(text), weight(text)
    assert qcore.Format.parse(str(fmt)) == fmt
    again = qcore.QTensor.from_codes(
        qt.codes(),
        qt.scale,
        qt.integer_zero() if fmt.zero is qcore.ZeroPoint.INT else qt.zero,
        fmt,
        global_scale=qt.global_scale,
    )
    assert torch.equal(again.data, qt.data)
    assert equal(again, qt)


@pytest.mark.parametrize("text", [*TABLE_SCHEMES, *SHORT_NAMES, "wfp8afp8-g128-token", "w4afp8-g32", "wint4a16-g32"])
def test_schemes_go_round(text):
    scheme = Scheme.parse(text)
    assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wfp8a8", "int8 activations .* integer weights"),
        ("wfp8a16-asym", "not integers"),
        ("wfp4a16-g32-fzp-e8m0", "float zero point"),
        ("wfp9a16", "unknown element type 'fp9'"),
        ("wfp8afp8-aasym", "-static and -token"),
        ("wfp8afp8-static(0.1,3)", "-static\\(SCALE\\)"),
        ("w8a8-static(0.1)", "\\(SCALE,ZERO\\)"),
        ("wfp8afp8-o8", "-static and -token|int8 output"),
    ],
)
def test_combinations_that_mean_nothing(text, says):
    with pytest.raises(qcore.FormatError, match=says):
        Scheme.parse(text)


@pytest.mark.parametrize("text", FORMATS)
def test_rows_and_columns_are_cut_and_joined_exactly(text):
    qt = weight(text)
    dense = qt.dequantize(torch.float32)
    top, rest = qt.narrow(0, 0, 2), qt.narrow(0, 2, 4)
    assert torch.equal(top.dequantize(torch.float32), dense[:2])
    assert equal(qcore.QTensor.cat([top, rest], 0), qt)
    left, right = qt.narrow(1, 0, 16), qt.narrow(1, 16, 48)
    assert torch.equal(right.dequantize(torch.float32), dense[:, 16:])
    assert equal(qcore.QTensor.cat([left, right], 1), qt)


def test_bytes_are_cut_without_decoding(monkeypatch):
    qt = weight("int4-g16-asym")
    monkeypatch.setattr(qcore.QTensor, "codes", lambda _self: pytest.fail("decoded"))
    assert torch.equal(qt.narrow(1, 16, 32).data, qt.data[:, 8:24])


@pytest.mark.parametrize("text", FORMATS)
def test_finer_groups_are_exact(text):
    qt = weight(text)
    finer = qt.regroup(8)
    assert finer.format.group_size == 8
    assert equal(finer, qt)
    assert equal(finer.narrow(1, 8, 24), qt.regroup(4).narrow(1, 8, 24))


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(qcore.FormatError, match="must divide 16"):
        weight("int4-g16").regroup(5)


def test_ragged_groups_are_regrouped():
    qt = weight("int8-g48", k=77)
    assert equal(qt.regroup(16), qt)


@pytest.mark.parametrize("text", FORMATS)
def test_experts_are_stacked_cut_and_taken_out(text):
    each = [weight(text, seed=seed) for seed in range(3)]
    qt = qcore.QTensor.stack(each)
    assert tuple(qt.shape) == (3, 6, 64)
    assert all(equal(qt[e], one) for e, one in enumerate(each))
    assert torch.equal(qt.dequantize(torch.float32), torch.stack([one.dequantize(torch.float32) for one in each]))
    assert equal(qt.narrow(0, 1, 2)[0], each[1])
    assert equal(qt.narrow(1, 2, 3)[2], each[2].narrow(0, 2, 3))
    assert equal(qt.narrow(2, 16, 32)[1], each[1].narrow(1, 16, 32))
    assert equal(qcore.QTensor.cat([qt.narrow(0, 0, 1), qt.narrow(0, 1, 2)], 0), qt)
    assert equal(qt.regroup(8)[2], each[2])
    assert qt.narrow(0, 0, 0).dequantize().shape == (0, 6, 64)


@pytest.mark.parametrize("text", FORMATS)
def test_parts_describe_the_tensors(text):
    qt = weight(text, n=7, k=70)
    described = {part.name: part for part in parts(qt.format, 7, 70)}
    assert list(described) == list(qt.tensors())
    for name, tensor in qt.tensors().items():
        assert (described[name].dtype, described[name].shape) == (tensor.dtype, tuple(tensor.shape)), name


def test_parts_say_where_n_and_k_run():
    data, scale, zero = parts(qcore.Format.parse("int4-g32-asym"), 64, 256, torch.bfloat16)
    assert (data.n_dim, data.k_dim, data.k_unit) == (0, 1, 2)
    assert (scale.n_dim, scale.k_dim, scale.k_unit, scale.dtype) == (1, 0, 32, torch.bfloat16)
    assert zero.dtype == torch.int8


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_nan_are_refused(code):
    codes = torch.zeros(2, 4, dtype=torch.uint8)
    codes[1, 2] = code
    with pytest.raises(qcore.FormatError, match=f"{code:#04x}, which is NaN in fp8"):
        qcore.QTensor.from_codes(codes, torch.ones(1, 2), None, qcore.Format("fp8"))


def test_an_exponent_that_is_nan_is_refused():
    codes, scale = torch.zeros(2, 32, dtype=torch.uint8), torch.full((1, 2), 255, dtype=torch.uint8)
    with pytest.raises(qcore.FormatError, match="255, which is NaN"):
        qcore.QTensor.from_codes(codes, scale, None, qcore.Format.parse("fp4-g32-e8m0"))


@pytest.mark.parametrize(
    "factor", [None, torch.ones(2), torch.tensor(float("nan")), torch.ones((), dtype=torch.float64)]
)
def test_a_global_scale_that_is_none_is_refused(factor):
    qt = weight("fp4-g16-e4m3")
    with pytest.raises(qcore.FormatError, match="global_scale"):
        qcore.QTensor(qt.data, qt.scale, None, qt.shape, qt.format, global_scale=factor)


def test_scales_may_come_under_the_names_of_torch():
    qt = weight("fp4-g16-e8m0")
    same = qcore.QTensor(qt.data, qt.scale.view(torch.float8_e8m0fnu), None, qt.shape, qt.format)
    assert torch.equal(same.scale, qt.scale)
    two = weight("fp4-g16-e4m3")
    fields = (two.data, two.scale.view(torch.uint8), None, two.shape, two.format, None, None, two.global_scale)
    assert qcore.QTensor(*fields).scale.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("element", "largest", "scale"),
    [("fp4", 6.99, 1.0), ("fp4", 7.0, 2.0), ("fp4", 3.49, 0.5), ("fp8", 447.9, 1.0), ("fp8", 448.0, 2.0)],
)
def test_exponents_are_those_of_compressed_tensors(element, largest, scale):
    """Found with compressed-tensors 0.20.0: generate_mx_scales moves up from a mantissa of 1.75 on."""
    dense = torch.zeros(1, 32)
    dense[0, 5] = -largest
    assert qcore.quantize(dense, f"{element}-g32-e8m0", "absmax").scales().tolist() == [[scale]]


def test_two_levels_are_those_of_the_tools():
    """compressed-tensors 0.20.0: 6 * 448 / max|w| for the weight, e4m3(global * max|group| / 6) for a group."""
    dense = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    divided = qcore.quantize(dense, "fp4-g16-e4m3d", "absmax")
    reach = 6 * 448 / dense.abs().max()
    assert torch.equal(divided.global_scale, reach)
    groups = dense.view(4, 4, 16).abs().amax(-1).t()
    assert torch.equal(divided.scale.float(), (groups / 6 * reach).to(torch.float8_e4m3fn).float())
    times = qcore.quantize(dense, "fp4-g16-e4m3", "absmax")
    assert torch.equal(times.global_scale, dense.abs().max() / (6 * 448))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's doing
@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 takes the codes of a closure for a number")
def test_a_table_is_a_constant_of_a_dynamic_graph():
    # Two backward passes that looked floats up as inputs of one graph broke Dynamo.
    element = Element.table("dynamic4", [value / 4 for value in range(16)])
    codes = torch.arange(16, dtype=torch.uint8)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            return grad * element.decode(codes)

    x = torch.ones(3, 16, requires_grad=True)
    compiled = torch.compile(lambda x: Scaled.apply(Scaled.apply(x)), fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor(element.values).square().expand(3, 16))
