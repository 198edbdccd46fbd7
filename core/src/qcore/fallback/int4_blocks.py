"""The byte layout of ``aten::_weight_int4pack_mm_for_cpu``, reverse-engineered from the op.

The layout depends on the instruction set that torch selects and is undocumented, so it is determined once per process
by packing weights whose codes are the digits of their own positions. If N is a multiple of 64, the layout is uniform:
blocks of B columns (B = 64 on AVX-512, 32 on AVX2, 16 otherwise); inside a block, B/2 bytes per k; byte j holds column
``low[j]`` in its low nibble and column ``high[j]`` in its high nibble. Any other layout is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .ops import int4_pack, on_cpu

COLUMNS = 64
"""N is padded to a multiple of 64, which makes the layout uniform."""
_CHUNK = 1 << 21
"""Codes packed at a time: the op takes them as int32."""


@dataclass(frozen=True)
class BlockLayout:
    """Blocks of ``size`` columns; byte j holds columns j and j + size/2, or 2j and 2j + 1 if ``pairs``."""

    size: int
    pairs: bool

    def nibbles(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unsigned codes of the low and of the high nibbles, each int8 ``(blocks, K, size/2)``."""
        k = packed.shape[1] * 2
        blocks = packed.view(-1, k, self.size // 2)
        return (blocks & 15).view(torch.int8), (blocks >> 4).view(torch.int8)

    def halves(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return two views of ``columns`` ``(A, N)``, each ``(blocks, A, size/2)``: low and high nibbles."""
        rows, half = columns.shape[0], self.size // 2
        if self.pairs:
            split = columns.view(rows, -1, half, 2).transpose(0, 1)
            return split[..., 0], split[..., 1]
        halves = columns.view(rows, -1, 2, half).transpose(0, 1)
        return halves[:, :, 0], halves[:, :, 1]

    def pack(self, codes: Tensor) -> Tensor:
        """Pack signed codes ``(N, K)``, N a multiple of 64, to the op's uint8 ``(N, K/2)``."""
        rows = max(COLUMNS, _CHUNK // max(1, codes.shape[1]) // COLUMNS * COLUMNS)
        return torch.cat([_pack(part.int() + 8) for part in torch.split(codes, rows)])

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack uint8 ``(N, K/2)`` to signed codes ``(N, K)``."""
        n, k = packed.shape[0], packed.shape[1] * 2
        columns = torch.empty(k, n, dtype=torch.int8, device=packed.device)
        for view, nibbles in zip(self.halves(columns), self.nibbles(packed), strict=True):
            view.copy_(nibbles)
        return columns.sub_(8).t().contiguous()


def _pack(unsigned: Tensor) -> Tensor:
    assert int4_pack is not None  # `block_layout` has checked
    return int4_pack(unsigned, 2)  # the 2 matters on GPUs only


@lru_cache(maxsize=1)
def block_layout() -> BlockLayout | None:
    """Return the layout on this machine, or None if the op is missing or packs in an unknown layout."""
    if int4_pack is None:
        return None
    n, k = 3 * COLUMNS, 32
    with on_cpu():
        position = torch.arange(n * k, dtype=torch.int32).view(n, k)
        # All four digits in one call: on a busy machine every call waits for its threads.
        digits = _pack(torch.cat([position >> shift & 15 for shift in (0, 4, 8, 12)])).int().chunk(4)
        low = torch.stack([(d & 15) << 4 * i for i, d in enumerate(digits)]).sum(0).flatten()
        high = torch.stack([(d >> 4) << 4 * i for i, d in enumerate(digits)]).sum(0).flatten()
        return next((layout for layout in _CANDIDATES if _holds(layout, position, low, high)), None)


_CANDIDATES = tuple(BlockLayout(size, pairs) for size in (64, 32, 16) for pairs in (False, True))


def _holds(layout: BlockLayout, position: Tensor, low: Tensor, high: Tensor) -> bool:
    expected = layout.halves(position.t().contiguous())
    return all(torch.equal(e.flatten().long(), found) for e, found in zip(expected, (low, high), strict=True))
