"""Kernels of the contract ``linear`` on torch's own ops for XPU: ``xpu.w4a16``, ``xpu.w8a16``, ``xpu.w8a8``.

`triton_linear` has kernels for the other layers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import DynamicInt8, LinearRequest, QTensor, ZeroPoint
from qcore.plugin_api import Packed, RowsKernel, check_weight, given_numbers, runs_now
from qcore_triton.codes import columns_of_codes

from . import aten, int32, products
from .int32 import own


class AtenLinear(RowsKernel):
    """The base of these kernels: made for one `Format`, one shape ``(n, k)`` and one dtype of x."""

    note: str
    """A sentence for the decision table."""
    op: ClassVar[str]
    """The name of torch's op, see `aten.missing`."""

    def __init__(self, name: str, request: LinearRequest) -> None:
        self.name = name
        self.format, self.n, self.k = request.weight, request.n, request.k
        self.x_dtype, self.out_dtype = request.x_dtype, request.out_dtype

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        return self.packed(weight)

    @abstractmethod
    def packed(self, weight: QTensor) -> dict[str, Tensor]:
        """The tensors that `pack` returns."""


class Int4Linear(AtenLinear):
    """int4 weights, any group size and zero point, bfloat16 or float16 x; see `int32` for the packed weight."""

    op = aten.INT4

    def __init__(self, request: LinearRequest) -> None:
        super().__init__("xpu.w4a16", request)
        self.bias = request.bias
        self.form = int32.Form.of(self.format, self.k, bias=self.bias)
        self.note = "oneDNN's int4 product" + self._padding()
        self._columns = [*self.form]

    def _padding(self) -> str:
        f, parts = self.form, []
        if f.columns != self.k:
            parts.append(f"groups of {f.group} padded to {f.wide} columns" if f.spreads else f"K padded to {f.columns}")
        if f.biased:
            parts.append(f"{f.step} columns for the bias")
        more = f.all_columns / self.k - 1
        size = f"{more:.0%}" if more >= 0.01 else "under 1%"
        return f"; {', '.join(parts)}: {size} more weight to read" if parts else ""

    @property
    def packing(self) -> str:
        # The op reads scales in x's dtype, and the bias as a separate group.
        return f"{self.name}.{str(self.x_dtype).removeprefix('torch.')}{'.bias' if self.bias else ''}"

    def packed(self, weight: QTensor) -> dict[str, Tensor]:
        return int32.pack(weight, self.x_dtype, bias=self.bias)

    def unpack(self, packed: Packed) -> QTensor:
        return int32.unpack(packed, self.format, self.n, self.k, bias=self.bias)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        del given  # float activations have no parameters
        call = products.linear_w4a16 if runs_now(x) else products.op_linear_w4a16
        factor = packed["factor"] if "factor" in packed else packed["scale"]
        return call(
            x, packed["data"], factor, packed["zeros"], packed.get("after"), packed.get("levels"),
            packed.get("rest"), packed.get("tail"), bias, self._columns,
        )  # fmt: skip


class Int8WeightLinear(AtenLinear):
    """Symmetric int8 weights, one scale per channel, bfloat16 or float16 x.

    Packed: ``data`` int8 ``(N, K)`` and ``scale`` ``(1, N)`` as in the weight, ``factor`` float32 ``(N,)`` if scales
    have another dtype; ``wide``, an empty tensor, if the weight does not fit float16: see `products.linear_w8a16`.
    """

    note = "oneDNN's int8 product"
    op = aten.INT8

    def __init__(self, request: LinearRequest) -> None:
        super().__init__("xpu.w8a16", request)

    @property
    def packing(self) -> str:
        return self.name + (".float16" if self.x_dtype == torch.float16 else "")

    def packed(self, weight: QTensor) -> dict[str, Tensor]:
        packed = {"data": own(weight.data), **_scales(weight)}
        if self.x_dtype == torch.float16 and int32.uncomfortable(weight.scale, _LARGEST_SCALE):
            packed["wide"] = weight.scale.new_empty(0)
        return packed

    def unpack(self, packed: Packed) -> QTensor:
        return QTensor(packed["data"], packed["scale"], None, (self.n, self.k), self.format)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        del given
        call = products.linear_w8a16 if runs_now(x) else products.op_linear_w8a16
        return call(x, packed["data"], _factor(packed), bias, "wide" in packed)


_LARGEST_SCALE = 2.0**8
"""Times 128 it is the largest power of two in float16."""


def _scales(weight: QTensor) -> dict[str, Tensor]:
    """Scales per channel, and in float32 if they are not: torch would convert them at every call."""
    packed = {"scale": own(weight.scale)}
    return packed if weight.scale.dtype == torch.float32 else {**packed, "factor": weight.scale[0].float()}


