"""Int8 convolutions in narrow channel groups: their packing, which ones there are kernels for, and their launch.

Packed: ``data``, codes in int8: ``(K, N)``, so that neighbouring output channels are neighbours in memory; for matrix
units ``(N, K)``, K rounded up to 32. ``scale``, ``zero`` and, for matrix units, ``sums`` ``(G, N)`` as
in `packing`. Triton is imported when a kernel first runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Conv2dRequest, QTensor, ZeroPoint
from qcore.plugin_api import Kernel, Packed, check_image, check_weight

from .codes import given_of, mode_of, numbers_of
from .geometry import Geometry, power_of_two
from .packing import group_sums
from .weights import bias_of, check_devices, zero_kind

_LARGEST_K = 4096
"""The longest columns: a program reads them twice for its output channels."""
_TILES = (2048, 1024, 512)
"""Results of a program without matrix units: each of its 128 threads has 16, or fewer if there are few programs."""
_BUSY = 512
"""Programs that keep a device busy: three or four for each multiprocessor."""
_WIDE = 64
"""Channels of such a tile at most: as many bytes as a cache line."""
_ROWS = (64, 32)
"""Positions that a program with matrix units takes, or fewer if there are few programs."""
_CHANNELS = 32, 128
"""The fewest and the most channels that it takes at a time: of a product of int8, and of a wide group."""
_LINE = 8
"""The widest windows whose lines are read in one go."""
_NEAR = 2**31 - _TILES[0]
"""The most positions of which int32 holds the numbers, also of those beyond the end in the last tile."""


def on_matrix_units(k: int, each: int) -> bool:
    """Whether groups of columns of ``k`` values, for ``each`` output channels, are multiplied there.

    There a value is gathered once for all of them, but in blocks of 32; elsewhere once for each.
    """
    return each * k > -(-k // 32) * 32


def tile_of(channels: int, each: int) -> tuple[int, int, int]:
    """Channel groups of a tile on matrix units, and how many input and output channels it has of each.

    Powers of two. Wider groups are taken in parts: input channels one part after the other, output channels by other
    programs.
    """
    least, most = _CHANNELS
    inner, outer = min(most, power_of_two(channels)), min(most, power_of_two(each))
    groups = max(1, least // max(inner, outer))
    return groups, max(inner, least // groups), max(outer, 16 // groups)


def _span(x: Tensor, geometry: Geometry) -> int:
    """The distance in elements between the first and the last element of a window of x."""
    taps = zip(geometry.kernel, geometry.dilation, x.stride()[2:], strict=True)
    return sum((size - 1) * step * stride for size, step, stride in taps) + x.shape[1]


def _tile(sizes: Sequence[int], positions: int, others: int) -> tuple[int, int]:
    """The largest size with which there are enough programs, or the last, and how many tiles that makes.

    ``others``: programs for the same positions.
    """
    size = next((size for size in sizes if -(-positions // size) * others >= _BUSY), sizes[-1])
    return size, -(-positions // size)


class ChannelGroupsConv2d(Kernel):
    """Int8 activations, per column or given for the whole tensor: exact int32 sums, the rest in float32.

    ``name``: of the plugin.
    """

    def __init__(self, name: str, request: Conv2dRequest) -> None:
        self.name = f"{name}.conv2d_groups_w{request.weight.bits}a8"
        self.format, self.n, self.k = request.weight, request.n, request.k
        r = self.request = request
        self.geometry = (list(r.kernel_size), list(r.stride), list(r.padding), list(r.dilation), r.groups)
        self.sums = on_matrix_units(self.k, self.n // r.groups)
        self.constants = (*numbers_of(r.activation, r.output), r.out_dtype)

    @property
    def packing(self) -> str:
        return "triton.rows32+sums" if self.sums else "triton.columns8"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        codes = weight.codes()
        data = pad(codes, (0, -self.k % 32)) if self.sums else codes.t()
        packed = {"data": data.contiguous(), "scale": weight.scale.contiguous()}
        zero = weight.integer_zero() if self.format.zero is ZeroPoint.INT else weight.zero
        if zero is not None:
            packed["zero"] = (zero.to(torch.int8) if self.format.zero is ZeroPoint.INT else zero).contiguous()
        if self.sums:
            packed["sums"] = group_sums(weight)
        return packed

    def unpack(self, packed: Packed) -> QTensor:
        data = packed["data"]
        codes = data[:, : self.k] if self.sums else data.t()
        return QTensor.from_codes(codes.contiguous(), packed["scale"], packed.get("zero"), self.format)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        """Run on x ``(B, IC, H, W)``, giving ``(B, OC, OH, OW)``; raises `FormatError` for a wrong channel count."""
        check_image(self.name, x, self.request)
        weight = (packed["data"], packed["scale"], packed.get("zero"), packed.get("sums"))
        sizes = (self.n, self.k, self.format.group(self.k))
        return self.convolve(x, *weight, bias, *sizes, *self.geometry, is_last(x), *self.constants)

    @abstractmethod
    def convolve(self, x: Tensor, *arguments: Any) -> Tensor:
        """The convolution of x; ``arguments``: the others of `SCHEMA`."""


SCHEMA = (
    "conv2d_groups_a8(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? sums, Tensor? bias, "
    "int n, int k, int group, int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, int groups, bool last, "
    "bool symmetric, float? static_scale, int static_zero_point, float? output_scale, int output_zero_point, "
    "ScalarType out_dtype) -> Tensor"
)
"""The op of `convolve`: the weight as packed, ``group`` of whose codes share a scale, and x ``(B, IC, H, W)``.

