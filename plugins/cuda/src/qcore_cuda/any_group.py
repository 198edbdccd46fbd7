"""The kernel of the contract ``linear`` for groups that no other one packs: ``cuda.w4a16_any``, ``cuda.w8a16_any``, ...

GGUF's Q6_K has groups of 16, for one. The weight becomes numbers in one launch, see `kernels.any_group`, which torch
multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore import LinearRequest, QTensor, ZeroPoint
from qcore.plugin_api import Packed, RowsKernel, check_weight, runs_now
from qcore_triton.weights import bias_of, check_devices

from .ops import define, device_guard, needs_guard
from .products.dense import product_of
from .runtime.launch import launch

_ROWS, _BYTES = 8, 512
"""Rows of the weight that a program decodes, and bytes of each of them."""


class AnyGroupLinear(RowsKernel):
    """``y = x @ W^T + bias``, accumulated in float32, rounded once to ``out_dtype``.

    Packed: ``data`` uint8 ``(N, ceil(K / 2))`` or ``(N, K)``; ``scale`` ``(N, G)``; ``zero`` int8, or of the scale's
    dtype, ``(N, G)``; ``table``: float32 numbers of all codes, if they are no integers.
    """

    def __init__(self, request: LinearRequest) -> None:
        self.format, self.n, self.k = request.weight, request.n, request.k
        self.out_dtype = request.out_dtype
        element = self.format.element
        self.name = f"cuda.w{element.bits if element.is_integer else element.name}a16_any"
        self.bits = element.container_bits
        self.offset = 8 if element.is_integer and self.bits == 4 else 0
        self.zero = {ZeroPoint.NONE: 0, ZeroPoint.INT: 1}.get(self.format.zero, 2)

    @property
    def packing(self) -> str:
        return f"cuda.any{self.bits}"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        codes = weight.codes()
        if self.bits == 4:
            low = F.pad((codes.view(torch.uint8) + self.offset) & 15, (0, self.k % 2))
            data = low[:, ::2] | (low[:, 1::2] << 4)
        else:
            data = codes.view(torch.uint8)
        packed = {"data": data.contiguous(), "scale": weight.scale.t().contiguous()}
        zero = weight.integer_zero() if self.zero == 1 else weight.zero
        if zero is not None:
            packed["zero"] = (zero.to(torch.int8) if self.zero == 1 else zero).t().contiguous()
        values = self.format.element.values
        if values is not None:
            packed["table"] = torch.tensor(values, dtype=torch.float32, device=codes.device)
        return packed

    def unpack(self, packed: Packed) -> QTensor:
        data, zero = packed["data"], packed.get("zero")
        if self.bits == 4:
            data = torch.stack((data & 15, data >> 4), -1).flatten(1)[:, : self.k] - self.offset
        codes = data.contiguous().view(self.format.element.code_dtype)
        scale = packed["scale"].t().contiguous()
        return QTensor.from_codes(codes, scale, None if zero is None else zero.t().contiguous(), self.format)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        del given  # float activations have no parameters
        call = product if runs_now(x) else _op
        parts = packed["data"], packed["scale"], packed.get("zero"), packed.get("table"), bias
        return call(x, *parts, self.n, self.k, self.format.group(self.k), self.bits, self.offset, self.out_dtype)


def product(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, table: Tensor | None, bias: Tensor | None,
    n: int, k: int, group: int, bits: int, offset: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """X ``(M, K)`` of any strides, M at least 1, to ``(M, N)``; the weight as in `AnyGroupLinear`."""
    check_devices(x, data, {"bias": bias})
    if needs_guard(x):
        with device_guard(x):
            return product(x, data, scale, zero, table, bias, n, k, group, bits, offset, out_dtype)
    from .kernels.any_group import numbers

    bias = bias_of(bias, n)
    whole = data.view(torch.int8) if bits == 8 and table is None else data
    parts = whole, scale, scale if zero is None else zero, scale if table is None else table
    groups, each = scale.shape[1], 1 << (-(-group * bits // 8) - 1).bit_length()
    count = max(1, _BYTES // each)
    w = torch.empty((n, k), dtype=x.dtype, device=x.device)
    launch(
        numbers, (-(-n // _ROWS), -(-groups // count)), *parts, w, n, k, groups, data.shape[1],
        GROUP=group, BITS=bits, TABLE=table is not None, OFFSET=offset,
        ZERO=0 if zero is None else 2 if zero.is_floating_point() else 1,
        BN=_ROWS, NG=count, GB=each, num_warps=4,
    )  # fmt: skip
    return product_of(x, w, bias, out_dtype)


def _fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, table: Tensor | None, bias: Tensor | None,
    n: int, k: int, group: int, bits: int, offset: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    del data, scale, zero, table, bias, k, group, bits, offset
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


_op = define(
    "linear_any(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? table, Tensor? bias, int n, int k, "
    "int group, int bits, int offset, ScalarType out_dtype) -> Tensor",
    product,
    _fake,
)
