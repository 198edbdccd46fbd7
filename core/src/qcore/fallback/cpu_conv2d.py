"""``torch.cpu.conv2d``: static int8 activations and per-channel weights through ``onednn::qconv_pointwise``.

As in `onednn`, activations are uint8 = code + 128, and a probe rules out CPUs on which the op saturates. The op pads
with the value 0 for any zero point, as the contract requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts import Conv2dRequest
from ..contracts.conv2d import check_image, convolved_size, kernel_shape
from ..discovery.kernels import Kernel, Packed, check_weight
from ..formats import ZeroPoint
from ..weights.activations import StaticInt8
from ..weights.qtensor import QTensor, contiguous
from .codes import static_codes, unsigned
from .integer import finish
from .onednn import OFFSET
from .ops import on_cpu, op
from .padding import needs_explicit_padding, pad_image


class CpuConv2d(Kernel):
    """Static int8 activations, symmetric per-channel int4 or int8 weights; a float or an int8 result.

    Packed: ``weight``: the prepacked codes; ``scale``: the weight's scale, unchanged; ``scale32`` ``(OC,)`` float32.
    """

    name = "torch.cpu.conv2d"

    def __init__(self, request: Conv2dRequest) -> None:
        self.request, self.n, self.k = request, request.n, request.k
        # Registered here: a trace cannot register ops.
        self._traced, self._traced_codes = op(int8_conv2d, _fake), op(kernel_codes, _fake_codes)
        # The op writes float32 and bfloat16; other dtypes are rounded from float32.
        self.direct = request.out_dtype if request.out_dtype == torch.bfloat16 else torch.float32

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        check_weight(self.name, weight, self.request.weight, self.n, self.k)
        codes = weight.codes().view(kernel_shape(self.request)).permute(0, 3, 1, 2)
        scale = weight.scale[0].float()
        return {"weight": _prepack(codes, scale, self.request), "scale": weight.scale, "scale32": scale}

    def unpack(self, packed: Packed) -> QTensor:
        call = self._traced_codes if torch.compiler.is_compiling() else kernel_codes
        return QTensor.from_codes(call(packed["weight"]), packed["scale"], None, self.request.weight)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_runtime_params: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for another channel count."""
        r = self.request
        check_image(self.name, x, r)
        assert isinstance(r.activation, StaticInt8)
        scale, zero = float(r.activation.scale or 1.0), r.activation.zero_point
        codes = unsigned(x.float()) if x.dtype == torch.int8 else static_codes(x, scale, zero)
        call = self._traced if torch.compiler.is_compiling() else int8_conv2d
        bias = None if bias is None else bias.float().contiguous()
        geometry = (r.stride, r.padding, r.dilation, r.groups)
        y = call(codes, scale, zero, packed["weight"], packed["scale32"], bias, *geometry, self.direct)
        return y if r.out_dtype == self.direct else finish(y, 1.0, None, r.output, r.out_dtype, {})


def int8_conv2d(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Convolve x ``(B, IC, H, W)`` uint8 with a prepacked weight in int32 and round once to ``out_dtype``."""
    geometry = (stride, padding, dilation, groups)
    if not x.shape[0]:
        return _fake(x, x_scale, x_zero_point, weight, scale, bias, *geometry, out_dtype)
    none, zero = torch.zeros_like(scale, dtype=torch.int32), x_zero_point + OFFSET
    if needs_explicit_padding(x.shape[2:], weight.shape, stride, padding, dilation):
        x, stride = pad_image(x, weight.shape[2:], stride, padding, dilation, zero)
        geometry = (stride, (0, 0), dilation, groups)
    y = _convolve()(x, x_scale, zero, weight, scale, none, bias, *geometry, 1.0, 0, out_dtype, "none", [], "")
    return y.contiguous(memory_format=torch.channels_last)


def _fake(x: Tensor, _x_scale: float, _zero: int, weight: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    _bias, stride, padding, dilation, _groups, out_dtype = rest
    oh, ow = convolved_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    return scale.new_empty(x.shape[0], oh, ow, scale.shape[0], dtype=out_dtype).permute(0, 3, 1, 2)


def kernel_codes(weight: Tensor) -> Tensor:
    """Unpack a prepacked weight to int8 codes ``(OC, KH*KW*IC/groups)`` in the column order of a `QTensor`."""
    return weight.to_dense().permute(0, 2, 3, 1).flatten(1).contiguous()


def _fake_codes(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[0], weight.shape[1:].numel(), dtype=torch.int8)


def _prepack(codes: Tensor, scale: Tensor, request: Conv2dRequest) -> Tensor:
    geometry = (request.stride, request.padding, request.dilation, request.groups)
    packed: Tensor = torch.ops.onednn.qconv_prepack(contiguous(codes), scale, 1.0, OFFSET, *geometry, None)
    return packed


@lru_cache(maxsize=1)
def _convolve() -> Callable[..., Tensor]:
    return torch.ops.onednn.qconv_pointwise.default


@lru_cache(maxsize=4)
def is_exact(weight_bits: int) -> bool:
    """Whether the op exists and multiplies the most extreme codes exactly on this CPU."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qconv_pointwise")):  # type: ignore[no-untyped-call]
        return False
    with on_cpu():
        codes = torch.full((32, 32, 3, 3), (1 << (weight_bits - 1)) - 1, dtype=torch.int8)
        x = torch.full((1, 32, 6, 6), 255, dtype=torch.uint8)
        one, geometry = torch.ones(32), ((1, 1), (1, 1), (1, 1), 1)
        packed = torch.ops.onednn.qconv_prepack(codes, one, 1.0, OFFSET, *geometry, None)
        expected = F.conv2d(x.double() - OFFSET, codes.double(), padding=1)
        return torch.equal(int8_conv2d(x, 1.0, 0, packed, one, None, *geometry, torch.float32).double(), expected)


def why_not(request: Conv2dRequest) -> str:
    """Why the kernel does not support ``request``; empty if it does."""
    fmt = request.weight
    if request.device.type != "cpu" or not request.n or not request.k:
        return "it runs on the CPU, with weights that are not empty"
    if fmt.groups(request.k) != 1 or fmt.zero is not ZeroPoint.NONE:
        return "it needs one scale per channel, without zero point"
    if not isinstance(request.activation, StaticInt8):
        return "it needs static int8 activations"
    if request.in_channels == request.groups != request.out_channels and request.groups > 1:
        # oneDNN is wrong for more than 32 output channels per group (torch 2.13).
        return "oneDNN is not exact with one input and several output channels per group"
    return "" if is_exact(fmt.bits) else "oneDNN's int8 convolution is missing, or not exact on this CPU"


def kernel(request: Conv2dRequest) -> CpuConv2d:
    """Return the kernel for a request that `why_not` accepts."""
    return CpuConv2d(request)
