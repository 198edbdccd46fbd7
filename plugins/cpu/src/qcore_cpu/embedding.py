"""The kernel of the contract ``embedding``: ``cpu.embedding``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import EmbeddingRequest, QTensor, ScaleType, ZeroPoint
from qcore.plugin_api import Kernel, Packed, check_indices, check_weight, has_values

from . import native, ops
from .kinds import Kind, kind_of
from .parameters import (
    constants_of,
    global_scale_of,
    integer_and_float_zeros,
    original_scale,
    readable_scale,
    signed_codes,
)

_INDICES = (torch.int64, torch.int32)


class CpuEmbedding(Kernel):
    """Gathers rows and dequantizes only those.

    Packed: ``data`` uint8 ``(V, D)``, or ``(V, ceil(D / 2))`` with the even column in the low four bits; ``scale`` and
    ``zero`` ``(V, G)``, so that those of a row are adjacent; ``table`` float32 of 16 or 256 values; ``global_scale``.
    """

    name = "cpu.embedding"

    def __init__(self, request: EmbeddingRequest) -> None:
        self.format, self.n, self.k = request.weight, request.n, request.k
        self.out_dtype = request.out_dtype
        kind = kind_of(self.format.element)
        self.kind = Kind.FLOAT4 if kind is Kind.HALVES4 else kind
        self._constants = (
            self.n, self.k, self.format.group(self.k), int(self.kind), self.format.scale is ScaleType.E4M3D,
            ops.TYPES[self.out_dtype],
        )  # fmt: skip
        self.form = repr(self._constants).encode()
        """Differs for tables that need another step of a program."""

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        codes = weight.codes().contiguous().view(torch.uint8)
        if self.kind.bits == 4:
            codes = pad(codes & 15, (0, self.k % 2))
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
        packed = {"data": codes.clone(), "scale": readable_scale(weight.scale).t().contiguous()}
        zero = weight.integer_zero() if self.format.zero is ZeroPoint.INT else weight.zero
        if zero is not None:
            packed["zero"] = zero.t().contiguous()
        return native.settled({**packed, **constants_of(weight, self.kind)})

    def unpack(self, packed: Packed) -> QTensor:
        codes = packed["data"]
        if self.kind.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).view(codes.shape[0], -1)[:, : self.k]
        codes = signed_codes(codes, self.format.element).contiguous()
        scale, zero = original_scale(packed["scale"].t().contiguous(), self.format), packed.get("zero")
        zero = None if zero is None else zero.t().contiguous()
        return QTensor.from_codes(codes, scale, zero, self.format, global_scale=global_scale_of(packed))

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None = None, **_given: Tensor) -> Tensor:
        """Indices x, int32 or int64 of any shape, to ``(*x.shape, D)``; raises `IndexError` for one outside 0..V-1."""
        del bias  # an embedding has none
        if x.dtype not in _INDICES:
            check_indices(x, self.n)  # raises
        zeros = integer_and_float_zeros(packed, self.format)
        tables = (packed.get("table"), packed.get("global_scale"))
        try:
            return ops.embedding(x.contiguous(), packed["data"], packed["scale"], *zeros, *tables, *self._constants)  # type: ignore[no-any-return]
        except RuntimeError:  # the library compares every index, which torch would do in two passes
            if has_values(x):
                check_indices(x, self.n)
            raise