Results have their channels last in memory if ``last``. Other arguments are as in the plugins' op ``conv2d_a8``.
"""

_Pair = Sequence[int]


def convolve(
    launch: Callable[..., object], x: Tensor,
    data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, bias: Tensor | None,
    n: int, k: int, group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int, last: bool,
    symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype, *, asm: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Run `SCHEMA` with a plugin's ``launch`` and ``options``, as in `host`; both belong to the device of x.

    ``asm``: the device takes NVIDIA's assembly.
    """
    check_devices(x, data, {"bias": bias})
    geometry = Geometry.of(kernel, stride, padding, dilation, groups)
    y = _empty_image(x, n, geometry, out_dtype, last=last)
    if not y.numel():
        return y
    from .host import channels_last, end_of
    from .kernels import channel_group_products, channel_groups

    x = channels_last(launch, x, **options)
    mode = mode_of(x, symmetric, given_of(None, None, static_scale, static_zero_point))
    end = end_of(bias_of(bias, n), given_of(None, None, output_scale, output_zero_point), y)
    (batch, channels, height, width), (oh, ow), each = x.shape, y.shape[2:], n // groups
    positions, weight = batch * oh * ow, (data, scale, scale if zero is None else zero)
    numbers = (
        1.0 if mode.scale is None else mode.scale, 0.0 if mode.zero is None else mode.zero, *end.numbers,
        positions, oh * ow, n, k, group, height, width, ow, *geometry.stride, *geometry.padding, *geometry.dilation,
        x.stride(0), x.stride(2), x.stride(3),
    )  # fmt: skip
    meta = {"MODE": mode.kind, "CODES": x.dtype == torch.int8, "CHANNELS": channels // groups, "EACH": each}
    meta |= {"KW": geometry.kernel[1], "ZERO": zero_kind(zero), "LAST": last, "ASM": asm, "WHOLE": group >= k}
    meta["FAR"] = max(positions, _span(x, geometry)) > _NEAR
    if on_matrix_units(k, each):
        together, inner, outer = tile_of(channels // groups, each)
        parts = -(-groups // together) * -(-each // outer)
        bm, tiles = _tile(_ROWS, positions, parts)
        meta |= {"BM": bm, "GROUPS": together, "BC": inner, "BN": outer, **end.meta, **options}
        tensors = (x, *weight, scale if sums is None else sums, end.args[0], y)
        launch(channel_group_products.convolve, (tiles, parts), *tensors, *numbers, data.shape[1] // 32, **meta)
        return y
    bc = min(_WIDE if n % _WIDE == 0 else _WIDE // 2, power_of_two(n))
    parts = -(-n // bc)
    bp, tiles = _tile([tile // bc for tile in _TILES], positions, parts)
    meta |= {"BP": bp, "BC": bc, "LINES": geometry.kernel[1] <= _LINE, **end.meta, **options}
    launch(channel_groups.convolve, (tiles, parts), x, *weight, end.args[0], y, *numbers, **meta)
    return y


def fake(
    x: Tensor, _data: Tensor, _scale: Tensor, _zero: Tensor | None, _sums: Tensor | None, _bias: Tensor | None,
    n: int, _k: int, _group: int, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, groups: int,
    last: bool, *rest: Any,
) -> Tensor:  # fmt: skip
    """The form of what `convolve` returns."""
    return _empty_image(x, n, Geometry.of(kernel, stride, padding, dilation, groups), rest[-1], last=last)


def is_last(x: Tensor) -> bool:
    """Whether the channels of images x come last in memory: results have the same order."""
    return x.stride(1) == 1 and x.shape[1] > 1


def _empty_image(x: Tensor, n: int, geometry: Geometry, dtype: torch.dtype, *, last: bool) -> Tensor:
    """An uninitialized result ``(B, n, OH, OW)``, contiguous, with channels last in memory if ``last``."""
    size = geometry.output(*x.shape[2:])
    if last:
        return x.new_empty((x.shape[0], *size, n), dtype=dtype).movedim(-1, 1)
    return x.new_empty((x.shape[0], n, *size), dtype=dtype)


def takes_channel_groups(r: Conv2dRequest) -> bool:
    """Whether a convolution that a plugin's eligibility accepts is one of those: several groups of short columns."""
    return r.activation is not None and r.groups > 1 and 0 < r.k <= _LARGEST_K
