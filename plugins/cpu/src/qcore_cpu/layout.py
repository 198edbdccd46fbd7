"""The packed weight: the memory layout of codes, scales and zero points. The library computes products.

Output features are in blocks of 32, columns of x in groups padded to whole blocks of a multiple of 8. See
``native/problem.h``, which defines the same layout in C++.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Format, QTensor, ScaleType, ZeroPoint
from qcore.plugin_api import Packed

from . import ops
from .geometry import Geometry
from .kinds import kind_of
from .parameters import (
    constants_of,
    global_scale_of,
    integer_and_float_zeros,
    original_scale,
    readable_scale,
    signed_codes,
)

COLUMNS = 32


class WeightLayout:
    """Packs weights ``(N, K)`` of one format, and unpacks them.

    Packed: ``data`` uint8 ``(N', steps, 128)`` with N' = ceil(N / 32); ``scale`` ``(N', G, 32)`` in its own dtype (e4m3
    as float16, which holds it exactly); ``zero`` uint8 (integer, plus the offset of codes) or in the scale's dtype
    (float); ``sums`` int32 ``(N', folds, 32)`` if ``sums``; ``table`` float32 of 16 or 256 values; ``global_scale``.
    """

    def __init__(self, format: Format, n: int, k: int, *, sums: bool) -> None:
        self.format, self.n, self.k, self.sums = format, n, k, sums
        self.kind = kind_of(format.element)
        self.at = Geometry.of(k, format.group(k))

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """The packed tensors of a weight ``(N, K)``."""
        codes = weight.codes().contiguous()
        kind, packed = self.kind, {}
        packed["data"] = ops.pack(codes.view(torch.uint8), self.at.group, kind.bits, kind.offset)
        packed["scale"] = self._spread(readable_scale(weight.scale))
        zero = weight.integer_zero()
        if zero is not None:
            packed["zero"] = self._spread((zero.to(torch.int16) + kind.offset).to(torch.uint8))
        elif weight.zero is not None:
            packed["zero"] = self._spread(weight.zero)
        if self.sums:
            packed["sums"] = self._spread(self._sums(codes, zero))
        return {**packed, **constants_of(weight, kind)}

    def unpack(self, packed: Packed) -> QTensor:
        """The weight, bit for bit."""
        kind, fmt = self.kind, self.format
        raw = ops.unpack(packed["data"], self.n, self.k, self.at.group, kind.bits, kind.offset)
        codes = signed_codes(raw, fmt.element)
        scale, zero = original_scale(self._join(packed["scale"]), fmt), packed.get("zero")
        if zero is not None:
            zero = self._join(zero)
            if fmt.zero is ZeroPoint.INT:
                zero = (zero.to(torch.int16) - kind.offset).to(torch.int8)
        return QTensor.from_codes(codes, scale, zero, fmt, global_scale=global_scale_of(packed))

    def _spread(self, values: Tensor) -> Tensor:
        """``(G, N)`` to ``(N', G, 32)``; rows beyond N are 0."""
        wide = pad(values, (0, -self.n % COLUMNS))
        return wide.view(values.shape[0], -1, COLUMNS).transpose(0, 1).contiguous()

    def _join(self, values: Tensor) -> Tensor:
        return values.transpose(0, 1).reshape(values.shape[1], -1)[:, : self.n].contiguous()

    def _sums(self, codes: Tensor, zero: Tensor | None) -> Tensor:
        """Sums of codes minus their zero points over each fold, int32 ``(folds, N)``."""
        at = self.at
        per_group = at.blocks * at.block // at.fold
        wide = pad(codes.to(torch.int32), (0, at.groups * at.group - self.k)).view(self.n, at.groups, at.group)
        here = wide.new_ones((1, self.k))
        here = pad(here, (0, at.groups * at.group - self.k)).view(1, at.groups, at.group)
        parts = [
            pad(t, (0, per_group * at.fold - at.group)).view(t.shape[0], at.groups, per_group, at.fold).sum(-1)
            for t in (wide, here)
        ]
        sums = parts[0]
        if zero is not None:
            sums = sums - zero.t().to(torch.int32).unsqueeze(-1) * parts[1]
        return sums.reshape(self.n, -1).t().to(torch.int32)

    def arguments(self, packed: Packed) -> tuple[Tensor | None, ...]:
        """``packed``, ``scale``, ``zero``, ``added``, ``sums``, ``table`` and ``factor`` of the library's ops."""
        zeros = integer_and_float_zeros(packed, self.format)
        return (packed["data"], packed["scale"], *zeros, *map(packed.get, ("sums", "table", "global_scale")))

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """``n``, ``k``, ``group`` and ``element`` of the library's ops."""
        return self.n, self.k, self.at.group, int(self.kind)

    @property
    def divides(self) -> bool:
        """Whether the global scale divides."""
        return self.format.scale is ScaleType.E4M3D
