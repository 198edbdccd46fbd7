"""How weights are packed: one layout per element type, shared by GEMV, GEMM, row gathers and convolutions.

`scale` and `zero` are those of a PLAIN `qcore.QTensor`, ``(G, N)``; scales in e4m3 are the same bytes as int8, which
every device can read, and their global scale becomes a `Weight.factor`. N is rounded up to 16 everywhere: behind N,
parameters are 0.

**planar16** (int4): uint8 ``(N/16, K/P, 16, P/2)``, K rounded up to P. Byte i of a block of row n holds unsigned codes
``u = q + 8``: column i' of the block in the low nibble, column P/2 + i' in the high one, where, with V = P/32,
``i = 4 V t + 4 j + 2 h + e`` holds ``i' = 16 j + 8 h + 2 t + e`` (t < 4, j < V, h < 2, e < 2). This is the order in
which thread t of four holds a row of A in the registers of ``mma.m16n8k16`` and ``wgmma``: one wide load gives a thread
its fragments of V products, and unpacking them moves no data between threads. 16 rows of a block are contiguous. P is
the largest of 128, 64 and 32 that divides the group size: a block lies in one group, block b in ``b * P // group``.

**Tables** of four bits are stored the same way, with their own codes; codes of groups of 16 lie in blocks of 32, one
group in the low nibbles and the next one in the high ones, and there is an even number of them.

**rows16** (int8 and fp8): int8 ``(N, K)``, K rounded up to 64; to 32 if there are several groups and their size is not
a multiple of 64. So here, too, no block of 64 or 32 columns lies in a group that does not exist.

Padding is the code 0 of integers, of tables that of the value 0 or any other number. Everything here uses torch ops
and runs on any device, including meta.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Format, FormatError, Kernel, QTensor, ScaleType, ZeroPoint
from qcore.plugin_api import Packed, check_weight, has_values

from .weights import INTEGER, ROWS, TABLE, Weight, nonempty, pitch_of

_PLANAR = 4
"""Dimensions of planar16."""
_BLOCKS = (128, 64, 32)
_NIBBLE = 4
_CHUNK = 1 << 25
"""Codes packed at a time: a large weight is never in memory as a whole in unpacked form."""


HALF_BLOCK = 16
"""Columns of a group of which a block has two."""
_FLOATS = {"fp8": "e4m3", "fp8_e5m2": "e5m2", "fp4": "e2m1"}
"""Elements that are decoded by arithmetic."""
SQUARE = 128
"""Rows and columns of a block that has one scale."""
_SMALLEST, _LARGEST = 2.0**-14, 65504.0
"""The normal numbers of float16."""
_UNIT_GROUPS = (32, 64)
_SMALLEST_SCALE = 2.0**-17
"""float16 numbers are multiples of 2**-24, and bfloat16 scales from here on, too."""


def element_text(format: Format) -> str:
    """What the codes of a format decode to, as kernels are told it.

    `INTEGER`, the name of a floating-point element, or ``t`` and 16 float32 numbers in hexadecimal: everything that the
    code of a kernel depends on. Raises `FormatError` for a table of more than four bits that is no such element.
    """
    element = format.element
    if element.values is None:
        return INTEGER
    if format.dtype in _FLOATS:
        return _FLOATS[format.dtype]
    if element.bits > _NIBBLE:
        raise FormatError(f"{format.dtype} weights are a table of {len(element.values)} values, which kernels lack.")
    values = [value if math.isfinite(value) else 0.0 for value in element.values]
    if any(value and not _SMALLEST <= abs(value) <= _LARGEST for value in values):
        raise FormatError(f"{format.dtype} weights have values that float16 cannot hold.")
    return TABLE + struct.pack(">16f", *values, *[0.0] * (16 - len(values))).hex()


def block_size(group_size: int | None) -> int:
    """P, the columns per block, for codes in groups of ``group_size`` (None: per channel); 0 if there is none."""
    if group_size == HALF_BLOCK:
        return 2 * HALF_BLOCK
    return _BLOCKS[0] if group_size is None else next((p for p in _BLOCKS if group_size % p == 0), 0)


def why_not_group(format: Format) -> str:
    """Why a format's group size cannot be packed; empty if it can."""
    if format.group_size == HALF_BLOCK and _scaled_exactly(format):
        return ""
    if format.group_size != HALF_BLOCK and block_size(format.group_size):
        return ""
    return (
        f"group size {format.group_size} is not a multiple of 32, which blocks of the packed weight need; "
        f"use 32, 64 or 128. Torch ops run this layer."
    )


