"""Int8 convolutions in narrow channel groups, in Triton's interpreter, against the contract's reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grids import sampled

from qcore import Scheme
from qcore.contracts import CONV2D
from qcore.contracts.conv2d import _SHAPES, _problem, _request, _Shape
from qcore.contracts.inputs import Draw
from qcore_triton import channel_groups

pytestmark = pytest.mark.usefixtures("interpreter", "on_cpu")

SCHEMES = (
    "w8a8", "w8a8-static", "w8a8-asym", "w8a8-aasym", "w8a8-static-o8", "w4a8", "w4a8-g32-asym-aasym", "w8a8-g64",
    "w8a8-fzp-aasym", "w4a8-g32-fzp-static",
)  # fmt: skip
WIDE = (
    _Shape("narrow-groups", (2, 24, 7, 5), 36, (3, 3), padding=(1, 1), groups=12, bias=True, channels_last=True),
    _Shape("many-channels", (2, 70, 9, 9), 70, (5, 5), stride=(2, 1), padding=(2, 2), groups=70, channels_last=True),
    _Shape("many-positions", (1, 5, 33, 21), 5, (3, 3), padding=(1, 1), groups=5, bias=True),
    _Shape("wide-groups", (1, 40, 6, 6), 24, (3, 3), padding=(1, 1), groups=2),
    _Shape("long-columns", (1, 48, 9, 6), 80, (5, 3), padding=(1, 1), groups=4, channels_last=True, bias=True),
    _Shape("many-outputs", (1, 8, 5, 4), 140, (3, 3), padding=(1, 1), groups=2, bias=True),
    _Shape("many-outputs-last", (2, 6, 4, 4), 216, (1, 2), groups=3, channels_last=True),
    _Shape("wide-windows", (2, 8, 3, 30), 8, (1, 19), padding=(0, 9), groups=8, channels_last=True),
    _Shape("one-by-one", (2, 12, 5, 5), 18, (1, 1), groups=6, bias=True),
)
SHAPES = (*(shape for shape in _SHAPES if shape.groups > 1), *WIDE)


@pytest.fixture(scope="module")
def on_cpu():
    """The ops also for the CPU, which the plugin does not register it for."""
    from qcore_cuda import conv_ops, ops

    library = torch.library.Library(ops.NAMESPACE, "IMPL")
    for name in ("conv2d_groups_a8", "conv2d_a16"):
        library.impl(name, getattr(conv_ops, name), "CPU")
    library.impl("linear_a16", ops._linear_a16, "CPU")
    yield
    library._destroy()


def problem(scheme, shape, dtype):
    draw = Draw(torch.Generator().manual_seed(3))
    request = _request(draw.fill(Scheme.parse(scheme)), torch.device("cpu"), dtype, shape)
    return _problem(draw, request, shape)


def check(case):
    from qcore_cuda.conv2d import GroupsConv2d, kernel, why_not

    assert not why_not(case.request)
    made = kernel(case.request)
    assert isinstance(made, GroupsConv2d)
    packed = made.pack(case.weight)
    y = made(case.x, packed, case.bias)
    verdict = CONV2D.judge(case, y)
    assert verdict.ok, verdict.message
    again = made.unpack(packed)
    assert torch.equal(again.data, case.weight.data)
    return y


@pytest.mark.parametrize("outputs", [2, 40])
def test_channels_may_lie_far_apart(outputs):
    """Behind each other by 2**30 bytes: the last one begins beyond what 32 bits hold."""
    shape = _Shape("far", (1, 6, 4, 4), outputs, (3, 3), padding=(1, 1), groups=2)
    case = problem("w8a8-static-o8", shape, torch.int8)
    memory = torch.empty(6 << 30, dtype=torch.int8)  # only pages that are written exist
    far = memory.as_strided((1, 6, 4, 4), (6 << 30, 1 << 30, 4, 1))
    far.copy_(case.x)
    check(replace(case, x=far))


CASES = [(scheme, shape, dtype) for dtype in (torch.bfloat16, torch.float32) for shape in SHAPES for scheme in SCHEMES]


@pytest.mark.parametrize(("scheme", "shape", "dtype"), sampled(CASES, 40), ids=lambda v: getattr(v, "name", str(v)))
def test_every_scheme_is_right_for_every_shape(scheme, shape, dtype):
    check(problem(scheme, shape, dtype))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-g32-asym-aasym"])
@pytest.mark.parametrize("shape", WIDE, ids=lambda shape: shape.name)
def test_positions_may_be_beyond_int32(monkeypatch, scheme, shape):
    monkeypatch.setattr(channel_groups, "_NEAR", 3)  # so kernels number them in int64
    check(problem(scheme, shape, torch.bfloat16))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_codes_are_unchanged_and_padded_with_the_zero_point(shape):
    check(problem("w8a8-static-o8", shape, torch.int8))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-aasym", "w8a8-static"])
def test_columns_with_nan_give_nan(scheme):
    case = problem(scheme, SHAPES[0], torch.float32)
    case.x[0, 0, 2, 3] = torch.nan
    y = check(case)
    assert y[0].isnan().any()
    assert not y[1].isnan().any()


@pytest.mark.parametrize("shape", WIDE, ids=lambda shape: shape.name)
def test_results_have_the_strides_that_a_trace_expects(shape):
    case = problem("w8a8", shape, torch.float32)
    r = case.request
    window = (r.kernel_size, r.stride, r.padding, r.dilation, r.groups, channel_groups.is_last(case.x))
    fake = channel_groups.fake(case.x, case.x, case.x, None, None, None, r.n, r.k, r.k, *window, r.out_dtype)
    y = check(case)
    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("scheme", ["wfp8a16", "nvfp4", "mxfp4", "nf4", "wfp8a16-g32-e8m0"])
@pytest.mark.parametrize("shape", [*SHAPES[:4], *_SHAPES[:4]], ids=lambda shape: shape.name)
def test_tables_are_right_with_float_activations(scheme, shape):
    from qcore_cuda.conv2d import FloatConv2d, kernel
    from qcore_cuda.eligibility import _why_not_weight

    case = problem(scheme, shape, torch.bfloat16)
    assert not _why_not_weight(case.request)
    made = kernel(case.request)
    assert isinstance(made, FloatConv2d)
    packed = made.pack(case.weight)
    verdict = CONV2D.judge(case, made(case.x, packed, case.bias))
    assert verdict.ok, verdict.message
    assert torch.equal(made.unpack(packed).data, case.weight.data)


ORDERS = {
    "contiguous": lambda x: x,
    "cropped": lambda x: x[:, :, 1:-1, 2:],
    "transposed": lambda x: x.transpose(2, 3),
    "every-second-channel": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [(2, 3, 7, 9), (2, 70, 5, 130), (1, 33, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_images_get_their_channels_last(order, size, dtype):
    from qcore_cuda.runtime.launch import launch
    from qcore_triton.host import channels_last

    x = ORDERS[order](torch.randint(-100, 100, size).to(dtype))
    y = channels_last(launch, x, PDL=False)
    assert torch.equal(y, x)
    assert y.stride(1) == 1 or not x.numel()
    assert channels_last(launch, y, PDL=False) is y
