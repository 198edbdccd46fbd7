"""Quantized weights as blocks of GGUF: the smallest type that represents a weight exactly, and its bytes.

The bytes are described in `importers.gguf_blocks`, which reads them back here as a check: a type represents a weight if
the float32 values read back are the same. Groups of 64, 128 or a whole row repeat their scale in each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import ScaleType, ZeroPoint
from ...weights.qtensor import QTensor
from ..importers.base import LayerRefused
from ..importers.gguf_blocks import BLOCK_TYPES
from .gguf_scales import factors

_CHUNK = 1 << 22
"""Elements that are packed at a time: the temporaries take several bytes each."""


@dataclass(frozen=True)
class _Rows:
    """Some rows of a weight, ``W = scale * codes + zero`` in groups of ``size`` columns.

    **Fields:** ``codes``: int16 (N, K), for fp4 the stored ones; ``scale``: float32 (N, G), for fp4 its bytes;
    ``zero``: None or float32 (N, G); ``shift``: None or int16 (N, G): the integer zero point, already subtracted.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    shift: Tensor | None

    def blocks(self, columns: int) -> Tensor:
        """The codes, (N, B, columns)."""
        return self.codes.reshape(len(self.codes), -1, columns)

    def grouped(self, values: Tensor, groups: int) -> Tensor:
        """``values`` (N, G) by block, (N, B, groups)."""
        return values.reshape(len(values), -1, groups)


_Pack = Callable[[_Rows], "Tensor | None"]
"""Creates blocks, uint8 (N, B, nbytes) or None if impossible; whether they are exact is checked afterwards."""


def block_type(weights: Callable[[], Iterator[QTensor]]) -> str:
    """The name of the smallest type that represents all ``weights``, each (N, K), exactly. Raises `LayerRefused`."""
    first = next(weights())
    for name in _candidates(first):
        if all(_holds(weight, name) for weight in weights()):
            return name
    raise LayerRefused(
        next((why for weight in weights() if (why := _why(weight))), "no single type fits all its experts")
    )


def pack(weight: QTensor, name: str) -> Tensor:
    """The blocks of a weight (N, K) in a type that represents it, uint8 (N, bytes of a row)."""
    return torch.cat([_bytes(rows, name) for rows in _chunks(weight, name)])


def _bytes(rows: _Rows, name: str) -> Tensor:
    blocks = _PACKED[name](rows)
    assert blocks is not None, name
    return blocks.flatten(1)


def _candidates(weight: QTensor) -> list[str]:
    """Types whose groups and codes could represent a weight, the smallest first. Raises `LayerRefused`."""
    format, k = weight.format, weight.shape[1]
    if not weight.numel():
        raise LayerRefused("it is empty")
    if weight.order is not None:
        raise LayerRefused("its columns have an order, but blocks consist of consecutive columns")
    table = not format.element.is_integer
    if (table and (format.dtype != "fp4" or format.scale is not ScaleType.E8M0)) or (
        not table and format.scale is not ScaleType.FLOAT
    ):  # fmt: skip
        raise LayerRefused(f"its format is {format}; blocks hold int4, int8 and mxfp4")
    size = format.group(k)
    found = _OF_FP4 if table else _OF_FLOAT_ZEROS if format.zero is ZeroPoint.FLOAT else _OF_INTEGERS
    names = [name for name in found if size % _group(name) == 0 and k % BLOCK_TYPES[name].columns == 0]
    if not names:
        raise LayerRefused(f"its {k} columns in groups of {size} do not fill blocks of {format.element.name} codes")
    return sorted(names, key=lambda name: BLOCK_TYPES[name].nbytes / BLOCK_TYPES[name].columns)


def _group(name: str) -> int:
    return BLOCK_TYPES[name].format.group(256)


def _holds(weight: QTensor, name: str) -> bool:
    """Whether blocks of a type decode to exactly the float32 values of a weight."""
    start = 0
    for rows in _chunks(weight, name):
        low, high = _RANGES[name]
        if rows.codes.numel() and not (low <= int(rows.codes.min()) and int(rows.codes.max()) <= high):
            return False
        raw = _PACKED[name](rows)
        if raw is None:
            return False
        wanted = weight.narrow(0, start, len(raw)).dequantize(torch.float32)
        if not _same(raw.flatten(1), name, wanted):
            return False
        start += len(raw)
    return True


def _same(raw: Tensor, name: str, wanted: Tensor) -> bool:
    if name != "MXFP4" and not bool(torch.isfinite(_floats(raw, name)).all()):
        return False
    return torch.equal(BLOCK_TYPES[name].build(raw).dequantize(torch.float32), wanted)


def _floats(raw: Tensor, name: str) -> Tensor:
    """The float16 numbers of all blocks; a scale that is too large for float16 has become infinite."""
    blocks = raw.view(len(raw), -1, BLOCK_TYPES[name].nbytes)
    return torch.cat([blocks[..., at : at + 2] for at in _HALVES[name]], dim=-1).contiguous().view(torch.float16)