def _scaled_exactly(format: Format) -> bool:
    """Whether the products of codes and scales are exact in bfloat16 and float16: 2 times 4 bits of mantissa."""
    return format.dtype == "fp4" and format.scale.has_global


def packing_name(
    format: Format, *, sums: bool = False, units: bool = False, half: bool = False, blocks: bool = False
) -> str:
    """The value of `qcore.Kernel.packing` for a weight packed here."""
    name = "triton.planar16" if format.element.container_bits == _NIBBLE else "triton.rows16"
    table = not format.element.is_integer
    parts = {"table": table, "sums": sums, "units": units, "half": half, "blocks": blocks}
    return "+".join([name, *(part for part, there in parts.items() if there)])


def pack(
    weight: QTensor, *, sums: bool = False, units: bool = False, half: bool = False, blocks: bool = False
) -> dict[str, Tensor]:
    """``data``, ``scale`` and, if the weight has one, ``zero``; of a global scale ``factor`` and itself.

    Parameters have `pitch_of` N columns, those behind N are 0: so rows of them begin on 16 bytes.
    ``sums``: also int32, the sum over each group of ``q - zero`` (of q if the zero point is not an
    integer), which corrects for a zero point of activations; ``units``: also `units_of` the scales; ``half``: scales
    brought into float16 by a power of two, and ``factor``, which takes it back; empty if that is impossible;
    ``blocks``: also `blocks_of` the scales.
    """
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    kind, whole = weight.format.scale, weight.global_scale
    groups = weight.scale.shape[0]
    more = groups % 2 if weight.format.group_size == HALF_BLOCK and groups > 1 else 0
    scale = _parameters(weight.scale, more)
    packed = {"data": _pack_data(weight), "scale": scale.view(torch.int8) if kind.has_global else scale}
    if whole is not None:
        packed["global_scale"] = whole.contiguous()
        packed["factor"] = (whole if kind is ScaleType.E4M3 else 1.0 / whole).reshape(1).contiguous()
    if zero is not None:
        packed["zero"] = _parameters(zero)
    if sums:
        packed["sums"] = _parameters(group_sums(weight))
    if units:
        packed["units"] = units_of(packed["scale"])
    if blocks:
        packed["blocks"] = blocks_of(weight.scale)
    if half:
        factor = packed["factor"] = half_factor(scale)
        if factor.shape[0]:
            packed["scale"] = (scale.float() / factor).to(scale.dtype)
    return packed


