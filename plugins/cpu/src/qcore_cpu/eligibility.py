"""Why requests are refused, in sentences that a user can act on."""

from __future__ import annotations

from qcore import Conv2dRequest, DynamicInt8, StaticInt8, ZeroPoint
from qcore.plugin_api import AnyRequest, why_not_dtypes, why_not_empty

from . import native
from .geometry import Geometry
from .kinds import Kind, Mode, kind_of

_FEWEST_OUTPUTS = 32
"""Output channels of one of several groups, for float x: fewer leave some of 32 columns empty, and took 1.5 to 9 times
as long as torch's float layer, torch ops 1.2 times (benchmarks/results/2026-11-28-cpu-planes.md)."""
_FEWEST_INPUTS = 4
"""Input channels of a group, for float x: gathering fewer took two to four times as long as torch ops
(benchmarks/cpu_rank.py)."""
_MANY_OUTPUTS, _FEWEST_LANES, _MOST_TAPS = 4, 16, 512
"""What depthwise kernels take; see ``native/conv.h`` and ``native/problem.h``."""
_LEAST_PRODUCT = 16
"""Input times output channels, up to which planes take less time than windows in either format of images; measured
with 3 x 3 windows (benchmarks/results/2026-11-28-cpu-short-rows.md)."""
_LARGEST_K = 1 << 30
"""The library indexes packed columns with 32-bit integers."""


def why_not(request: AnyRequest) -> str:
    """Why a request is refused; empty if a kernel supports it."""
    if request.device.type != "cpu":
        return f"qcore-cpu runs on the CPU, but the tensors are on {request.device}; move them with .to('cpu')."
    return why_not_empty(request) or why_not_dtypes(request) or _why_not_activation(request) or _why_not_size(request)


def _why_not_activation(request: AnyRequest) -> str:
    activation = getattr(request, "activation", None)
    if activation is None:
        return ""
    if not isinstance(activation, (DynamicInt8, StaticInt8)):
        convolution = isinstance(request, Conv2dRequest)
        return "convolutions with fp8 activations have no CPU kernel; torch ops run this layer." if convolution else ""
    if kind_of(request.weight.element) in (Kind.FLOAT4, Kind.FLOAT8):
        return f"{request.weight.dtype} weights with int8 activations have no CPU kernel; torch ops run this layer."
    return ""


def _why_not_size(request: AnyRequest) -> str:
    if request.k > _LARGEST_K:
        return f"K={request.k} is too large for this kernel's 32-bit column indices; torch ops run this layer."
    if not isinstance(request, Conv2dRequest):
        return ""
    if request.activation is not None or takes_planes(request):
        return ""
    inputs, outputs = _channels(request)
    if inputs < _FEWEST_INPUTS:
        return f"{_few(request)} take longer to gather than to multiply; torch ops run this layer."
    if request.groups > 1 and outputs < _FEWEST_OUTPUTS:
        return f"{_few(request)} leave some of a block of 32 empty; torch ops run this layer."
    return ""


def takes_planes(request: Conv2dRequest) -> bool:
    """Whether positions of the image become lanes, not channels, as these are few.

    The numbers, here and below, are where one kernel becomes faster than the other;
    benchmarks/results/2026-11-28-cpu-planes.md.
    """
    inputs, outputs = _channels(request)
    if request.activation is None:
        return inputs == 1 and outputs < _MANY_OUTPUTS and _taps(request) <= _MOST_TAPS
    if min(inputs, outputs) < 16:
        # Planes of many results would be turned round for images in channels-last order; see `takes_planes_first`.
        return not (request.groups == 1 and outputs > 32 * inputs and _has_windows(request, inputs))
    if _has_windows(request, inputs):
        return request.groups > 1 and outputs < 32
    return (_taps(request) > 1 or request.groups > 1) and outputs < 64


def takes_planes_first(request: Conv2dRequest) -> bool:
    """Whether images in torch's default format stay so: turning them round takes longer than what is gained.

    The numbers for windows: benchmarks/results/2026-11-28-cpu-short-rows.md.
    """
    inputs, outputs = request.in_channels, request.n
    if _has_windows(request, inputs):
        # Values of 4 bytes take longer to turn round than those of 2, and no longer to multiply; with a stride, many
        # may be of no window.
        product, most = inputs * outputs, 512
        if request.x_dtype.itemsize == 4:
            most = 8192 if max(request.stride) > 1 else 3456
        few = request.k <= (256 if product <= 256 else 144) and product <= most
    else:
        few = inputs <= 144 and inputs * outputs <= (8192 if _taps(request) == 1 else 2048)
    return request.groups == 1 and request.activation is not None and few


def takes_windows_last(request: Conv2dRequest) -> bool:
    """Whether images in the format channels_last have windows where others have planes: they would be turned round."""
    inputs, outputs = _channels(request)
    return request.groups == 1 and _has_windows(request, inputs) and inputs * outputs > _LEAST_PRODUCT


def takes_channels(request: Conv2dRequest) -> bool:
    """Whether channels of the format channels_last become lanes: depthwise, or in small groups."""
    inputs, outputs = _channels(request)
    if inputs != outputs or request.in_channels < _FEWEST_LANES or _taps(request) > _MOST_TAPS:
        return False
    mode, exact = Mode.of(request.activation), request.weight.zero is not ZeroPoint.FLOAT
    one = exact and request.weight.group(request.k) >= request.k and request.x_dtype.is_floating_point
    if inputs > 1:  # codes less their zero points are int8
        int8 = request.weight.zero is ZeroPoint.NONE or request.weight.element.container_bits == 4
        one = one and int8 and inputs in (4, 8, 16) and inputs <= native.lanes()
    return (mode is Mode.DIGITS and inputs == 1) or (one and mode in (Mode.DYNAMIC, Mode.STATIC, Mode.AFFINE))


def _channels(request: Conv2dRequest) -> tuple[int, int]:
    """Input and output channels of a group."""
    return request.in_channels // request.groups, request.n // request.groups


def _taps(request: Conv2dRequest) -> int:
    return request.kernel_size[0] * request.kernel_size[1]


def _has_windows(request: Conv2dRequest, inputs: int) -> bool:
    """Whether windows are multiplied as codes that lie side by side; as ``has_windows`` of ``native/conv.cpp``.

    Not with odd channels and short vectors, which have no parts: first layers took up to 1.5 times as long as planes.
    """
    if request.activation is None:
        return False
    even = inputs % (8 if request.weight.element.container_bits == 4 else 4) == 0
    at = Geometry.of(request.k, request.weight.group(request.k))
    whole = at.groups == 1 or (at.group % 32 == 0 and at.fold == at.group)
    return whole and (even or (Mode.of(request.activation) is not Mode.STATIC and native.lanes() == 16))


def _few(request: Conv2dRequest) -> str:
    inputs, outputs = _channels(request)
    return f"{inputs} input and {outputs} output channels in each of {request.groups} groups"
