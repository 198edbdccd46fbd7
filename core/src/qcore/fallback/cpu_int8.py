"""``torch.cpu.w8a8`` and ``torch.cpu.w4a8``: kernels on oneDNN's int8 product.

With ``x = s_x (q_x - z_x)`` per token and ``W = s q + added`` per group (an integer zero point z means added = -s z)::

    y = s_x * (sum over groups of s * (q_x @ q)  +  xsum @ added  -  z_x * colsum) + bias

Here xsum holds the sums of q_x per group, and colsum the sums of W along K.
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
from .integer import RuntimeParams, finish

MAX_ROWS = 1024
"""More rows are processed in pieces, so that the float32 copies of x and y stay small."""


class CpuInt8(RowsKernel):
    """Base of the kernels that share this packed weight.

    Packed: ``weight_<i>``: the prepacked codes of group i (int4 codes as int8); ``scale`` and ``zero``: unchanged;
    ``scale32``: the scale in float32, if it has another dtype; ``added`` ``(G, N)`` float32, if there is a zero point;
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
        # oneDNN requires zero points of the weight, but ignores them.
        return {**packed, "colsum": colsum, "zeros": torch.zeros(self.n, dtype=torch.int32, device="cpu")}

    def unpack(self, packed: Packed) -> QTensor:
        call = self._traced_codes if torch.compiler.is_compiling() else onednn.codes_of
        data = self.format.codec.encode(call(self._weights(packed)))
        return QTensor(data, packed["scale"], packed.get("zero"), (self.n, self.k), self.format)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.run(x, packed, bias, **runtime_params)
        if not torch.compiler.is_compiling() and x.shape[0] > MAX_ROWS:
            return torch.cat([self.run(p, packed, bias, **g) for p, g in _pieces(x, runtime_params)])
        return self._rows(x.contiguous(), packed, bias, runtime_params)

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, runtime_params: RuntimeParams) -> Tensor:
        raise NotImplementedError

    def _weights(self, packed: Packed) -> list[Tensor]:
        return [packed[f"weight_{i}"] for i in range(self.groups)]

    def _product(self, codes: Tensor, packed: Packed) -> Tensor:
        multiply = self._traced if torch.compiler.is_compiling() else onednn.int8_product
        return multiply(codes, self._weights(packed), scale32(packed), packed["zeros"])

    def _sums(self, values: Tensor, packed: Packed) -> Tensor | None:
        """Sum float32 codes ``(M, K)`` per group to ``(M, G)``; None if the weight has no zero point."""
        return group_sums(values, self.group) if "added" in packed else None


class CpuInt8Activations(CpuInt8):
    """Any int8 activation, int4 or int8 weights, any groups and zero points; a float or an int8 result."""

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, runtime_params: RuntimeParams) -> Tensor:
        assert isinstance(self.activation, (DynamicInt8, StaticInt8))
        if self.activation == DynamicInt8() and "added" not in packed:
            symmetric, tokens = symmetric_tokens(x)
            return finish(self._product(symmetric, packed), tokens, bias, self.output, self.out_dtype, runtime_params)
        values, scale, zero = quantized(self.activation, x, runtime_params)
        sums = self._sums(values, packed)
        y = self._product(unsigned(values), packed)
        if sums is not None:
            y = y.addmm_(sums, packed["added"])
        if isinstance(zero, Tensor):
            y = y.addmm_(zero, packed["colsum"].unsqueeze(0), alpha=-1.0)
        elif zero:
            y = y.sub_(packed["colsum"], alpha=zero)
        return finish(y, scale, bias, self.output, self.out_dtype, runtime_params)


class CpuOneScale(CpuInt8Activations):
    """`CpuInt8Activations` for one activation scale and a symmetric per-channel weight.

    The op's own epilogue scales, adds the bias and rounds once.
    """

    def _rows(self, x: Tensor, packed: Packed, bias: Tensor | None, runtime_params: RuntimeParams) -> Tensor:
        static = self.activation if isinstance(self.activation, StaticInt8) else None
        # float(tensor) needs a real tensor: a fake one, or one in a graph, has no value.
        if torch.compiler.is_compiling() or type(x) is not Tensor or (static is None and x.shape[0] > 1):
            return super()._rows(x, packed, bias, runtime_params)
        if static is None:
            (codes, scale), zero = symmetric_token(x), 0
        else:
            scale, zero = float(static.scale or 1.0), static.zero_point
            codes = unsigned(x.float()) if x.dtype == torch.int8 else static_codes(x, scale, zero)
        bias = None if bias is None else bias.float()
        weight, weight_scale = packed["weight_0"], scale32(packed)[0]
        return onednn.scaled_product(codes, scale, zero, weight, weight_scale, packed["zeros"], bias, self.out_dtype)


def scale32(packed: Packed) -> Tensor:
    """Return the scale ``(G, N)`` in float32."""
    return packed["scale32"] if "scale32" in packed else packed["scale"]


def _pieces(x: Tensor, runtime_params: RuntimeParams) -> list[tuple[Tensor, RuntimeParams]]:
    rows = torch.split(x, MAX_ROWS)
    cut = {name: torch.split(value, MAX_ROWS) for name, value in runtime_params.items()}
    return [(part, {name: values[i] for name, values in cut.items()}) for i, part in enumerate(rows)]


def why_not(request: LinearRequest) -> str:
    """Why the kernel does not support ``request``; empty if it does."""
    if request.device.type != "cpu" or not (request.n and request.k):
        return "it runs on the CPU, with weights that are not empty"
    if not isinstance(request.activation, (DynamicInt8, StaticInt8)):
        return "it needs int8 activations"
    return "" if onednn.is_exact(request.weight.bits) else "oneDNN's int8 product is missing, or not exact on this CPU"


def kernel(request: LinearRequest) -> CpuInt8Activations:
    """Return the kernel for a request that `why_not` accepts."""
    fmt, activation = request.weight, request.activation
    assert isinstance(activation, (DynamicInt8, StaticInt8))
    name = f"torch.cpu.w{fmt.bits}a8"
    one_group = fmt.groups(request.k) == 1 and fmt.zero is ZeroPoint.NONE
    one_scale = activation == DynamicInt8() or (not isinstance(activation, DynamicInt8) and not activation.per_token)
    fused = request.output is None and request.out_dtype in (torch.float32, torch.bfloat16)
    return (CpuOneScale if one_group and one_scale and fused else CpuInt8Activations)(name, request)
