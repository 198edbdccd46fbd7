"""Convolutions in Triton's interpreter, against the contract's reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from grids import sampled

from qcore import Scheme
from qcore.contracts import CONV2D
from qcore.contracts.conv2d import _SHAPES, _problem, _request, _Shape
from qcore.contracts.inputs import Draw

pytestmark = pytest.mark.usefixtures("interpreter")

SCHEMES = (
    "w8a8-static",
    "w8a8",
    "w8a8-asym",
    "w8a8-aasym",
    "w8a8-static-o8",
    "w4a8",
    "w4a8-g32-asym-aasym",
    "w8a8-g64",
)
GATHERED = (
    _Shape("gathered", (2, 32, 6, 7), 20, (3, 3), padding=(1, 1), bias=True),
    _Shape("gathered-strided", (1, 64, 9, 9), 33, (3, 3), stride=(2, 1), padding=(1, 0), dilation=(2, 1)),
    _Shape("gathered-last", (2, 32, 5, 5), 70, (3, 3), padding=(2, 2), channels_last=True),
)
GROUPS = (_Shape("long-columns", (1, 960, 4, 3), 32, (3, 3), groups=2, padding=(1, 1), bias=True),)
CASES = [(scheme, shape) for shape in _SHAPES if shape.groups == 1 for scheme in SCHEMES]
WIDE_SCHEMES = ("w8a8-static", "w8a8-static-o8", "w4a8-g32-static", "w8a8")
WIDE = [(scheme, shape) for shape in (*GATHERED, *GROUPS) for scheme in WIDE_SCHEMES]


def named(value):
    """The name of a shape; a scheme is its own."""
    return getattr(value, "name", value)


@pytest.fixture(scope="module")
def on_cpu():
    """The ops also for the CPU, which the plugin does not register them for."""
    from qcore_cuda import conv_ops, ops

    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    for name, function in (("linear_a8", ops._linear_a8), ("conv2d_a8", conv_ops.conv2d_a8)):
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def problem(scheme, shape, dtype=torch.float32, seed=3):
    draw = Draw(torch.Generator().manual_seed(seed))
    request = _request(draw.fill(Scheme.parse(scheme)), torch.device("cpu"), dtype, shape)
    return _problem(draw, request, shape)


def check(case):
    from qcore_cuda.conv2d import kernel

    made = kernel(case.request)
    y = made(case.x, made.pack(case.weight), case.bias)
    verdict = CONV2D.judge(case, y)
    assert verdict.ok, verdict.message
    return y


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("scheme", "shape"), sampled(CASES, 25), ids=named)
def test_every_scheme_is_right_for_every_shape(scheme, shape):
    check(problem(scheme, shape, torch.bfloat16 if "3" in shape.name else torch.float32))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("scheme", "shape"), sampled(WIDE, 6), ids=named)
def test_wide_channels_and_groups_are_right(scheme, shape):
    check(problem(scheme, shape))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("shape", [GATHERED[1], _SHAPES[4]], ids=lambda shape: shape.name)
def test_codes_are_unchanged_and_padded_with_the_zero_point(shape):
    check(problem("w8a8-static-o8", shape, torch.int8))


@pytest.mark.usefixtures("on_cpu")
def test_columns_made_in_parts_give_the_same(monkeypatch):
    from qcore_cuda.convolutions import columns

    case = problem("w8a8", GATHERED[0])
    whole = check(case)
    monkeypatch.setattr(columns, "_COLUMN_BYTES", 1)
    monkeypatch.setattr(columns, "_LEAST_COLUMNS", 16)
    assert torch.equal(check(case), whole)


def test_scales_of_columns_come_from_the_extents_of_pixels():
    from qcore_cuda.convolutions import conv_hopper
    from qcore_cuda.convolutions.base import ActivationParameters
    from qcore_cuda.convolutions.codes import column_codes
    from qcore_cuda.runtime.device import Device
    from qcore_triton.geometry import Geometry
    from qcore_triton.weights import Weight

    x = torch.randn(2, 48, 6, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.contiguous(memory_format=torch.channels_last)
    geometry = Geometry((3, 2), (1, 1), (2, 1), (2, 1), 1)
    size = geometry.output(6, 7)
    weight = Weight(torch.empty(16, 288), torch.empty(1, 16), None, 16, 288, 8, 288)
    codes = column_codes(x, geometry, ActivationParameters(True, None, 0), 0, 2 * size[0] * size[1], weight)
    window = (2, 6, 2, 1, 2, 1)
    scale, inverse = conv_hopper._column_scales(x.movedim(1, -1), window, size, Device(0, False, 4))
    assert torch.equal(scale, codes.scale)
    assert torch.allclose(inverse, 1 / scale, rtol=2e-6)


@pytest.mark.parametrize(
    ("size", "box"),
    [((32, 56, 56), (2, 8, 8)), ((1, 1, 300), (1, 1, 128)), ((1, 30, 30), (1, 8, 16)), ((64, 1, 1), (128, 1, 1))],
)
def test_boxes_waste_little_at_the_borders(size, box):
    from qcore_cuda.convolutions import conv_hopper

    found = conv_hopper._box(*size)
    count, most = (math.prod(-(-s // b) for s, b in zip(size, sides, strict=True)) for sides in (found, box))
    assert count <= most
    assert math.prod(found) == 128
    assert math.prod(conv_hopper._half(found)) == 64


@pytest.mark.usefixtures("on_cpu")
def test_results_have_the_strides_that_a_trace_expects():
    from qcore_cuda import conv_ops

    case = problem("w8a8-static", GATHERED[0])
    r = case.request
    fake = conv_ops._fake(case.x, r.n, r.out_dtype, (r.kernel_size, r.stride, r.padding, r.dilation))
    y = check(case)
    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)


def test_what_has_no_kernel_is_refused_with_a_reason():
    from qcore_cuda.conv2d import why_not

    groups = problem("w8a8", _Shape("groups", (1, 2000, 2, 2), 40, (3, 3), padding=(1, 1), groups=2)).request
    assert "channel groups" in why_not(groups)
    long = problem("w8a8", _Shape("long", (1, 2048, 9, 9), 16, (5, 5))).request
    assert "too long" in why_not(long)


@pytest.mark.parametrize("scheme", ["w4a16-fzp", "wnf4a16"])
def test_equal_numbers_of_long_rows_are_not_rounded_alike(scheme):
    from qcore_cuda import conv2d, conv_ops, ops

    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    library.impl("conv2d_a16", conv_ops.conv2d_a16, "CPU")
    made = problem(scheme, _Shape("wide", (1, 900, 3, 3), 32, (3, 3), padding=(1, 1)), torch.bfloat16, seed=7)
    made = replace(made, x=made.x.abs())
    kernel = conv2d.kernel(made.request)
    verdict = CONV2D.judge(made, kernel(made.x, kernel.pack(made.weight), made.bias))
    library._destroy()
    assert verdict.ok, verdict.message
