"""Decode a neutral weight a few output rows at a time, so that the whole dense weight is never in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..discovery.kernels import Kernel, Packed, check_weight
from ..formats import PLAIN, PLAIN_INT32, Format, ZeroPoint, effective_scale
from ..formats.bits import unpack_nibbles
from ..weights.qtensor import QTensor
from .decoding import fp8_values, has_fast_values, pair_values

_CPU_CHUNK = 1 << 20
"""Elements of a chunk on a CPU: 4 MiB of float32, so that all passes over it stay in the cache."""
_LARGE_CHUNK = 1 << 24
"""Elements of a chunk on other devices and in traces: 64 MiB of float32, for small graphs and few launches."""
_MIN_ROWS = 64
"""With fewer output rows, a matrix product runs at a fraction of its speed."""


_NIBBLE = 4


class WeightReader:
    """Decodes rows of a neutral weight of ``format`` and width ``k``, in an order of columns that is cheap to decode.

    Two 4-bit codes share a byte. Storing them next to each other costs a slow interleaving store per weight, so such a
    weight is read as all even columns of a group, then all odd ones; `reorder` puts x in the same order.
    """

    def __init__(self, format: Format, k: int) -> None:
        self.format, self.k = format, k
        self.groups, self.group = format.groups(k), format.group(k) if k else 0
        self.padding = self.groups * self.group - k
        self.element = format.element
        self.fp8 = has_fast_values(self.element)
        nibbles = self.element.container_bits == _NIBBLE
        unit = {PLAIN: 2, PLAIN_INT32: 8}.get(format.layout, 0) if nibbles else 0
        # Both codes of a byte of a table are looked up together; under a trace a compiler fuses single lookups.
        self.pairs = nibbles and format.layout == PLAIN and not self.element.is_integer and k > 0 and k % 2 == 0
        unit = 0 if self.pairs else unit
        self.halves = unit > 0 and k > 0 and k % unit == 0 and self.group % 2 == 0 and not self.padding

    def reorder(self, x: Tensor) -> Tensor:
        """Permute x ``(..., K)`` to the column order of `codes`."""
        if not self.halves:
            return x
        split = x.reshape(*x.shape[:-1], self.groups, self.group // 2, 2)
        return split.transpose(-1, -2).reshape(x.shape)

    def restore_order(self, weight: Tensor) -> Tensor:
        """Invert `reorder`: return the dense weight ``(rows, K)`` with its columns in natural order."""
        if not self.halves:
            return weight
        return weight.view(-1, self.groups, 2, self.group // 2).transpose(-1, -2).reshape(weight.shape)

    def codes(self, data: Tensor) -> Tensor:
        """The codes of some rows, ``(rows, G, g)``: int8 for integer elements, uint8 for tables.

        A ragged last group is padded with code 0, whose value need not be 0, because x is 0 there.
        """
        n = data.shape[0]
        if self.halves:
            offset_binary = self.format.layout is PLAIN_INT32
            data = data.contiguous().view(torch.uint8) ^ 0x88 if offset_binary else data
            halves = [part.view(n, self.groups, self.group // 2) for part in unpack_nibbles(data)]
            return torch.stack(halves, dim=2).view(n, self.groups, self.group)
        codes = self.format.codec.decode(data, self.k)
        if self.padding:
            codes = torch.nn.functional.pad(codes, (0, self.padding))
        return codes.reshape(n, self.groups, self.group)

    def centred(self, data: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Values of codes minus their integer zero points, ``(rows, G, g)``.

        For integer elements they are integers up to 255, exact in any float dtype. The padding of a ragged group is
        minus the zero point.
        """
        values = self._values(data, dtype)
        if zero is not None and self.format.zero is ZeroPoint.INT:
            values = values - self.format.codec.decode_zero(zero).t().to(dtype).unsqueeze(-1)
        return values

    def _values(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of codes, ``(rows, G, g)``."""
        if torch.compiler.is_compiling() or data.device.type == "meta" or not data.numel():
            return self.element.decode(self.codes(data), dtype)
        if self.pairs:
            values = pair_values(data, self.element).to(dtype)
            values = torch.nn.functional.pad(values, (0, self.padding)) if self.padding else values
            return values.view(data.shape[0], self.groups, self.group)
        codes = self.codes(data)
        return fp8_values(codes, self.element).to(dtype) if self.fp8 else self.element.decode(codes, dtype)

    def scales(self, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The numbers that stored scales ``(G, rows)`` represent; see `effective_scale`."""
        return effective_scale(self.format.scale, scale, global_scale, dtype)

    def dense(
        self,
        data: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        dtype: torch.dtype,
        global_scale: Tensor | None = None,
    ) -> Tensor:
        """The weight ``(rows, K)``, computed in float32 (float64) and rounded once to ``dtype``."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        factors = self.scales(scale, global_scale, compute)
        weight = self.centred(data, zero, compute) * factors.t().unsqueeze(-1)
        if zero is not None and self.format.zero is ZeroPoint.FLOAT:
            weight = weight + zero.t().to(compute).unsqueeze(-1)
        return weight.to(dtype).reshape(data.shape[0], self.groups * self.group)[:, : self.k]

    def chunk_rows(self, data: Tensor, max_elements: int | None = None) -> int:
        """Return the number of output rows per chunk."""
        elements = chunk_elements(data) if max_elements is None else min(max_elements, chunk_elements(data))
        return max(_MIN_ROWS, elements // max(1, self.k))

    def chunks(self, packed: Packed, max_elements: int | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield (data, scale, zero) of consecutive rows, at most about ``max_elements`` weights each."""
        data, scale, zero = packed["data"], packed["scale"], packed.get("zero")
        step = self.chunk_rows(data, max_elements)
        for start in range(0, max(1, data.shape[0]), step):
            rows = slice(start, start + step)
            yield data[rows], scale[:, rows], None if zero is None else zero[:, rows]


def chunk_elements(data: Tensor) -> int:
    """The elements of a chunk of float32 on the device of ``data``."""
    return _CPU_CHUNK if data.device.type == "cpu" and not torch.compiler.is_compiling() else _LARGE_CHUNK


class NeutralKernel(Kernel):
    """A kernel that reads the neutral tensors directly: packing copies nothing, so tied weights share storage."""

    def __init__(self, name: str, format: Format, n: int, k: int) -> None:
        self.name, self.format, self.n, self.k = name, format, n, k
        self.reader = WeightReader(format, k)

    @property
    def packing(self) -> str:
        return "torch.plain"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        check_weight(self.name, weight, self.format, self.n, self.k)
        return weight.tensors()

    def unpack(self, packed: Packed) -> QTensor:
        return QTensor.from_tensors(packed, (self.n, self.k), self.format)


def autocast_device(device: torch.device) -> str:
    """Return the device type for autocast queries, or an empty string if it has no autocast (meta).

    Autocast would narrow the products, so kernels disable it. Called when a kernel is constructed: dynamo of torch 2.11
    cannot trace this query.
    """
    return device.type if torch.amp.is_autocast_available(device.type) else ""