def _factor(packed: Packed) -> Tensor:
    """Scales per channel, float32 ``(N,)``."""
    return packed["factor"] if "factor" in packed else packed["scale"].view(-1)


class Int8Linear(AtenLinear):
    """int8 weights per channel and int8 activations, dynamic or given: exact int32 sums, the rest in float32.

    Packed: ``data`` int8 ``(KQ, N)``, KQ = K rounded up to 128, 0 beyond K, as in codes of x; ``scale``, ``zero``
    ``(1, N)`` as in the weight; ``factor`` float32 ``(N,)`` if scales have another dtype; ``sums`` int32
    ``(parts, N)``: see `products.linear_w8a8`.
    """

    note = "oneDNN's int8 product of codes"
    op = aten.INT

    def __init__(self, request: LinearRequest) -> None:
        super().__init__("xpu.w8a8", request)
        activation = request.activation
        symmetric = isinstance(activation, DynamicInt8) and activation.symmetric
        self._constants = (
            self.k, symmetric, *given_numbers(activation), *given_numbers(request.output), request.out_dtype,
        )  # fmt: skip

    def packed(self, weight: QTensor) -> dict[str, Tensor]:
        codes, zero = weight.codes(), weight.integer_zero()
        packed = {
            "data": pad(codes, (0, columns_of_codes(self.k) - self.k)).t().contiguous(),
            **_scales(weight),
            "sums": self._sums(codes, zero),
        }
        if zero is None:
            zero = weight.zero
        return packed if zero is None else {**packed, "zero": own(zero)}

    def _sums(self, codes: Tensor, zero: Tensor | None) -> Tensor:
        """Sums of codes minus their zero point over each `products.EXACT_K` columns, int32 ``(parts, N)``."""
        found = []
        for part in torch.split(codes, products.EXACT_K, dim=1):
            total = part.sum(-1, dtype=torch.int32)
            found.append(total if zero is None else total - zero[0].to(torch.int32) * part.shape[1])
        return torch.stack(found)

    def unpack(self, packed: Packed) -> QTensor:
        data, zero = self.format.codec.encode(packed["data"][: self.k].t()), packed.get("zero")
        if zero is not None and self.format.zero is ZeroPoint.INT:
            zero = self.format.codec.encode_zero(zero)
        return QTensor(data, packed["scale"], zero, (self.n, self.k), self.format)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        call = products.linear_w8a8 if runs_now(x) else products.op_linear_w8a8
        zero = packed.get("zero")
        return call(
            x, packed["data"], _factor(packed), None if zero is None else zero[0], packed["sums"], bias,
            given.get("x_scale"), given.get("x_zero_point"), given.get("out_scale"), given.get("out_zero_point"),
            *self._constants,
        )  # fmt: skip


_NARROW = (torch.bfloat16, torch.float16)


def has_op(request: LinearRequest) -> bool:
    """Whether torch defines an op that computes a request of this form; `why_not` tells whether it can be used here."""
    return _kind(request) is not None


def why_not(request: LinearRequest) -> str:
    """Why a request that `eligibility` accepts has no kernel here; empty if it has one."""
    kind = _kind(request)
    if kind is None:
        return "torch has no op for XPU that computes this product."
    return aten.missing(kind.op) or _why_not_padded(request)


def kernel(request: LinearRequest) -> AtenLinear:
    """The kernel for a request that `why_not` accepts."""
    kind = _kind(request)
    assert kind is not None, why_not(request)
    return kind(request)


_MOST_PADDING = 4
"""A weight that padding makes larger than this many times its size is no smaller than a dense one."""


def _why_not_padded(request: LinearRequest) -> str:
    form = int32.Form.of(request.weight, request.k)
    if request.weight.dtype != "int4" or not form.spreads or form.wide <= _MOST_PADDING * form.group:
        return ""
    return (
        f"oneDNN's int4 product needs groups of a multiple of {aten.GROUP} columns: padded to that, groups of "
        f"{form.group} make the weight {form.wide / form.group:.3g} times as large. Use groups of 32, 64 or 128."
    )


def _kind(request: LinearRequest) -> type[Int4Linear | Int8WeightLinear | Int8Linear] | None:
    """The class of the kernel for a request's formats and dtypes; None if torch has no op for them."""
    fmt, per_channel = request.weight, request.weight.groups(request.k) == 1
    if request.activation is not None:
        return Int8Linear if fmt.dtype == "int8" and per_channel else None
    # The ops round their sums to x's dtype: another result dtype would be rounded twice, the first time too coarsely.
    if request.x_dtype not in _NARROW or request.out_dtype != request.x_dtype:
        return None
    if fmt.dtype == "int4":
        return Int4Linear
    return Int8WeightLinear if per_channel and fmt.zero is ZeroPoint.NONE else None
