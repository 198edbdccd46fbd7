"""Blocks of GGUF, the format of llama.cpp, as quantized weights. A block holds 32 or 256 columns of one row.

With the unsigned codes u and qcore's codes q: ``W = scale * q + zero``. Scales that are products are exact only in
float32. So are the zero points of Q4_1 and Q4_K, ``m + 8 * scale``, unless the minimum m is so small beside the scale
that float32 rounds the sum: by at most half a unit in the last place of ``8 * scale``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats import Format
from ...formats.bits import pack_columns
from ...weights.qtensor import QTensor
from .packing import plain_int4

_Parts = tuple[Tensor, Tensor, "Tensor | None"]
"""Codes uint8 (N, B, C), for int4 offset by 8; scale (N, B, G); zero (N, B, G) or None, for N rows of B blocks."""


@dataclass(frozen=True)
class BlockType:
    """A block type of GGUF.

    **Fields:** ``columns``, ``nbytes``: of a block; ``format``: the one that represents it; ``scale_dtype``;
    ``unpack``: takes uint8 (N, B, nbytes).
    """

    columns: int
    nbytes: int
    format: Format
    scale_dtype: torch.dtype
    unpack: Callable[[Tensor], _Parts]

    def build(self, raw: Tensor) -> QTensor:
        """The weight (N, K) of raw blocks, uint8 (N, K / columns * nbytes)."""
        blocks = raw.view(raw.shape[0], raw.shape[1] // self.nbytes, self.nbytes)
        codes, scale, zero = self.unpack(blocks)
        shape = raw.shape[0], blocks.shape[1] * self.columns
        codes = codes.reshape(shape)
        if not self.format.element.is_integer:
            data = pack_columns(codes)
        else:
            data = plain_int4(codes) if self.format.bits == 4 else codes.view(torch.int8)
        zero = None if zero is None else zero.flatten(1).t().contiguous()
        return QTensor(data, scale.flatten(1).t().contiguous(), zero, shape, self.format)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at a byte of each block, (N, B, 1)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _nibbles(raw: Tensor) -> Tensor:
    """Low nibbles of all bytes, then the high ones."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _runs(raw: Tensor, *sizes: int) -> Tensor:
    """The last dimension split into dimensions of the given sizes."""
    return raw.reshape(*raw.shape[:-1], *sizes)


def _fifth_bits(raw: Tensor) -> Tensor:
    """The 32 bits of four bytes as 0 or 16, uint8 (N, B, 32)."""
    bits = raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _q4_0(b: Tensor) -> _Parts:
    return _nibbles(b[..., 2:]), _half(b, 0), None


def _q4_1(b: Tensor) -> _Parts:
    d, m = _half(b, 0).float(), _half(b, 2).float()
    return _nibbles(b[..., 4:]), d, m + 8 * d


def _q5_0(b: Tensor) -> _Parts:
    return (_nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])) - 16, _half(b, 0), None


def _q5_1(b: Tensor) -> _Parts:
    return _nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8]), _half(b, 0).float(), _half(b, 2).float()


def _q8_0(b: Tensor) -> _Parts:
    return b[..., 2:].contiguous(), _half(b, 0), None


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima, float32 (N, B, 8), of the 6-bit pairs of Q4_K and Q5_K."""
    low, middle, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=-1)
    minimum = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), dim=-1)
    return _half(b, 0).float() * scale, _half(b, 2).float() * minimum


def _q4_k(b: Tensor) -> _Parts:
    scale, minimum = _k_scales(b)
    return _nibbles(_runs(b[..., 16:], 4, 32)), scale, 8 * scale - minimum


def _q5_k(b: Tensor) -> _Parts:
    scale, minimum = _k_scales(b)
    low = _runs(_nibbles(_runs(b[..., 48:], 4, 32)).flatten(-2), 8, 32)
    high = b[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1
    return low | high << 4, scale, -minimum


def _q6_k(b: Tensor) -> _Parts:
    low = _runs(_nibbles(_runs(b[..., :128], 2, 64)), 4, 32)
    high = _pairs(b[..., 128:192])
    scale = _half(b, 208).float() * b[..., 192:208].contiguous().view(torch.int8)
    return (low | high << 4) - 32, scale, None


def _pairs(raw: Tensor) -> Tensor:
    """2-bit codes of 64 bytes, uint8 (N, B, 2, 4, 32): 32 bytes hold four runs of 32."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    return _runs(raw, 2, 1, 32) >> shifts & 3