def _why(weight: QTensor) -> str:
    """Why no candidate represents a weight."""
    format, scale = weight.format, weight.scale.float()
    if format.zero is ZeroPoint.FLOAT:
        return (
            f"its format is {format}, and its scales and zero points are exact neither in float16 nor as the products "
            f"in a K-quant; quantize it with a symmetric scheme, e.g. w4a16-g32"
        )
    if format.scale is ScaleType.FLOAT and not torch.equal(scale.half().float(), scale):
        return "its scales are not exact in float16; round them: --dtype fp16 (dtype=torch.float16)"
    if format.group(weight.shape[1]) % 32:
        return f"its format is {format}; blocks with arbitrary scales hold groups of 32: quantize it with -g32"
    return f"its format is {format} and codes less their zero points take 9 bits; use a symmetric scheme, e.g. w8a16"


def _chunks(weight: QTensor, name: str) -> Iterator[_Rows]:
    """A weight, a few rows at a time, in the groups of a type."""
    n, k = weight.shape
    step = max(1, _CHUNK // max(1, k))
    for start in range(0, n, step):
        yield _rows(weight.narrow(0, start, min(step, n - start)), _group(name))


def _rows(weight: QTensor, size: int) -> _Rows:
    format, k = weight.format, weight.shape[1]
    repeats = format.group(k) // size

    def spread(values: Tensor) -> Tensor:
        return values.t().repeat_interleave(repeats, dim=1)[:, : k // size]

    codes = weight.codes().to(torch.int16)
    if format.scale is ScaleType.E8M0:
        return _Rows(codes, spread(weight.scale.view(torch.uint8)), None, None)
    scale, integer = spread(weight.scale.float()), weight.integer_zero()
    if integer is None:
        zero = None if weight.zero is None else spread(weight.zero.float())
        return _Rows(codes, scale, zero, None)
    shift = spread(integer.to(torch.int16))
    return _Rows(codes - shift.repeat_interleave(size, dim=1), scale, None, shift)


def _half(values: Tensor) -> Tensor:
    """Numbers (N, B, 1) as the two bytes of float16."""
    return values.to(torch.float16).contiguous().view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Unsigned codes (..., 2 * C): the first half in the low nibbles of C bytes, the other in the high ones."""
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low & 15 | (high & 15) << 4


def _joined(fields: Tensor, bits: int) -> Tensor:
    """Pack codes (..., F, C) of ``bits`` bits into C bytes, the first of the F fields in the lowest bits."""
    shifts = torch.arange(0, fields.shape[-2] * bits, bits).unsqueeze(-1)
    return (fields.to(torch.int16) << shifts).sum(-2).to(torch.uint8)


def _fifth_bits(codes: Tensor) -> Tensor:
    """The highest bits of 32 codes of five bits, in four bytes."""
    bits = codes.reshape(*codes.shape[:-1], 4, 8).transpose(-1, -2) >> 4 & 1
    return _joined(bits, 1)


def _q4_0(r: _Rows) -> Tensor:
    return torch.cat((_half(r.grouped(r.scale, 1)), _nibbles(r.blocks(32) + 8)), dim=-1)


def _q4_1(r: _Rows) -> Tensor | None:
    if r.shift is not None:  # the codes before the zero point was subtracted
        unsigned = r.codes + r.shift.repeat_interleave(32, dim=1) + 8
        minimum = -(r.shift + 8) * r.scale
    elif r.zero is not None:
        unsigned, minimum = r.codes + 8, r.zero - 8 * r.scale
    else:
        return None
    if unsigned.numel() and (int(unsigned.min()) < 0 or int(unsigned.max()) > 15):
        return None
    heads = [_half(r.grouped(values, 1)) for values in (r.scale, minimum)]
    return torch.cat((*heads, _nibbles(unsigned.reshape(len(unsigned), -1, 32))), dim=-1)


def _q5_0(r: _Rows) -> Tensor:
    codes = r.blocks(32) + 16
    return torch.cat((_half(r.grouped(r.scale, 1)), _fifth_bits(codes), _nibbles(codes)), dim=-1)


def _q5_1(r: _Rows) -> Tensor:
    assert r.zero is not None
    heads = [_half(r.grouped(values, 1)) for values in (r.scale, r.zero)]
    codes = r.blocks(32)
    return torch.cat((*heads, _fifth_bits(codes), _nibbles(codes)), dim=-1)


def _q8_0(r: _Rows) -> Tensor:
    return torch.cat((_half(r.grouped(r.scale, 1)), r.blocks(32).to(torch.int8).view(torch.uint8)), dim=-1)


def _factors(r: _Rows, base: Tensor, wanted: Tensor, groups: int, low: int, high: int) -> tuple[Tensor, Tensor] | None:
    """The float16 factor of each block as bytes (N, B, 2), and the integers (N, B, groups)."""
    found = factors(base.reshape(-1, groups), wanted.reshape(-1, groups), low, high)
    if found is None:
        return None
    n = len(r.codes)
    return _half(found[0].view(n, -1, 1)), found[1].view(n, -1, groups)


def _pairs(r: _Rows, offset: int, groups: int, high: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Factors of scales and of minima; ``offset``: the number subtracted from unsigned codes."""
    assert r.zero is not None
    scale = _factors(r, torch.zeros_like(r.scale), -r.scale, groups, 0, high)
    minimum = _factors(r, offset * r.scale, r.zero, groups, 0, high) if scale else None
    return (*scale, *minimum) if scale and minimum else None


def _k_head(r: _Rows, offset: int) -> Tensor | None:
    """The first 16 bytes of Q4_K and Q5_K."""
    found = _pairs(r, offset, 8, 63)
    if found is None:
        return None
    d, s, least, m = found
    low = s[..., :4] | s[..., 4:] >> 4 << 6
    middle = m[..., :4] | m[..., 4:] >> 4 << 6
    return torch.cat(
        (d, least, *(v.to(torch.uint8) for v in (low, middle, s[..., 4:] & 15 | (m[..., 4:] & 15) << 4))), -1
    )


def _q4_k(r: _Rows) -> Tensor | None:
    head = _k_head(r, 8)
    return None if head is None else torch.cat((head, _long_nibbles(r.blocks(256) + 8)), dim=-1)


def _long_nibbles(codes: Tensor) -> Tensor:
    """Pack 256 codes into four runs of 32 bytes."""
    return _nibbles(codes.reshape(*codes.shape[:-1], 4, 64)).flatten(-2)


def _q5_k(r: _Rows) -> Tensor | None:
    head, codes = _k_head(r, 0), r.blocks(256)
    if head is None:
        return None
    high = _joined(codes.reshape(*codes.shape[:-1], 8, 32) >> 4 & 1, 1)
    return torch.cat((head, high, _long_nibbles(codes)), dim=-1)


def _two_bits(codes: Tensor) -> Tensor:
    """Pack the lowest two bits of 256 codes into 64 bytes."""
    return _joined(codes.reshape(*codes.shape[:-1], 2, 4, 32) & 3, 2).flatten(-2)


def _q6_k(r: _Rows) -> Tensor | None:
    found = _factors(r, torch.zeros_like(r.scale), -r.scale, 16, -128, 127)
    if found is None:
        return None
    codes = r.blocks(256) + 32
    low = _nibbles(codes.reshape(*codes.shape[:-1], 2, 128)).flatten(-2)
    return torch.cat((low, _two_bits(codes >> 4), found[1].to(torch.int8).view(torch.uint8), found[0]), dim=-1)


def _q2_k(r: _Rows) -> Tensor | None:
    found = _pairs(r, 0, 16, 15)
    if found is None:
        return None
    d, s, least, m = found
    return torch.cat(((s | m << 4).to(torch.uint8), _two_bits(r.blocks(256)), d, least), dim=-1)


def _q3_k(r: _Rows) -> Tensor | None:
    found = _factors(r, torch.zeros_like(r.scale), -r.scale, 16, -32, 31)
    if found is None:
        return None
    codes, s = r.blocks(256) + 4, found[1] + 32
    high = _joined(codes.reshape(*codes.shape[:-1], 8, 32) >> 2 & 1, 1)
    tops = _joined((s >> 4).reshape(*s.shape[:-1], 4, 4), 2)
    return torch.cat((high, _two_bits(codes), _nibbles(s), tops, found[0]), dim=-1)


def _mxfp4(r: _Rows) -> Tensor:
    return torch.cat((r.grouped(r.scale, 1), _nibbles(r.blocks(32))), dim=-1)


_PACKED: dict[str, _Pack] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4,
}  # fmt: skip
_RANGES = {
    "Q4_0": (-8, 7), "Q4_1": (-15, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-128, 127), "Q2_K": (0, 3),
    "Q3_K": (-4, 3), "Q4_K": (-8, 7), "Q5_K": (0, 31), "Q6_K": (-32, 31), "MXFP4": (0, 15),
}  # fmt: skip
"""The codes of each type, minus its integer offset."""
_HALVES: dict[str, Sequence[int]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""The positions of float16 numbers in a block."""
_OF_INTEGERS = ("Q3_K", "Q4_0", "Q4_1", "Q5_0", "Q6_K", "Q8_0")
_OF_FLOAT_ZEROS = ("Q2_K", "Q4_K", "Q4_1", "Q5_K", "Q5_1")
_OF_FP4 = ("MXFP4",)
