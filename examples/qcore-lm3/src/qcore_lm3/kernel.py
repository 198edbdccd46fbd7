"""``linear`` on the CPU from three bytes per eight weights: half of a 24-bit word looks up four values at once."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from qcore.plugin_api import LinearRequest, Packed, QTensor, RowsKernel, check_weight

from .format import LM3, Dense3

_CHUNK = 1 << 19
"""Weights that are decoded at a time: 2 MiB of float32, which stay in a core's cache until they are multiplied."""

_DENSE = Dense3()


def _fours() -> Tensor:
    """The values of every four neighbouring codes, float32 ``(4096, 4)``; the lowest bits are the first code."""
    values = LM3.values or ()
    rows = [(a, b, c, d) for d, c, b, a in itertools.product(values, repeat=4)]
    return torch.tensor(rows, dtype=torch.float32)


class Linear(RowsKernel):
    """``x @ W.T + bias`` for float x; decodes some output rows and multiplies before it decodes the next."""

    def __init__(self, request: LinearRequest) -> None:
        self.name = "lm3.linear"
        self.n, self.k, self.format, self.out_dtype = request.n, request.k, request.weight, request.out_dtype
        self.group, self.groups = self.format.group(self.k), self.format.groups(self.k)
        # A product in bfloat16 accumulates in float32; float16 is slow on CPUs.
        narrow = request.x_dtype == torch.bfloat16 and request.out_dtype == request.x_dtype
        self.compute = torch.bfloat16 if narrow else torch.float32

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        check_weight(self.name, weight, self.format, self.n, self.k)
        packed = {"data": _DENSE.encode(weight.codes()), "scale": weight.scale, "fours": _fours().to(weight.device)}
        return packed if weight.zero is None else {**packed, "zero": weight.zero}

    def unpack(self, packed: Packed) -> QTensor:
        codes = _DENSE.decode(packed["data"], self.k)
        return QTensor.from_codes(codes, packed["scale"], packed.get("zero"), self.format)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **_given: Tensor) -> Tensor:
        x = x.to(self.compute)
        scale, zero = packed["scale"].t().float(), packed.get("zero")
        zero = None if zero is None else zero.t().float()
        step = max(64, _CHUNK // max(1, self.k))
        parts = []
        for start in range(0, max(1, self.n), step):
            rows = slice(start, start + step)
            weight = self._dense(packed, rows, scale[rows], None if zero is None else zero[rows])
            with torch.autocast(x.device.type, enabled=False):  # it would round sums in float32
                parts.append(F.linear(x, weight.to(self.compute)))
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return (y if bias is None else y.float() + bias.float()).to(self.out_dtype)

    def _dense(self, packed: Packed, rows: slice, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Some rows of the weight, float32 ``(rows, K)``."""
        data = packed["data"][rows]
        n, width = data.shape[0], data.shape[1] // 3 * 8
        low, middle, high = data.reshape(n, width // 8, 3).int().unbind(-1)
        index = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), -1)
        values = F.embedding(index.reshape(n, width // 4), packed["fours"]).reshape(n, width)
        if self.groups == 1:
            values = values[:, : self.k] * scale
            return values if zero is None else values + zero
        wanted = self.groups * self.group
        values = F.pad(values, (0, wanted - width)) if wanted > width else values[:, :wanted]
        values = values.reshape(n, self.groups, self.group) * scale.unsqueeze(-1)
        values = values if zero is None else values + zero.unsqueeze(-1)
        return values.reshape(n, wanted)[:, : self.k]
