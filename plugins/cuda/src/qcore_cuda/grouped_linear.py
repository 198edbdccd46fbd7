"""The kernel of the contract ``grouped_linear``: ``cuda.grouped_w4a16``, ``..._w8a16``, ``..._w4a8``, ``..._w8a8``."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from qcore import FormatError, QTensor, ZeroPoint
from qcore.plugin_api import GroupedLinearRequest, Kernel, Packed, check_offsets, check_weight, runs_now
from qcore_triton import packing
from qcore_triton.codes import numbers_of

from . import grouped_ops
from .runtime.replay import replays


class CudaGroupedLinear(Kernel):
    """All experts in one launch, which reads the offsets on the device. Packed: as `FloatLinear`, stacked by expert.

    int8 activations are multiplied as whole numbers in bfloat16, which is exact.
    """

    def __init__(self, request: GroupedLinearRequest) -> None:
        codes = request.activation is not None
        element = request.weight.element
        kind = element.bits if element.is_integer else element.name
        self.name = f"cuda.grouped_w{kind}a{8 if codes else 16}"
        self.experts, self.n, self.k, self.format = request.experts, request.n, request.k, request.weight
        self.out_dtype = request.out_dtype
        quantization = numbers_of(request.activation, None)[:3]
        sizes = packing.sizes_of(self.format, self.n, self.k)
        self._constants = (*sizes, packing.element_text(self.format), codes, *quantization, self.out_dtype)
        zero = () if self.format.zero is ZeroPoint.NONE else ("zero",)
        self._parts = itemgetter("data", "scale", *zero, *(("factor",) if self.format.scale.has_global else ()))
        self._replays = replays(self.name, self.experts, self.format, *self._constants)

    @property
    def packing(self) -> str:
        """That of one weight, for each expert."""
        return f"{packing.packing_name(self.format)}*E"

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.experts, self.n, self.k)
        packed: dict[str, Tensor] = {}
        for e in range(self.experts):  # one at a time: the whole is in memory twice at most as packed weight and codes
            for name, part in packing.pack(weight[e]).items():
                if not e:
                    packed[name] = part.new_empty((self.experts, *part.shape))
                packed[name][e] = part
        return packed

    def unpack(self, packed: Packed) -> QTensor:
        """The inverse of `pack`, bit for bit."""
        experts = range(self.experts)
        each = [{name: part[e] for name, part in packed.items()} for e in experts]
        return QTensor.stack([packing.unpack(own, self.format, self.n, self.k) for own in each])

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(T, K)`` with ``offsets`` int32 ``(E,)``, giving ``(T, N)``; raises `FormatError` for other x."""
        offsets = given["offsets"]
        if not runs_now(x):
            return self.run(x, packed, bias, offsets)
        data, scale, *others = self._parts(packed)
        # Everything that a recorded call assumes, the devices of all tensors and the shape of a bias included.
        key: Any = (x.shape, x.stride(), x.dtype, x.get_device(), data.get_device(), scale.dtype)
        key = (*key, offsets.shape, offsets.stride(), offsets.dtype, offsets.get_device())
        tensors: tuple[Tensor, ...] = (x, data, scale, *others, offsets)
        if bias is not None:
            form = (bias.dtype, bias.shape, bias.stride(), bias.get_device(), bias.is_neg())
            key, tensors = (*key, *form), (*tensors, bias)
        replay = self._replays.get(key)
        if replay is not None and (y := replay(tensors)) is not None:
            return y
        return self._replays.first(key, tensors, self.run, x, packed, bias, offsets)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, offsets: Tensor) -> Tensor:
        """A call that is checked, and not replayed."""
        if x.dim() != 2 or x.shape[1] != self.k:
            raise FormatError(f"{self.name}: x has shape {tuple(x.shape)}; it must be (T, K) with K={self.k}.")
        if bias is not None and bias.shape != (self.experts, self.n):
            have, needs = tuple(bias.shape), (self.experts, self.n)
            raise FormatError(f"{self.name}: bias has shape {have}; this weight needs {needs}.")
        if not torch.compiler.is_compiling():
            check_offsets(offsets, self.experts, x.shape[0])
            if not x.shape[0]:
                return x.new_empty((0, self.n), dtype=self.out_dtype)
        call = grouped_ops.grouped_linear if runs_now(x) else grouped_ops.op_grouped_linear
        return call(
            x, packed["data"], packed["scale"], packed.get("zero"), bias, packed.get("factor"), offsets,
            *self._constants,
        )  # fmt: skip
