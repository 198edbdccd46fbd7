"""The kernel of the contract ``grouped_linear``: ``cpu.grouped_linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore import FormatError, QTensor
from qcore.plugin_api import GroupedLinearRequest, Kernel, Packed, check_offsets, check_weight

from . import native, ops
from .kinds import Mode, needs_sums, numbers_of
from .layout import WeightLayout
from .parameters import readable_bias


class CpuGroupedLinear(Kernel):
    """One product at a time, over all threads, for each expert that has rows.

    Packed: the tensors of `WeightLayout` with a first dimension E, except for ``table``.
    """

    name = "cpu.grouped_linear"

    def __init__(self, request: GroupedLinearRequest) -> None:
        self.experts, self.n, self.k, self.format = request.experts, request.n, request.k, request.weight
        self.out_dtype = request.out_dtype
        self.layout = WeightLayout(self.format, self.n, self.k, sums=needs_sums(request.activation))
        scale, zero = numbers_of(request.activation)
        self._constants = (
            *self.layout.numbers, int(Mode.of(request.activation)), self.layout.divides, scale, zero,
            ops.TYPES[self.out_dtype],
        )  # fmt: skip

    @property
    def packing(self) -> str:
        """Two layouts: with and without the sums that zero points of x need."""
        return f"{self.name}.sums" if self.layout.sums else self.name

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.experts, self.n, self.k)
        each = [self.layout.pack(weight[e]) for e in range(self.experts)]
        packed = {name: torch.stack([own[name] for own in each]) for name in each[0] if name != "table"}
        return native.settled({**packed, "table": each[0]["table"]} if "table" in each[0] else packed)

    def unpack(self, packed: Packed) -> QTensor:
        shared = {"table": packed["table"]} if "table" in packed else {}
        own = {name: t for name, t in packed.items() if name != "table"}
        return QTensor.stack(
            [self.layout.unpack({**{name: t[e] for name, t in own.items()}, **shared}) for e in range(self.experts)]
        )

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(T, K)`` with ``offsets`` int32 ``(E,)``, giving ``(T, N)``; raises `FormatError` for other x."""
        offsets = given["offsets"]
        if x.dim() != 2 or x.shape[1] != self.k:
            raise FormatError(f"{self.name}: x has shape {tuple(x.shape)}; it must be (T, K) with K={self.k}.")
        if not torch.compiler.is_compiling():
            check_offsets(offsets, self.experts, x.shape[0])
        return ops.grouped_linear(  # type: ignore[no-any-return]
            x.contiguous(), *self.layout.arguments(packed), readable_bias(bias), offsets.contiguous(), *self._constants
        )
