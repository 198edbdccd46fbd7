"""``torch.plain.linear``: every format, activation and device, in plain torch ops that a compiler can fuse."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts import Conv2dRequest, LinearRequest
from ..discovery.kernels import Packed, RowsKernel
from ..formats import Format, ZeroPoint
from ..weights.activations import DynamicFP8, DynamicInt8, StaticFP8, StaticInt8, fp8_scale, quantize_fp8
from .integer import activation_bound, centred_activations, concatenated, finish, integer_product, split_bias
from .weights import NeutralKernel, WeightReader, autocast_device

_LONG_GROUP = 256
"""Columns from which on errors of equal numbers, which grow with their number, exceed those of independent ones."""


def compute_dtype(device: torch.device, x_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a product of float activations is computed.

    bfloat16 and float16 are kept, because their products accumulate in float32. Two cases are computed in float32
    instead: float16 on a CPU, whose matrix product is 4 to 14 times slower than the others, and results wider than x.
    """
    if x_dtype == torch.float64:
        return x_dtype
    native = x_dtype == torch.bfloat16 or (x_dtype == torch.float16 and device.type != "cpu")
    return x_dtype if native and out_dtype == x_dtype else torch.float32


def rounds_alike(reader: WeightReader, dtype: torch.dtype) -> bool:
    """Whether rounding a weight to ``dtype`` makes errors that add up: long groups have few different numbers.

    Those are rounded alike wherever they occur. If they lie around 0, the errors of a number and of its negative
    cancel, but not those of float zero points, nor of a table.
    """
    around_zero = reader.format.zero is not ZeroPoint.FLOAT and has_exact_values(reader.format, dtype)
    return dtype.itemsize == 2 and reader.group > _LONG_GROUP and not around_zero


def product_dtype(request: LinearRequest | Conv2dRequest, reader: WeightReader) -> torch.dtype:
    """`compute_dtype`, or float32 for a weight whose rounding errors add up, see `rounds_alike`."""
    dtype = compute_dtype(request.device, request.x_dtype, request.out_dtype)
    return torch.float32 if rounds_alike(reader, dtype) else dtype


def has_exact_values(format: Format, dtype: torch.dtype) -> bool:
    """Whether the values of all codes are exact in ``dtype``."""
    if format.element.values is None:
        return True
    table = torch.tensor([v for v in format.element.values if math.isfinite(v)], dtype=torch.float32)
    return bool((table.to(dtype).float() == table).all())


class PlainLinear(NeutralKernel, RowsKernel):
    """`linear` in plain torch ops, a chunk of output rows at a time."""

    def __init__(self, request: LinearRequest) -> None:
        super().__init__("torch.plain.linear", request.weight, request.n, request.k)
        self.activation, self.output, self.out_dtype = request.activation, request.output, request.out_dtype
        self.compute = product_dtype(request, self.reader)
        self.autocast = autocast_device(request.device)
        # Scaling the result is cheaper, and codes are exact in bfloat16 while a scaled weight is not. In float16 the
        # products of codes would overflow.
        one_scale = self.reader.groups == 1 and self.format.zero is not ZeroPoint.FLOAT
        self.scale_after = one_scale and self.compute != torch.float16 and has_exact_values(self.format, self.compute)
        if isinstance(self.activation, (DynamicFP8, StaticFP8)):
            self.compute = torch.float64 if request.x_dtype == torch.float64 else torch.float32

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> Tensor:
        if self.autocast and torch.is_autocast_enabled(self.autocast):
            with torch.autocast(self.autocast, enabled=False):
                return self.run(x, packed, bias, **runtime_params)
        if self.activation is None:
            return self._float(x, packed, bias)
        if isinstance(self.activation, (DynamicFP8, StaticFP8)):
            scale = fp8_scale(self.activation, x)
            return self._float(quantize_fp8(x, scale).to(self.compute) * scale.to(self.compute), packed, bias)
        return self._integer(x, packed, bias, runtime_params)

    def _float(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x = self.reader.reorder(x.to(self.compute))
        wide = torch.promote_types(self.compute, torch.float32)
        scale = self.reader.scales(packed["scale"], packed.get("global_scale"), wide) if self.scale_after else None
        start = bias if bias is not None and bias.dtype == self.compute and scale is None else None
        if start is not None:
            bias = None
        elif bias is not None and self.compute.itemsize == 2:
            start, bias = split_bias(bias, None if scale is None else scale[0], self.compute)
        starts = None if start is None else iter(torch.split(start, self.reader.chunk_rows(packed["data"])))
        y = concatenated([F.linear(x, w, None if starts is None else next(starts)) for w in self._dense(packed)])
        if scale is not None:
            y = y.to(wide) * scale
        if bias is not None:
            y = y.to(wide) + bias.to(wide)
        return y.to(self.out_dtype)

    def _dense(self, packed: Packed) -> Iterator[Tensor]:
        """Yield chunks of the dense weight, ``(rows, K)``; unscaled if the scale is applied to the result."""
        for data, scale, zero in self.reader.chunks(packed):
            if self.scale_after:
                yield self.reader.centred(data, zero, self.compute).flatten(1)[:, : self.k]
            else:
                yield self.reader.dense(data, scale, zero, self.compute, packed.get("global_scale"))

    def _integer(self, x: Tensor, packed: Packed, bias: Tensor | None, runtime_params: dict[str, Tensor]) -> Tensor:
        assert isinstance(self.activation, (DynamicInt8, StaticInt8))
        codes, scale = centred_activations(self.activation, self.reader.reorder(x), runtime_params)
        y = integer_product(self.reader, codes, packed, activation_bound(self.activation))
        return finish(y, scale, bias, self.output, self.out_dtype, runtime_params)
