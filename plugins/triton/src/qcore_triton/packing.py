"""How weights are packed: one layout per element type, shared by GEMV, GEMM, row gathers and convolutions.

`scale` and `zero` stay as they are in a PLAIN `qcore.QTensor`, ``(G, N)``. N is rounded up to 16.

**planar16** (int4): uint8 ``(N/16, K/P, 16, P/2)``, K rounded up to P. Byte i of a block of row n holds unsigned codes
``u = q + 8``: column i' of the block in the low nibble, column P/2 + i' in the high one, where, with V = P/32,
``i = 4 V t + 4 j + 2 h + e`` holds ``i' = 16 j + 8 h + 2 t + e`` (t < 4, j < V, h < 2, e < 2). This is the order in
which thread t of four holds a row of A in the registers of ``mma.m16n8k16`` and ``wgmma``: one wide load gives a thread
its fragments of V products, and unpacking them moves no data between threads. 16 rows of a block are contiguous. P is
the largest of 128, 64 and 32 that divides the group size: a block lies in one group, block b in ``b * P // group``.

**rows16** (int8): int8 ``(N, K)``, K rounded up to 64; to 32 if there are several groups and their size is not
a multiple of 64. So here, too, no block of 64 or 32 columns lies in a group that does not exist.

Padding is the code 0. Everything here uses torch ops and runs on any device, including meta.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Format, Kernel, QTensor, ZeroPoint
from qcore.plugin_api import Packed, check_weight

ROWS = 16
"""Rows are packed this many at a time."""
_BLOCKS = (128, 64, 32)
_CHUNK = 1 << 25
"""Codes packed at a time: a large weight is never in memory as a whole in unpacked form."""


def block_size(group_size: int | None) -> int:
    """P, the columns per block, for codes in groups of ``group_size`` (None: per channel); 0 if there is none."""
    return _BLOCKS[0] if group_size is None else next((p for p in _BLOCKS if group_size % p == 0), 0)


def why_not_group(format: Format) -> str:
    """Why a format's group size cannot be packed; empty if it can."""
    if block_size(format.group_size):
        return ""
    return (
        f"group size {format.group_size} is not a multiple of 32, which blocks of the packed weight need; "
        f"use 32, 64 or 128. Torch ops run this layer."
    )


def packing_name(format: Format, *, sums: bool = False) -> str:
    """The value of `qcore.Kernel.packing` for a weight packed here."""
    return ("triton.planar16" if format.dtype == "int4" else "triton.rows16") + ("+sums" if sums else "")


def pack(weight: QTensor, *, sums: bool = False) -> dict[str, Tensor]:
    """``data``, ``scale`` and, if the weight has one, ``zero``.

    ``sums``: also int32 ``(G, N)``, the sum over each group of ``q - zero`` (of q if the zero point is not an
    integer), which corrects for a zero point of activations.
    """
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    packed = {"data": _pack_data(weight), "scale": weight.scale.contiguous()}
    if zero is not None:
        packed["zero"] = zero.contiguous()
    if sums:
        packed["sums"] = group_sums(weight)
    return packed


