"""Convolutions, interpreted, against the contract's reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from grids import sampled
from xpu_triton_problems import CPU, check, kernel_for, why_not

from qcore import Scheme
from qcore.contracts import CONV2D
from qcore.contracts.base import Problem
from qcore.contracts.conv2d import _SHAPES, _problem, _request, _Shape
from qcore.contracts.inputs import Draw

pytestmark = pytest.mark.usefixtures("interpreter")

SCHEMES = (
    "w8a16",
    "w8a16-g32-asym",
    "w4a16-g32-fzp",
    "w8a8-static",
    "w8a8",
    "w8a8-asym",
    "w8a8-fzp-aasym",
    "w8a8-static-o8",
    "w4a8",
    "w4a8-g32-asym-aasym",
    "w8a8-g64",
)
WIDE = (
    _Shape("wide-strided", (1, 64, 9, 9), 33, (3, 3), stride=(2, 1), padding=(1, 0), dilation=(2, 1), bias=True),
    _Shape("wide-last", (2, 32, 5, 5), 70, (3, 3), padding=(2, 2), channels_last=True),
)
GROUPS = (_Shape("groups-of-16", (2, 80, 5, 5), 32, (3, 3), groups=2, padding=(1, 1), bias=True),)
UNGROUPED = [shape for shape in _SHAPES if shape.groups == 1]


def problem(scheme, shape, dtype=torch.float32):
    draw = Draw(torch.Generator().manual_seed(3))
    request = _request(draw.fill(Scheme.parse(scheme)), CPU, dtype, shape)
    return _problem(draw, request, shape)


@pytest.mark.parametrize(
    ("scheme", "shape"),
    sampled(itertools.product(SCHEMES, UNGROUPED), 40),
    ids=lambda value: getattr(value, "name", value),
)
def test_every_scheme_is_right_for_every_shape(scheme, shape):
    check(problem(scheme, shape, torch.bfloat16 if "3" in shape.name else torch.float32))


@pytest.mark.parametrize("shape", [*WIDE, *GROUPS], ids=lambda shape: shape.name)
@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a8-static-o8", "w4a8-g32-static", "w4a8-asym-aasym", "w8a16"])
def test_wide_channels_and_groups_are_right(scheme, shape):
    check(problem(scheme, shape, torch.float16))


@pytest.mark.parametrize("scheme", ["w8a16-asym", "w4a16-g32"])
@pytest.mark.parametrize("name", ["grouped", "depthwise"])
def test_groups_of_any_size_are_right_with_float_activations(scheme, name):
    check(problem(scheme, next(shape for shape in _SHAPES if shape.name == name), torch.bfloat16))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static-o8", "w4a8-g32-asym-aasym"])
@pytest.mark.parametrize("shape", [shape for shape in _SHAPES if shape.groups > 1], ids=lambda shape: shape.name)
def test_groups_of_any_size_are_right_with_int8_activations(scheme, shape):
    from qcore_xpu.conv2d import GroupsConv2d

    case = problem(scheme, shape, torch.bfloat16)
    assert isinstance(kernel_for(case.request), GroupsConv2d)
    check(case)


@pytest.mark.parametrize("shape", [WIDE[0], _SHAPES[4]], ids=lambda shape: shape.name)
def test_codes_are_unchanged_and_padded_with_the_zero_point(shape):
    check(problem("w8a8-static-o8", shape, torch.int8))


@pytest.mark.parametrize("scheme", ["w8a8-aasym", "w4a8-asym"])
def test_columns_made_in_parts_give_the_same(monkeypatch, scheme):
    from qcore_xpu import columns

    case = problem(scheme, WIDE[1])
    whole = check(case)
    monkeypatch.setattr(columns, "_COLUMN_BYTES", 1)
    monkeypatch.setattr(columns, "_LEAST_COLUMNS", 48)
    assert torch.equal(check(case), whole)


@pytest.mark.parametrize("scheme", ["w8a8-static", "w8a16"])
@pytest.mark.parametrize("name", ["3x3", "batch-0", "channels-last"])
def test_results_have_the_form_that_a_trace_expects(scheme, name):
    from qcore_triton.geometry import Geometry
    from qcore_xpu import triton_ops

    case = problem(scheme, next(shape for shape in _SHAPES if shape.name == name))
    geometry = Geometry.of(*kernel_for(case.request).geometry)
    fake = triton_ops._image(case.x, case.request.n, case.request.out_dtype, geometry)
    y = check(case)
    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("scheme", ["w4a8-g32-asym-aasym", "w8a16-asym"])
def test_ops_agree_with_their_fakes(scheme):
    from qcore_xpu_stand_in.replacing import register_for_cpu
    from torch.library import opcheck

    from qcore_xpu import conv2d, triton_ops

    register_for_cpu()
    case = problem(scheme, _SHAPES[2])
    kernel = kernel_for(case.request)
    packed = kernel.pack(case.weight)
    weight, sizes = (packed["data"], packed["scale"], packed.get("zero")), (*kernel.sizes, *kernel.geometry)
    if isinstance(kernel, conv2d.DenseConv2d):
        opcheck(triton_ops.op_conv2d_dense, (case.x, *weight, case.bias, *sizes, case.request.out_dtype))
    else:
        opcheck(triton_ops.op_conv2d_a8, (case.x, *weight, packed.get("sums"), case.bias, *sizes, *kernel._constants))


@pytest.mark.parametrize("name", ["depthwise", "grouped"])
def test_the_op_of_narrow_groups_agrees_with_its_fake(name):
    from qcore_xpu_stand_in.replacing import register_for_cpu
    from torch.library import opcheck

    from qcore_xpu import triton_ops

    register_for_cpu()
    case = problem("w8a8-asym-aasym", next(shape for shape in _SHAPES if shape.name == name))
    kernel, called = kernel_for(case.request), []
    kernel.convolve = lambda *arguments: called.append(arguments) or torch.empty(0)
    kernel(case.x, kernel.pack(case.weight), case.bias)
    opcheck(triton_ops.op_conv2d_groups_a8, called[0])


def test_what_has_no_kernel_is_refused_with_a_reason():
    groups = problem("w8a8", _Shape("groups", (1, 2000, 2, 2), 40, (3, 3), padding=(1, 1), groups=2)).request
    assert "channel groups" in why_not(groups)
    long = problem("w8a8", _Shape("long", (1, 1024, 9, 9), 16, (5, 5))).request
    assert "too long" in why_not(long)
    assert "not a multiple of 32" in why_not(problem("w4a8-g40", _SHAPES[2]).request)
    pixels = problem("w8a8", _Shape("pixels", (1, 20000, 1, 1), 16, (1, 1))).request
    assert not why_not(pixels)


@pytest.mark.parametrize("scheme", ["w4a8", "w8a8", "w8a16"])
def test_without_dpas_only_int8_products_are_refused(monkeypatch, scheme):
    from qcore_xpu import device

    monkeypatch.setattr(device, "why_not_int8", lambda device: f"no DPAS on {device}")
    assert why_not(problem(scheme, WIDE[0]).request) == ("" if scheme == "w8a16" else "no DPAS on cpu")


NARROW_IMAGES = [
    ((5, 1), (1, 2), (1, 1), (1, 3), (8, 1)),
    ((5, 4), (1, 2), (2, 2), (1, 1), (8, 1)),
    ((2, 2), (1, 1), (1, 1), (2, 2), (4, 1)),
    ((2, 2), (1, 1), (1, 1), (3, 3), (2, 2)),
    ((3, 3), (2, 2), (3, 3), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "size"), NARROW_IMAGES)
def test_images_narrower_than_the_kernel_reaches(interpreter, stand_in, kernel, stride, padding, dilation, size, dtype):
    draw, scheme = Draw(torch.Generator().manual_seed(0)), Scheme.parse("w8a16")
    request = replace(
        CONV2D.request_for(scheme, torch.device("cpu"), dtype, 4, 2),
        kernel_size=kernel, stride=stride, padding=padding, dilation=dilation, groups=2,
    )  # fmt: skip
    x = draw.activations((2, 2, *size), dtype, "normal", "dense")
    problem = Problem(request, x, draw.weight(4, request.k, request.weight, "skewed", scheme.quantizer))
    mine = kernel_for(request)
    verdict = CONV2D.judge(problem, mine(x, mine.pack(problem.weight), None))
    assert verdict.ok, verdict.message