def _q2_k(b: Tensor) -> _Parts:
    scale, minimum = _half(b, 80).float() * (b[..., :16] & 15), _half(b, 82).float() * (b[..., :16] >> 4)
    return _pairs(b[..., 16:80]) + 8, scale, -minimum


def _q3_k(b: Tensor) -> _Parts:
    high = b[..., None, :32] >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1
    codes = _pairs(b[..., 32:96]) | _runs(high.flatten(-2), 2, 4, 32) << 2
    tops = b[..., None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1) & 3
    scale = (_nibbles(b[..., 96:104]) | tops.flatten(-2) << 4).to(torch.int8) - 32
    return codes + 4, _half(b, 108).float() * scale, None


def _mxfp4(b: Tensor) -> _Parts:
    return _nibbles(b[..., 1:]), b[..., :1], None


def _iq4_nl(b: Tensor) -> _Parts:
    return _IQ4[_nibbles(b[..., 2:]).int()], _half(b, 0), None


def _iq4_xs(b: Tensor) -> _Parts:
    low = _runs(b[..., 4:8], 4, 1) >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    high = b[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3
    scale = (low.flatten(-2) | high.flatten(-2) << 4).to(torch.int8) - 32
    return _IQ4[_nibbles(_runs(b[..., 8:], 8, 16)).int()], _half(b, 0).float() * scale, None


def _tq1_0(b: Tensor) -> _Parts:
    # A byte is a fraction of 256 in base 3, with five digits: the next one is the integer part of three times it.
    runs = ((b[..., :32], 5), (b[..., 32:48], 5), (b[..., 48:52], 4))
    shifted = [(part[..., None, :] * _POWERS_OF_3[:digits]).flatten(-2) for part, digits in runs]
    return (torch.cat(shifted, dim=-1).to(torch.int16) * 3 >> 8).to(torch.uint8) + 7, _half(b, 52), None


def _tq2_0(b: Tensor) -> _Parts:
    return _pairs(b[..., :64]) + 7, _half(b, 64), None


_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
"""The values of the codes of IQ4_NL and IQ4_XS."""
_POWERS_OF_3 = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(-1)


def _type(columns: int, nbytes: int, format: str, unpack: Callable[[Tensor], _Parts], half: bool = False) -> BlockType:
    return BlockType(columns, nbytes, Format.parse(format), torch.float16 if half else torch.float32, unpack)


BLOCK_TYPES = {
    "Q4_0": _type(32, 18, "int4-g32", _q4_0, half=True),
    "Q4_1": _type(32, 20, "int4-g32-fzp", _q4_1),
    "Q5_0": _type(32, 22, "int8-g32", _q5_0, half=True),
    "Q5_1": _type(32, 24, "int8-g32-fzp", _q5_1),
    "Q8_0": _type(32, 34, "int8-g32", _q8_0, half=True),
    "Q2_K": _type(256, 84, "int4-g16-fzp", _q2_k),
    "Q3_K": _type(256, 110, "int4-g16", _q3_k),
    "Q4_K": _type(256, 144, "int4-g32-fzp", _q4_k),
    "Q5_K": _type(256, 176, "int8-g32-fzp", _q5_k),
    "Q6_K": _type(256, 210, "int8-g16", _q6_k),
    "MXFP4": _type(32, 17, "fp4-g32-e8m0", _mxfp4),
}
"""Block types by their names in GGUF."""
READ_TYPES = BLOCK_TYPES | {
    "IQ4_NL": _type(32, 18, "int8-g32", _iq4_nl, half=True),
    "IQ4_XS": _type(256, 136, "int8-g32", _iq4_xs),
    "TQ1_0": _type(256, 54, "int4-g256", _tq1_0, half=True),
    "TQ2_0": _type(256, 66, "int4-g256", _tq2_0, half=True),
}
"""Those and the block types that qcore reads, but does not write."""