def unpack(packed: Packed, format: Format, n: int, k: int) -> QTensor:
    """The inverse of `pack`, bit for bit: a weight of shape ``(n, k)`` in ``format``."""
    decode, rows = (_planar_codes, ROWS) if packed["data"].dim() == _PLANAR else (_row_codes, 1)
    step, offset = _rows_per_chunk(k), 8 if format.dtype == "int4" else 0
    chunks = enumerate(torch.split(packed["data"], step // rows))
    parts = [
        format.codec.encode((decode(chunk, k)[: n - i * step] - offset).view(format.element.code_dtype))
        for i, chunk in chunks
    ]
    zero = packed.get("zero")
    if zero is not None:
        zero = zero[:, :n].contiguous()
        zero = format.codec.encode_zero(zero) if format.zero is ZeroPoint.INT else zero
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    scale = packed["scale"][: format.groups(k), :n].contiguous()
    if format.scale.has_global:
        scale = scale.view(torch.float8_e4m3fn)
    elif (factor := nonempty(packed.get("factor"))) is not None:
        scale = (scale.float() * factor).to(scale.dtype)
    return QTensor(data, scale, zero, (n, k), format, global_scale=packed.get("global_scale"))


def _parameters(each: Tensor, more: int = 0) -> Tensor:
    """Parameters ``(G, N)`` with `pitch_of` N columns and as many ``more`` rows, 0."""
    n = each.shape[1]
    if not more and pitch_of(n) == n:
        return each.contiguous()
    raw = each.view(torch.uint8) if each.element_size() == 1 else each
    return pad(raw, (0, pitch_of(n) - n, 0, more)).view(each.dtype)


def weight_of(packed: Packed, format: Format, n: int, k: int) -> Weight:
    """The packed weight as kernels take it."""
    parts = packed["data"], packed["scale"], packed.get("zero")
    named = element_text(format), nonempty(packed.get("factor")), nonempty(packed.get("units"))
    return Weight(*parts, *sizes_of(format, n, k), *named)


def sizes_of(format: Format, n: int, k: int) -> tuple[int, int, int, int]:
    """``n``, ``k``, bits of a stored code, and codes that share a scale."""
    return n, k, format.element.container_bits, format.group_size or k


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


def has_units(format: Format) -> bool:
    """Whether weights of a format are packed with `units_of`: symmetric int4 in groups of 32 or 64."""
    small = format.group_size in _UNIT_GROUPS and format.element.container_bits == _NIBBLE
    return small and format.element.is_integer and format.zero is ZeroPoint.NONE and format.scale is ScaleType.FLOAT


def units_of(scale: Tensor) -> Tensor:
    """Powers of two ``(N,)`` in float32 that bring the products of int4 codes and scales ``(G, N)`` into float16.

    A bfloat16 scale has 8 significant bits, a code but 3: the product is a float16 number if its exponent is one. The
    largest scale of a row becomes one of [2**11, 2**12). Empty if the scales are no bfloat16 numbers, or those of a row
    have too different exponents, or some is not finite: kernels then scale sums.
    """
    none = scale.new_empty(0, dtype=torch.float32)
    if scale.dtype != torch.bfloat16:
        return none
    if not has_values(scale):
        return scale.new_empty(scale.shape[1], dtype=torch.float32)
    wide = scale.float().abs()
    largest = wide.amax(0)
    exponent = torch.frexp(largest).exponent.clamp(min=-114)
    units = torch.ldexp(torch.ones_like(largest), 12 - exponent)
    small = (wide != 0) & (wide * units < _SMALLEST_SCALE)
    exact = torch.isfinite(wide).all() & ~small.any()
    return units if bool(exact) else none


def has_blocks(format: Format) -> bool:
    """Whether `blocks_of` the scales of a format may be of use: of e4m3 in groups of 128."""
    plain = format.zero is ZeroPoint.NONE and format.scale is ScaleType.FLOAT
    return format.dtype == "fp8" and format.group_size == SQUARE and plain


def blocks_of(scale: Tensor) -> Tensor:
    """Scales float32 ``(G, N / 128)``, rounded up, if 128 rows have the same each, as fp8 checkpoints; else empty."""
    groups, n = scale.shape
    count = -(-n // SQUARE)
    if not has_values(scale) or not scale.numel():
        return scale.new_empty((groups, count), dtype=torch.float32)
    filled = torch.cat((scale, scale[:, -1:].expand(groups, count * SQUARE - n)), 1).view(groups, count, SQUARE)
    same = bool((filled == filled[..., :1]).all())
    return filled[..., 0].float().contiguous() if same else scale.new_empty(0, dtype=torch.float32)


def has_half(format: Format) -> bool:
    """Whether scales of a format may be packed with `half_factor`: of integers in groups."""
    grouped = format.group_size is not None and bool(block_size(format.group_size))
    return grouped and format.element.is_integer and format.zero is not ZeroPoint.FLOAT and not format.scale.has_global


def half_factor(scale: Tensor) -> Tensor:
    """A power of two ``(1,)``, float32, by whose inverse products of codes and scales are normal float16 numbers.

    The largest scale becomes one of [2**6, 2**7), if its exponent is within 100. Empty if the smallest is then too
    small, or some is not finite.
    """
    if not has_values(scale) or not scale.numel():
        return scale.new_empty(1, dtype=torch.float32)
    wide = scale.float().abs()
    exponent = torch.frexp(wide.max()).exponent.clamp(min=-100, max=100)
    factor = torch.ldexp(torch.ones((), device=scale.device), exponent - 7)
    small = (wide != 0) & (wide / factor < _SMALLEST)
    usable = torch.isfinite(wide).all() & ~small.any() & (wide / factor * 255 <= _LARGEST).all()
    return factor.reshape(1) if bool(usable) else factor.new_empty(0)


def _rows_per_chunk(k: int) -> int:
    return max(1, _CHUNK // max(1, k) // ROWS) * ROWS


def _chunks_of_codes(weight: QTensor) -> Iterator[Tensor]:
    """Codes, int8 or uint8 ``(rows, K)``, in chunks of a multiple of 16 rows, except for the last."""
    for part in torch.split(weight.data, _rows_per_chunk(weight.shape[1])):
        yield weight.format.codec.decode(part, weight.shape[1])


def _row_multiple(format: Format, k: int) -> int:
    """The multiple that K of rows16 is rounded up to."""
    return 64 if format.groups(k) == 1 or format.group(k) % 64 == 0 else 32


def _pack_data(weight: QTensor) -> Tensor:
    element = weight.format.element
    if element.container_bits == _NIBBLE:
        block = block_size(weight.format.group_size)
        offset, filling = (8, 8) if element.is_integer else (0, element.zero_code or _number(element.values or ()))
        parts = [_planar(codes + offset, block, filling) for codes in _chunks_of_codes(weight)]
    else:
        columns = _row_multiple(weight.format, weight.shape[1])
        parts = [_rows(codes.view(torch.int8), columns) for codes in _chunks_of_codes(weight)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _number(values: tuple[float, ...]) -> int:
    """The first code of a table that stands for a number."""
    return next((code for code, value in enumerate(values) if math.isfinite(value)), 0)


def _planar(codes: Tensor, block: int, filling: int) -> Tensor:
    """Unsigned codes ``(rows, K)`` to ``(rows/16, K/P, 16, P/2)``, P = ``block``."""
    filled = pad(codes, (0, -codes.shape[1] % block, 0, -codes.shape[0] % ROWS), value=filling).view(torch.uint8)
    halves = filled.view(filled.shape[0] // ROWS, ROWS, filled.shape[1] // block, 2, block // 2)
    stored = halves[..., 0, :] | (halves[..., 1, :] << 4)
    fragments = stored.view(*stored.shape[:3], block // 32, 2, 4, 2).movedim(-2, -4)
    return fragments.reshape(stored.shape).transpose(1, 2).contiguous()


def _planar_codes(data: Tensor, k: int) -> Tensor:
    """The inverse of `_planar`, as int8, including padding rows."""
    stored = data.view(*data.shape[:3], 4, data.shape[3] // 16, 2, 2).movedim(-4, -2).reshape(data.shape)
    nibbles = torch.stack((stored & 15, stored >> 4), dim=3).transpose(1, 2)
    return nibbles.reshape(data.shape[0] * ROWS, -1)[:, :k].view(torch.int8)


def _rows(codes: Tensor, columns: int) -> Tensor:
    """Codes ``(rows, K)``, rows rounded up to 16 and K to ``columns``."""
    return pad(codes, (0, -codes.shape[1] % columns, 0, -codes.shape[0] % ROWS)).contiguous()


def _row_codes(data: Tensor, k: int) -> Tensor:
    return data[:, :k]


class PackedKernel(Kernel):
    """A kernel on weights packed as above: made for one `Format` and shape ``(n, k)``.

    ``sums``, ``units``, ``half``, ``blocks``: whether it needs them, see `pack`.
    """

    def __init__(
        self, name: str, format: Format, n: int, k: int, *,
        sums: bool = False, units: bool = False, half: bool = False, blocks: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.format, self.n, self.k = name, format, n, k
        self.sums, self.units, self.half, self.blocks = sums, units, half, blocks
        self.sizes = sizes_of(format, n, k)
        _, _, self.bits, self.group = self.sizes
        self.element = element_text(format)

    @property
    def packing(self) -> str:
        return packing_name(self.format, sums=self.sums, units=self.units, half=self.half, blocks=self.blocks)

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        return pack(weight, sums=self.sums, units=self.units, half=self.half, blocks=self.blocks)

    def unpack(self, packed: Packed) -> QTensor:
        return unpack(packed, self.format, self.n, self.k)
