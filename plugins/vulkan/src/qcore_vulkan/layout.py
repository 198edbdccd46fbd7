"""The layout of weights in device memory: the same for every kernel and every device.

Everything here except `upload` and `download` runs as torch ops on the CPU.

A weight ``(N, K)`` is split into groups of K that share a scale, each padded to blocks of 32 k. Groups of up to 16 k
are padded to half a block, and two share one: their number is made even, so that the last may be empty. N is padded to
8 rows. Codes are vectors of 16 bytes, P to a block: number ``((n // 8) * row_blocks + block) * 8 P + 8 p + n % 8``, so
that eight rows of the weight are interleaved.

- Of more than four bits, P = 2: vector p holds k = 16 p ... 16 p + 15 of its block as bytes, signed if integers.
- Of up to four bits, P = 1: integers as ``u = q + 8``; word j of four holds k = 8 j ... 8 j + 7: the low nibbles of its
  bytes the first four, the high ones the others.

Padding is 0 in either, and activations are 0 there. Scales are float32, zero points int32 in the domain of the stored
codes or float32, sums int32: the sum over a group of its stored codes, if they are integers; all
``(groups, N padded)``. Codes of other elements index a table of float32. e8m0 scales are powers of two, which float32
holds; those that are multiplied by a global scale are stored a second time as they were.

Weights of experts ``(E, N, K)`` are stored one below the other, as one of ``E * (N padded)`` rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import frexp, isfinite, ldexp
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Element, Format, QTensor, ScaleType, ZeroPoint

if TYPE_CHECKING:
    from .device import Buffer, Device

BLOCK = 32
"""Columns of K that are stored together."""
STEP = 16
"""Columns of K that shaders multiply at a time: half a block."""
ROWS = 8
"""Rows of N that are stored side by side."""
LONGEST = 16384
"""The most columns of a group whose int32 sums with every zero point correction are exact; longer ones are split."""
NO_ZERO, INT_ZERO, FLOAT_ZERO = 0, 1, 2
"""Kinds of zero points, as in the shaders: w = u s with u = q, (u - z) s, u s + z."""

_KINDS = {ZeroPoint.NONE: NO_ZERO, ZeroPoint.INT: INT_ZERO, ZeroPoint.FLOAT: FLOAT_ZERO}
_HALF_MIN, _HALF_MAX = 2.0**-3, 65504.0
_EXPONENT = 15
"""Of a power of two that is above all values of a table in float16."""
_MOST_SHIFT = 64
"""Shaders multiply by 2^shift and 2^-shift, which must be normal float32 numbers."""
_CHUNK = 1 << 24
"""Codes that are packed at a time."""


class Halves(NamedTuple):
    """A table as float16 numbers. **Fields:** ``terms`` whose sum is a value times 2^``shift``, 1 or 2."""

    terms: int
    shift: int


@dataclass(frozen=True)
class Geometry:
    """Sizes of a weight as it is stored.

    **Fields:** ``n``, ``k``; ``bits``: 4 or 8; ``group``: columns of a stored group, the last may be shorter, and empty
    if ``halved``; ``groups``; ``split``: how many stored groups a group of the format is split into; ``zero_kind``;
    ``is_table``: whether codes index a table; ``halves``: its values as float16 matrices, None if they do not fit.
    """

    n: int
    k: int
    bits: int
    group: int
    groups: int
    split: int
    zero_kind: int
    is_table: bool = False
    halves: Halves | None = None

    @classmethod
    def of(cls, format: Format, n: int, k: int) -> Geometry:
        """The sizes for a weight that `why_not_packed` does not refuse."""
        group = _stored_group(format, k)
        split, element = -(-format.group(k) // group), format.element
        kinds = (_KINDS[format.zero], not element.is_integer, halves_of(element))
        groups = -(-k // group)
        if groups > 1 and group <= STEP:
            groups += groups % 2
        return cls(n, k, element.container_bits, group, groups, split, *kinds)

    @cached_property
    def halved(self) -> bool:
        """Whether two groups share a block."""
        return self.groups > 1 and self.group <= STEP

    @cached_property
    def steps(self) -> int:
        """Steps of 16 columns of a group: 1 if ``halved``, else two to a block."""
        return 1 if self.halved else 2 * -(-self.group // BLOCK)

    @cached_property
    def row_blocks(self) -> int:
        """Blocks of a row."""
        return self.groups * self.steps // 2

    @cached_property
    def columns(self) -> int:
        """Columns with padding: the length of a row of prepared activations."""
        return self.row_blocks * BLOCK

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of the codes of one row."""
        return self.columns * self.bits // 8

    @property
    def padded_n(self) -> int:
        """Rows with padding."""
        return -(-self.n // ROWS) * ROWS

    @property
    def values(self) -> int:
        """Values of the table; 0 if there is none."""
        return 1 << self.bits if self.is_table else 0


@lru_cache(maxsize=64)
def halves_of(element: Element) -> Halves | None:
    """How float16 matrices hold the finite values of a table: normal numbers, also times 2^-11, or sums of two terms.

    The second term of a float32 x is multiplied with 2^-11 times the weight. Two terms hold 22 bits, as of x.
    """
    values = [abs(value) for value in element.values or () if isfinite(value) and value != 0]
    if not values:
        return None
    largest = _EXPONENT - frexp(max(values))[1]
    for shift in (0, largest):
        scaled = [ldexp(value, shift) for value in values]
        if not (0 <= shift <= _MOST_SHIFT and all(_HALF_MIN <= value <= _HALF_MAX for value in scaled)):
            continue
        rest = [value - _half(value) for value in scaled]
        if not any(rest):
            return Halves(1, shift)
        held = (abs(r - _half(r)) <= ldexp(value, -22) for r, value in zip(rest, scaled, strict=True))
        if shift == largest and all(held):
            return Halves(2, shift)
    return None


def _half(value: float) -> float:
    rounded: float = struct.unpack("e", struct.pack("e", value))[0]
    return rounded


def _stored_group(format: Format, k: int) -> int:
    group = format.group(k)
    if group <= LONGEST:
        return group
    if format.groups(k) == 1:
        return LONGEST
    return next((part for part in range(LONGEST, 0, -1) if group % part == 0), 1)


def why_not_packed(format: Format, k: int) -> str:
    """Why a weight of ``k`` columns, at least one, cannot be stored, in a sentence; empty if it can."""
    group, stored = format.group(k), _stored_group(format, k)
    if stored < group and stored % BLOCK:
        return f"group size {group} cannot be divided into parts of at most {LONGEST}; use a multiple of {BLOCK}."
    return ""


@dataclass(frozen=True)
class Packed:
    """Rows of a weight as they are stored, ``n`` of them: tensors on the CPU.

    ``scale_bytes``: uint8, scales as the format has them, if ``scale`` does not tell.
    """

    n: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    sums: Tensor | None
    scale_bytes: Tensor | None = None


def pack(weight: QTensor, geometry: Geometry) -> Packed:
    """The weight as it is stored."""
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    chunks = [_pack_codes(codes, geometry) for codes in _code_chunks(weight, geometry)]
    if zero is not None and geometry.zero_kind == INT_ZERO:
        zero = zero.int() + _offset(geometry)
    has_bytes = weight.format.scale.has_global
    return Packed(
        geometry.n,
        torch.cat([codes for codes, _ in chunks]),
        _pack_parameter(weight.scales(), geometry),
        None if zero is None else _pack_parameter(zero if zero.dtype == torch.int32 else zero.float(), geometry),
        None if geometry.is_table else torch.cat([sums for _, sums in chunks], dim=1).contiguous(),
        _pack_parameter(weight.scale.view(torch.uint8), geometry) if has_bytes else None,
    )


def table_of(format: Format) -> Tensor:
    """The numbers that stored codes stand for, float32; 0 for those that no weight has."""
    element = format.element
    values = element.lookup(torch.device("cpu")).nan_to_num(0.0, 0.0, 0.0)
    return pad(values, (0, (1 << element.container_bits) - len(values)))


def _offset(geometry: Geometry) -> int:
    """The offset added to codes: stored integers of four bits are not negative."""
    return 8 if geometry.bits == 4 and not geometry.is_table else 0


def _code_chunks(weight: QTensor, geometry: Geometry) -> Iterator[Tensor]:
    """Codes of rows, int8 or uint8 ``(rows, K)``, a multiple of eight rows except for the last."""
    step = max(1, _CHUNK // geometry.columns // ROWS) * ROWS
    for data in torch.split(weight.data, step):
        yield weight.format.codec.decode(data, geometry.k)


def _pack_codes(codes: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Codes ``(rows, K)`` as int32 words ``(rows / 8, words)``, and their sums ``(groups, rows)``, rows padded."""
    g = geometry
    stored = pad(codes + _offset(g), (0, g.groups * g.group - g.k, 0, -codes.shape[0] % ROWS))
    groups = stored.view(-1, g.groups, g.group)
    sums = groups.sum(-1, dtype=torch.int32).t()
    padded = pad(groups, (0, g.steps * STEP - g.group)).view(torch.uint8)
    if g.bits == 8:
        data = padded.reshape(-1, ROWS, g.columns // 16, 16).transpose(1, 2)
    else:
        halves = padded.reshape(-1, ROWS, g.columns // BLOCK, 4, 2, 4)
        data = (halves[..., 0, :] | (halves[..., 1, :] << 4)).transpose(1, 2)
    return data.reshape(data.shape[0], -1).contiguous().view(torch.int32), sums


def _pack_parameter(values: Tensor, geometry: Geometry) -> Tensor:
    """``(G, N)`` of the format as ``(groups, N padded)``; 0 for an empty group."""
    stored = values.repeat_interleave(geometry.split, 0)[: geometry.groups]
    return pad(stored, (0, -geometry.n % ROWS, 0, geometry.groups - stored.shape[0])).contiguous()


def unpack(
    packed: Packed, format: Format, geometry: Geometry, scale_dtype: torch.dtype, global_scale: Tensor | None = None
) -> QTensor:
    """The inverse of `pack`, bit for bit."""
    g = geometry
    data = format.codec.encode(_unpack_codes(packed.codes, g)[: g.n])
    stored = packed.scale if packed.scale_bytes is None else packed.scale_bytes
    scale = stored[:: g.split, : g.n][: format.groups(g.k)].contiguous()
    if packed.scale_bytes is not None:
        scale = scale.view(scale_dtype)
    elif format.scale is ScaleType.E8M0:
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8)  # the exponent of float32, 0 for 2**-127 as well
    else:
        scale = scale.to(scale_dtype)
    zero = packed.zero
    if zero is not None:
        zero = zero[:: g.split, : g.n][: format.groups(g.k)].contiguous()
        if g.zero_kind == INT_ZERO:
            zero = format.codec.encode_zero((zero - _offset(g)).to(torch.int8))
        else:
            zero = zero.to(scale_dtype)
    return QTensor(data, scale, zero, (g.n, g.k), format, global_scale=global_scale)


def _unpack_codes(words: Tensor, geometry: Geometry) -> Tensor:
    """Words as `_pack_codes` makes them to codes ``(rows, K)``, int8 of integers and uint8 of tables."""
    g = geometry
    data = words.view(torch.uint8).view(words.shape[0], -1, ROWS, 16).transpose(1, 2)
    if g.bits == 4:
        data = data.reshape(*data.shape[:-1], 4, 4)
        data = torch.stack((data & 15, data >> 4), dim=-2)
    groups = data.reshape(-1, g.groups, g.steps * STEP)[..., : g.group]
    codes = groups.reshape(-1, g.groups * g.group)[:, : g.k]
    return codes if g.is_table else codes.view(torch.int8) - _offset(g)


def _stacked(each: Sequence[Packed]) -> Packed:
    """The weights of experts, one below the other."""

    def beside(parts: Iterable[Tensor | None]) -> Tensor | None:
        found = [part for part in parts if part is not None]
        return torch.cat(found, dim=1) if found else None

    return Packed(
        sum(one.scale.shape[1] for one in each),
        torch.cat([one.codes for one in each]),
        torch.cat([one.scale for one in each], dim=1),
        beside(one.zero for one in each),
        beside(one.sums for one in each),
        beside(one.scale_bytes for one in each),
    )


def _expert(packed: Packed, geometry: Geometry, number: int) -> Packed:
    """One of the weights that `_stacked` has joined."""
    first, stop = number * geometry.padded_n, (number + 1) * geometry.padded_n

    def own(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[:, first:stop]

    codes, scale = packed.codes[first // ROWS : stop // ROWS], packed.scale[:, first:stop]
    return Packed(geometry.n, codes, scale, own(packed.zero), None, own(packed.scale_bytes))


@dataclass(frozen=True)
class Part:
    """Rows ``first`` ... ``first + n - 1`` of a weight on a device; ``padded_n``: the N of its scales.

    Of experts: rows with padding, those of whole experts. ``table``: what codes stand for, unless they are integers;
    ``scale_bytes``: as of `Packed`.
    """

    first: int
    n: int
    codes: Buffer
    scale: Buffer
    zero: Buffer | None
    sums: Buffer | None
    table: Buffer | None = None
    scale_bytes: Buffer | None = None

    @property
    def padded_n(self) -> int:
        """Rows with padding."""
        return -(-self.n // ROWS) * ROWS

    @property
    def values(self) -> Buffer:
        """What is bound as the table: any buffer if there is none."""
        return self.table or self.scale

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers."""
        found = (self.codes, self.scale, self.zero, self.sums, self.table, self.scale_bytes)
        return tuple(buffer for buffer in found if buffer is not None)


@dataclass(frozen=True)
class DeviceWeight:
    """A weight on a device, in parts no larger than a shader can address at once.

    ``experts``: E if it is the weights ``(E, N, K)`` of experts, whose sizes ``geometry`` has, else 0;
    ``global_scale``: as of `QTensor`, on the CPU.
    """

    geometry: Geometry
    format: Format
    scale_dtype: torch.dtype
    parts: tuple[Part, ...]
    experts: int = 0
    global_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.nbytes for part in self.parts for buffer in part.buffers)


def rows_per_part(geometry: Geometry, largest: int) -> int:
    """Rows of N whose codes are at most ``largest`` bytes, a multiple of eight."""
    return max(1, largest // geometry.row_bytes // ROWS) * ROWS


def experts_per_part(geometry: Geometry, largest: int) -> int:
    """Experts whose codes are at most ``largest`` bytes; 0 if not even those of one are."""
    return largest // (geometry.row_bytes * geometry.padded_n)


def upload(device: Device, weight: QTensor) -> DeviceWeight:
    """Copy a weight ``(N, K)``, or those of experts ``(E, N, K)``, to the device. Raises `OutOfMemory`."""
    *experts, n, k = weight.shape
    geometry, limits = Geometry.of(weight.format, n, k), device.description.limits
    largest = min(limits.max_storage_range, limits.max_allocation)
    if experts:
        step = max(1, experts_per_part(geometry, largest))
        parts = [
            _upload_experts(device, weight, geometry, range(first, min(first + step, experts[0])))
            for first in range(0, experts[0], step)
        ]
    else:
        step = rows_per_part(geometry, largest)
        parts = [_upload_part(device, weight, first, min(step, n - first)) for first in range(0, n, step)]
    count = experts[0] if experts else 0
    return DeviceWeight(geometry, weight.format, weight.scale.dtype, tuple(parts), count, weight.global_scale)


def _upload_part(device: Device, weight: QTensor, first: int, n: int) -> Part:
    rows = weight if n == weight.shape[0] else weight.narrow(0, first, n)
    return _uploaded(device, pack(rows, Geometry.of(weight.format, n, weight.shape[1])), weight.format, first)


def _upload_experts(device: Device, weight: QTensor, geometry: Geometry, experts: range) -> Part:
    packed = _stacked([pack(weight[e], geometry) for e in experts])
    return _uploaded(device, packed, weight.format, experts.start * geometry.padded_n)


def _uploaded(device: Device, packed: Packed, format: Format, first: int) -> Part:
    table = None if format.element.is_integer else table_of(format)
    others = (packed.zero, packed.sums, table, packed.scale_bytes)
    return Part(
        first,
        packed.n,
        device.upload(packed.codes),
        device.upload(packed.scale),
        *(None if part is None else device.upload(part) for part in others),
    )


def download(weight: DeviceWeight) -> QTensor:
    """The weight that was uploaded, bit for bit."""
    found = [(_download_experts if weight.experts else _download_rows)(weight, part) for part in weight.parts]
    return found[0] if len(found) == 1 else QTensor.cat(found)


def _download_rows(weight: DeviceWeight, part: Part) -> QTensor:
    geometry = Geometry.of(weight.format, part.n, weight.geometry.k)
    packed = _downloaded(geometry, part)
    return unpack(packed, weight.format, geometry, weight.scale_dtype, weight.global_scale)


def _download_experts(weight: DeviceWeight, part: Part) -> QTensor:
    g, packed = weight.geometry, _downloaded(weight.geometry, part)
    first, factors = part.first // g.padded_n, weight.global_scale
    return QTensor.stack(
        [
            unpack(
                _expert(packed, g, e), weight.format, g, weight.scale_dtype,
                None if factors is None else factors[first + e],
            )
            for e in range(part.n // g.padded_n)
        ]
    )  # fmt: skip


def _downloaded(geometry: Geometry, part: Part) -> Packed:
    groups, kind = geometry.groups, torch.int32 if geometry.zero_kind == INT_ZERO else torch.float32
    return Packed(
        part.n,
        torch.from_numpy(part.codes.read()).view(torch.int32).view(part.padded_n // ROWS, -1),
        torch.from_numpy(part.scale.read()).view(torch.float32).view(groups, -1),
        None if part.zero is None else torch.from_numpy(part.zero.read()).view(kind).view(groups, -1),
        None,
        None if part.scale_bytes is None else torch.from_numpy(part.scale_bytes.read()).view(groups, -1),
    )
