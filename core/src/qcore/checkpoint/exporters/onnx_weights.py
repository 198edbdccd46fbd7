"""Quantized weights as operators of ONNX: the modules that replace them while a model is traced.

Codes, zero points and scales keep their values, scales in float32. The first of three forms that supports the weight is
used:

- `BlockWeight`: ``com.microsoft`` MatMulNBits and GatherBlockQuantized of onnxruntime, for codes of 4 or 8 bits in
  groups of a multiple of 16 or per channel.
- `Bnb4Weight`: ``com.microsoft`` MatMulBnb4, for nf4 and fp4_bnb.
- `DequantizedWeight`: DequantizeLinear of ONNX (opset 21) before a float product, for integers and fp8 in any group;
  other tables by a Gather of their values.

Float zero points are multiplied by the sum of x over each group and added to the results: DequantizeLinear has none,
and those of MatMulNBits would be rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from ...formats import PLAIN, ZeroPoint
from ...formats.elements import FP4, FP4_BNB, FP8, FP8_E5M2, NF4
from ...weights.qtensor import QTensor

MICROSOFT = "com.microsoft"
_SMALLEST_BLOCK, _LARGEST_BLOCK, _LARGEST_BNB4_BLOCK = 16, 128, 256
_BNB4 = {FP4_BNB: 0, NF4: 1}
"""``quant_type`` of MatMulBnb4."""
UNSIGNED = 128
"""The zero point of uint8 codes that stand for int8 ones, in products of integers.

