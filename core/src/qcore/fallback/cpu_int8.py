"""``torch.cpu.w8a8`` and ``torch.cpu.w4a8``: kernels on oneDNN's int8 product.

With ``x = s_x (q_x - z_x)`` per token and ``W = s q + added`` per group (an integer zero point z means added = -s z)::

    y = s_x * (sum over groups of s * (q_x @ q)  +  xsum @ added  -  z_x * colsum) + bias

where xsum holds the sums of q_x per group and colsum the sums of W along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contracts import LinearRequest
from ..discovery.kernels import Packed, RowsKernel, check_weight
from ..formats import ZeroPoint
from ..weights.activations import DynamicInt8, StaticInt8
from ..weights.qtensor import QTensor
from . import onednn
from .codes import group_sums, quantized, static_codes, symmetric_token, symmetric_tokens, unsigned
from .integer import Given, finish

MOST_ROWS = 1024
"""Longer inputs are cut, so that float32 copies of x and y stay small."""


class CpuInt8(RowsKernel):
    """What the kernels share: the packed weight.

    Packed: ``weight_<i>``: the prepacked codes of group i (int4 ones as int8); ``scale`` and ``zero``: as they are;
    ``scale32``: the scale in float32 where it is not already; ``added`` ``(G, N)`` float32 where there is a zero point;
    ``colsum`` ``(N,)`` float32; ``zeros`` ``(N,)`` int32.
    """

    def __init__(self, name: str, request: LinearRequest) -> None:
        self.name, self.format, self.n, self.k = name, request.weight, request.n, request.k
        self.activation, self.output, self.out_dtype = request.activation, request.output, request.out_dtype
        self.groups, self.group = self.format.groups(self.k), self.format.group(self.k)
        self._traced, self._traced_codes = onednn.traced_product(), onednn.traced_codes()

    @property
    def packing(self) -> str:
        return "torch.cpu.int8"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        check_weight(self.name, weight, self.format, self.n, self.k)
        parts = torch.split(weight.codes(), self.group, dim=1)
        packed = {f"weight_{i}": onednn.prepack(part) for i, part in enumerate(parts)}
        scale, zero = weight.scale.float(), weight.integer_zero()
        colsum = (torch.stack([part.sum(1) for part in parts]) * scale).sum(0)
        packed["scale"] = weight.scale
        if scale is not weight.scale:
            packed["scale32"] = scale
        if weight.zero is not None:
            packed["zero"] = weight.zero
            packed["added"] = weight.zero.float() if zero is None else -zero.float() * scale
            colsum = colsum + sum(part.shape[1] * a for part, a in zip(parts, packed["added"], strict=True))
        # oneDNN wants zero points of the weight, though it heeds none.
        return {**packed, "colsum": colsum, "zeros": torch.zeros(self.n, dtype=torch.int32, device="cpu")}

    def unpack(self, packed: Packed) -> QTensor:
        call = self._traced_codes if torch.compiler.is_compiling() else onednn.codes_of
        data = self.format.codec.encode(call(self._weights(packed)))
        return QTensor(data, packed["scale"], packed.get("zero"), (self.n, self.k), self.format)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.run(x, packed, bias, **given)
        if not torch.compiler.is_compiling() and x.shape[0] > MOST_ROWS:
            return torch.cat([self.run(p, packed, bias, **g) for p, g in _pieces(x, given)])
        return self._rows(x.contiguous(), packed, bias, given)

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, given: Given) -> Tensor:
        raise NotImplementedError

    def _weights(self, packed: Packed) -> list[Tensor]:
        return [packed[f"weight_{i}"] for i in range(self.groups)]

    def _product(self, codes: Tensor, packed: Packed) -> Tensor:
        multiply = self._traced if torch.compiler.is_compiling() else onednn.int8_product
        return multiply(codes, self._weights(packed), scale32(packed), packed["zeros"])

    def _sums(self, values: Tensor, packed: Packed) -> Tensor | None:
        """Sums of float32 whole numbers ``(M, K)`` per group, ``(M, G)``, where a zero point needs them."""
        return group_sums(values, self.group) if "added" in packed else None


class CpuInt8Activations(CpuInt8):
    """int8 activations of every kind, int4 or int8 weights, any groups and zero points; a float or an int8 result."""

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, given: Given) -> Tensor:
        assert self.activation is not None
        if self.activation == DynamicInt8() and "added" not in packed:
            symmetric, tokens = symmetric_tokens(x)
            return finish(self._product(symmetric, packed), tokens, bias, self.output, self.out_dtype, given)
        values, scale, zero = quantized(self.activation, x, given)
        sums = self._sums(values, packed)
        y = self._product(unsigned(values), packed)
        if sums is not None:
            y = y.addmm_(sums, packed["added"])
        if isinstance(zero, Tensor):
            y = y.addmm_(zero, packed["colsum"].unsqueeze(0), alpha=-1.0)
        elif zero:
            y = y.sub_(packed["colsum"], alpha=zero)
        return finish(y, scale, bias, self.output, self.out_dtype, given)


class CpuOneScale(CpuInt8Activations):
    """The same for one activation scale and no zero point of the weight: the op's own epilogue rounds once."""

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, given: Given) -> Tensor:
        static = self.activation if isinstance(self.activation, StaticInt8) else None
        # A number can be read from a plain tensor only: not from a fake one, nor in a graph.
        if torch.compiler.is_compiling() or type(x) is not Tensor or (static is None and x.shape[0] > 1):
            return super()._rows(x, packed, bias, given)
        if static is None:
            (codes, scale), zero = symmetric_token(x), 0
        else:
            scale, zero = float(static.scale or 1.0), static.zero_point
            codes = unsigned(x.float()) if x.dtype == torch.int8 else static_codes(x, scale, zero)
        bias = None if bias is None else bias.float()
        weight, weight_scale = packed["weight_0"], scale32(packed)[0]
        return onednn.scaled_product(codes, scale, zero, weight, weight_scale, packed["zeros"], bias, self.out_dtype)


def scale32(packed: Packed) -> Tensor:
    """The scale ``(G, N)`` in float32."""
    return packed["scale32"] if "scale32" in packed else packed["scale"]


def _pieces(x: Tensor, given: Given) -> list[tuple[Tensor, Given]]:
    rows = torch.split(x, MOST_ROWS)
    cut = {name: torch.split(value, MOST_ROWS) for name, value in given.items()}
    return [(part, {name: values[i] for name, values in cut.items()}) for i, part in enumerate(rows)]


def kernel(request: LinearRequest) -> CpuInt8Activations | None:
    """The kernel for ``request``, None where there is none."""
    fmt, activation = request.weight, request.activation
    if request.device.type != "cpu" or not (request.n and request.k):
        return None
    if not isinstance(activation, (DynamicInt8, StaticInt8)):
        return None
    if not onednn.is_exact(fmt.bits):
        return None
    name = f"torch.cpu.w{fmt.bits}a8"
    one_group = fmt.groups(request.k) == 1 and fmt.zero is ZeroPoint.NONE
    one_scale = activation == DynamicInt8() or (not isinstance(activation, DynamicInt8) and not activation.per_token)
    fused = request.output is None and request.out_dtype in (torch.float32, torch.bfloat16)
    return (CpuOneScale if one_group and one_scale and fused else CpuInt8Activations)(name, request)