def unpack(packed: Packed, format: Format, n: int, k: int) -> QTensor:
    """The inverse of `pack`, bit for bit: a weight of shape ``(n, k)`` in ``format``."""
    decode, rows = (_planar_codes, ROWS) if format.dtype == "int4" else (_row_codes, 1)
    step = _rows_per_chunk(k)
    chunks = enumerate(torch.split(packed["data"], step // rows))
    parts = [format.codec.encode(decode(chunk, k)[: n - i * step]) for i, chunk in chunks]
    zero = packed.get("zero")
    if zero is not None and format.zero is ZeroPoint.INT:
        zero = format.codec.encode_zero(zero)
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    return QTensor(data, packed["scale"], zero, (n, k), format)


def group_sums(weight: QTensor) -> Tensor:
    """int32 ``(G, N)``: the sum over each group of K of the codes minus their integer zero point."""
    k = weight.shape[1]
    groups, group = weight.format.groups(k), weight.format.group(k)
    parts = [
        pad(codes, (0, groups * group - k)).view(-1, groups, group).sum(-1, dtype=torch.int32)
        for codes in _chunks_of_codes(weight)
    ]
    sums = torch.cat(parts).t().contiguous()
    zero = weight.integer_zero()
    if zero is None:
        return sums
    lengths = torch.full((groups, 1), group, dtype=torch.int32, device=sums.device)
    lengths[-1] = k - (groups - 1) * group
    return sums - zero * lengths


def _rows_per_chunk(k: int) -> int:
    return max(1, _CHUNK // max(1, k) // ROWS) * ROWS


def _chunks_of_codes(weight: QTensor) -> Iterator[Tensor]:
    """Signed codes, int8 ``(rows, K)``, in chunks of a multiple of 16 rows, except for the last."""
    for part in torch.split(weight.data, _rows_per_chunk(weight.shape[1])):
        yield weight.format.codec.decode(part, weight.shape[1])


def _row_multiple(format: Format, k: int) -> int:
    """The multiple that K of rows16 is rounded up to."""
    return 64 if format.groups(k) == 1 or format.group(k) % 64 == 0 else 32


def _pack_data(weight: QTensor) -> Tensor:
    if weight.format.dtype == "int4":
        block = block_size(weight.format.group_size)
        parts = [_planar(codes, block) for codes in _chunks_of_codes(weight)]
    else:
        columns = _row_multiple(weight.format, weight.shape[1])
        parts = [_rows(codes, columns) for codes in _chunks_of_codes(weight)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _planar(codes: Tensor, block: int) -> Tensor:
    """Codes ``(rows, K)`` to ``(rows/16, K/P, 16, P/2)``, P = ``block``."""
    filled = pad(codes + 8, (0, -codes.shape[1] % block, 0, -codes.shape[0] % ROWS), value=8).view(torch.uint8)
    halves = filled.view(filled.shape[0] // ROWS, ROWS, filled.shape[1] // block, 2, block // 2)
    stored = halves[..., 0, :] | (halves[..., 1, :] << 4)
    fragments = stored.view(*stored.shape[:3], block // 32, 2, 4, 2).movedim(-2, -4)
    return fragments.reshape(stored.shape).transpose(1, 2).contiguous()


def _planar_codes(data: Tensor, k: int) -> Tensor:
    """The inverse of `_planar`, including padding rows."""
    stored = data.view(*data.shape[:3], 4, data.shape[3] // 16, 2, 2).movedim(-4, -2).reshape(data.shape)
    nibbles = torch.stack((stored & 15, stored >> 4), dim=3).transpose(1, 2)
    return nibbles.reshape(data.shape[0] * ROWS, -1)[:, :k].view(torch.int8) - 8


def _rows(codes: Tensor, columns: int) -> Tensor:
    """Codes ``(rows, K)``, rows rounded up to 16 and K to ``columns``."""
    return pad(codes, (0, -codes.shape[1] % columns, 0, -codes.shape[0] % ROWS)).contiguous()


def _row_codes(data: Tensor, k: int) -> Tensor:
    return data[:, :k]


class PackedKernel(Kernel):
    """A kernel on weights packed as above: made for one `Format` and shape ``(n, k)``, ``sums`` if it needs them."""

    def __init__(self, name: str, format: Format, n: int, k: int, *, sums: bool = False) -> None:
        self.name, self.format, self.n, self.k, self.sums = name, format, n, k, sums
        self.bits, self.group = format.bits, format.group_size or k
        self.sizes = (n, k, self.bits, self.group)

    @property
    def packing(self) -> str:
        return packing_name(self.format, sums=self.sums)

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        return pack(weight, sums=self.sums)

    def unpack(self, packed: Packed) -> QTensor:
        return unpack(packed, self.format, self.n, self.k)