On AVX2 without VNNI onnxruntime multiplies uint8 by int8 in saturating 16-bit sums, which made results wrong by a
fifth, and int8 by int8 more than ten times as slowly as uint8 by uint8 at one row, which is exact.
"""
_FLOAT8 = {FP8: torch.float8_e4m3fn, FP8_E5M2: torch.float8_e5m2}


def symbolic(
    op: str, inputs: list[Tensor], shape: Sequence[int], dtype: torch.dtype = torch.float32, **attributes: Any
) -> Tensor:
    """A node of ONNX whose only result has this shape and dtype. Under a trace nothing is computed."""
    return torch.onnx.ops.symbolic(op, inputs, attributes, dtype=dtype, shape=list(shape))


def unsigned(codes: Tensor, zero: int = UNSIGNED) -> Tensor:
    """uint8 codes with the zero point ``zero`` for signed ones."""
    return (codes.to(torch.int16) + zero).to(torch.uint8).contiguous()


class ONNXWeight(nn.Module):
    """A weight ``(N, K)`` whose products and rows the graph computes."""

    added: Tensor | None
    order: Tensor | None
    inverse: Tensor | None

    def __init__(self, weight: QTensor) -> None:
        super().__init__()
        self.n, self.k = weight.shape
        self.group = min(weight.format.group(self.k), self.k)
        added = weight.zero if weight.format.zero is ZeroPoint.FLOAT else None
        self.register_buffer("added", None if added is None else added.float().contiguous())  # (G, N)
        order = None if weight.order is None else weight.order.long()
        self.register_buffer("order", order)
        self.register_buffer("inverse", None if order is None else torch.argsort(order))

    @property
    def int4_initializers(self) -> Mapping[str, tuple[int, ...]]:
        """Buffers that begin with int4 codes, two per byte, and their shapes in the graph."""
        return {}

    def matmul(self, x: Tensor) -> Tensor:
        """``x @ w.T`` for x float32 ``(..., K)``."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        y = self._product(x)
        if self.added is None:
            return y
        groups = self.added.shape[0]
        padded = pad(x, (0, groups * self.group - self.k)) if groups * self.group != self.k else x
        return y + padded.reshape(*x.shape[:-1], groups, self.group).sum(-1) @ self.added

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, float32 ``(..., K)``, for int64 indices."""
        y = self._rows(indices)
        if self.added is not None:
            y = y + embedding(indices, self.added.t()).repeat_interleave(self.group, dim=-1)[..., : self.k]
        return y if self.inverse is None else y.index_select(-1, self.inverse)

    def dense(self) -> Tensor:
        """The weight itself, float32 ``(N, K)``, computed by the graph."""
        y = self._dense()
        if self.added is not None:
            y = y + self.added.t().repeat_interleave(self.group, dim=1)[:, : self.k]
        return y if self.inverse is None else y.index_select(1, self.inverse)

    def _product(self, x: Tensor) -> Tensor:
        return x @ self._dense().t()

    def _rows(self, indices: Tensor) -> Tensor:
        return embedding(indices, self._dense())

    def _dense(self) -> Tensor:
        raise NotImplementedError


class BlockWeight(ONNXWeight):
    """``codes`` uint8 ``(N, B, block * bits / 8)``, offset binary, the even column low; scales ``(N * B,)``."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, weight: QTensor, block: int) -> None:
        super().__init__(weight)
        self.bits, self.block = weight.format.element.container_bits, block
        half = 1 << (self.bits - 1)
        blocks = -(-self.k // block)
        codes = unsigned(weight.codes(), half)
        codes = pad(codes, (0, blocks * block - self.k), value=half)
        self.register_buffer("codes", _packed(codes, self.bits).view(self.n, blocks, -1))
        repeats = -(-self.group // block)  # blocks per group
        self.register_buffer("scales", _per_block(weight.scales(), repeats, blocks).reshape(-1))
        zero = weight.integer_zero()
        if zero is not None:
            zero = _per_block(unsigned(zero, half), repeats, blocks)
            zero = _packed(pad(zero, (0, blocks % 2), value=half) if self.bits == 4 else zero, self.bits)
        self.register_buffer("zeros", zero)

    @staticmethod
    def block_of(weight: QTensor) -> int:
        """The block size for a weight; 0 if it has none."""
        element, k = weight.format.element, weight.shape[-1]
        if not element.is_integer:
            return 0
        group = weight.format.group(k)
        if group >= k:  # per channel: every block has the same scale
            return _LARGEST_BLOCK if k > _SMALLEST_BLOCK else _SMALLEST_BLOCK
        block = group & -group  # the largest power of two that divides it
        return min(block, _LARGEST_BLOCK) if block >= _SMALLEST_BLOCK else 0

    def _product(self, x: Tensor) -> Tensor:
        inputs = [x, self.codes, self.scales, *([] if self.zeros is None else [self.zeros])]
        return symbolic(
            f"{MICROSOFT}::MatMulNBits", inputs, (*x.shape[:-1], self.n),
            K=self.k, N=self.n, bits=self.bits, block_size=self.block,
        )  # fmt: skip

    def _rows(self, indices: Tensor) -> Tensor:
        blocks = self.codes.shape[1]
        inputs = [self.codes.flatten(1), indices, self.scales.view(self.n, blocks)]
        inputs += [] if self.zeros is None else [self.zeros]
        found = symbolic(
            f"{MICROSOFT}::GatherBlockQuantized", inputs, (*indices.shape, blocks * self.block),
            bits=self.bits, block_size=self.block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        return found[..., : self.k]


class Bnb4Weight(ONNXWeight):
    """``codes`` uint8 ``(N * K / 2,)``, the even column high; scales ``(N * K / block,)``."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: QTensor, block: int) -> None:
        super().__init__(weight)
        codes = weight.codes().reshape(-1)
        self.kind, self.block = _BNB4[weight.format.element], block
        self.register_buffer("codes", codes[0::2] << 4 | codes[1::2])
        self.register_buffer("scales", _per_block(weight.scales(), self.group // block, self.k // block).reshape(-1))

    @staticmethod
    def block_of(weight: QTensor) -> int:
        """The block size for a weight; 0 if the operator cannot read it: its blocks must fill rows and groups."""
        k = weight.shape[-1]
        whole = math.gcd(k, weight.format.group(k))
        block = min(whole & -whole, _LARGEST_BNB4_BLOCK)
        return block if weight.format.element in _BNB4 and block >= _SMALLEST_BLOCK else 0

    def _product(self, x: Tensor) -> Tensor:
        return symbolic(
            f"{MICROSOFT}::MatMulBnb4", [x, self.codes, self.scales], (*x.shape[:-1], self.n),
            K=self.k, N=self.n, block_size=self.block, quant_type=self.kind,
        )  # fmt: skip


class DequantizedWeight(ONNXWeight):
    """``codes`` int4 (`_flat_int4`, becomes an int4 initializer), int8 or float8 ``(N, K)``; scales ``(N, G)``.

    fp4 is stored as int8 codes of twice its values, which are integers, with half its scales. Codes of other tables are
    uint8 indices into ``table``. ``unsigned_codes``: int8 codes become uint8 with zero points; see `UNSIGNED`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    table: Tensor | None

    def __init__(self, weight: QTensor, *, unsigned_codes: bool = False) -> None:
        super().__init__(weight)
        element, codes, scales = weight.format.element, weight.codes(), weight.scales()
        zero = weight.integer_zero()
        self.int4 = element.is_integer and element.container_bits == 4
        table = None
        self.groups = scales.shape[0]
        if self.int4:
            codes, zero = _flat_int4(codes), None if zero is None else _flat_int4(self._like_scales(zero))
        elif element in _FLOAT8:
            codes = codes.view(_FLOAT8[element])
        elif element == FP4:
            codes, scales = (element.decode(codes) * 2).to(torch.int8), scales / 2
        elif not element.is_integer:
            table = element.lookup(torch.device("cpu"), torch.float32).clone()
        elif unsigned_codes:
            codes, zero = unsigned(codes), unsigned(scales.new_zeros(scales.shape) if zero is None else zero)
        if zero is not None and not self.int4:
            zero = zero.t().contiguous()
        for name, tensor in {"codes": codes, "scales": scales.t().contiguous(), "zeros": zero, "table": table}.items():
            self.register_buffer(name, tensor)

    @property
    def int4_initializers(self) -> Mapping[str, tuple[int, ...]]:
        if not self.int4:
            return {}
        zeros = self._like_scales(self.scales.t()).shape
        return {"codes": (self.n, self.k), **({} if self.zeros is None else {"zeros": tuple(zeros)})}

    def _like_scales(self, values: Tensor) -> Tensor:
        """``(G, N)`` in the shape that DequantizeLinear takes: ``(N, G)``, or ``(N,)`` per channel."""
        return values.view(-1) if self.groups == 1 else values.t()

    def _dense(self) -> Tensor:
        if self.table is not None:
            return self._scaled(self.table, self.codes, self.scales)
        zeros = [] if self.zeros is None else [self.zeros]
        if self.groups == 1:  # per channel
            inputs = [self.codes, self.scales.view(-1), *(zero if self.int4 else zero.view(-1) for zero in zeros)]
            return symbolic("DequantizeLinear", inputs, (self.n, self.k), axis=0)
        inputs = [self.codes, self.scales, *zeros]
        return symbolic("DequantizeLinear", inputs, (self.n, self.k), axis=1, block_size=self.group)

    def _rows(self, indices: Tensor) -> Tensor:
        if self.table is None:
            return super()._rows(indices)
        return self._scaled(self.table, embedding(indices, self.codes), embedding(indices, self.scales))

    def _scaled(self, table: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Table values times their scales, for any rows."""
        return table[codes.long()] * scales.repeat_interleave(self.group, dim=-1)[..., : self.k]


def onnx_weight(weight: QTensor, *, standard: bool, rows: bool = False, unsigned_codes: bool = False) -> ONNXWeight:
    """The form for a weight ``(N, K)``.

    ``standard``: operators of ONNX only; ``rows``: it is a table of rows; ``unsigned_codes``: see `DequantizedWeight`,
    which is then the form.
    """
    weight = weight.convert(PLAIN)
    if unsigned_codes:
        return DequantizedWeight(weight, unsigned_codes=True)
    if not standard and (block := BlockWeight.block_of(weight)):
        return BlockWeight(weight, block)
    if not standard and not rows and (block := Bnb4Weight.block_of(weight)):
        return Bnb4Weight(weight, block)
    return DequantizedWeight(weight)


def _packed(values: Tensor, bits: int) -> Tensor:
    """Unsigned codes ``(N, C)``, uint8, unchanged (8 bits) or two per byte, the even column low."""
    return values.contiguous() if bits == 8 else values[:, 0::2] | values[:, 1::2] << 4


def _flat_int4(values: Tensor) -> Tensor:
    """int8 values in row-major order as raw int4 data: two per byte, the even element low; then their shape.

    torch's exporter joins equal initializers. With the shape, those that are equal only as bytes stay apart.
    """
    flat = values.reshape(-1)
    flat = (pad(flat, (0, flat.numel() % 2)) & 15).view(torch.uint8)
    shape = torch.tensor([values.dim(), *values.shape]).view(torch.uint8)
    return torch.cat((flat[0::2] | flat[1::2] << 4, shape))


def _per_block(values: Tensor, repeats: int, blocks: int) -> Tensor:
    """``(G, N)`` to ``(N, blocks)``: each group's value for its ``repeats`` blocks."""
    return values.t().repeat_interleave(repeats, dim=1)[:, :blocks].contiguous()
