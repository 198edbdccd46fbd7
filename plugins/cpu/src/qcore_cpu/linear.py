"""The kernel of the contract ``linear``: ``cpu.linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from qcore import LinearRequest, QTensor
from qcore.plugin_api import Packed, RowsKernel, check_weight, given_numbers

from . import native, ops
from .direct import direct_linear, form_of
from .kinds import Mode, needs_sums, numbers_of
from .layout import WeightLayout
from .parameters import readable_bias


class CpuLinear(RowsKernel):
    """Any weight with float or int8 activations; see `WeightLayout` for the packed tensors."""

    name = "cpu.linear"

    def __init__(self, request: LinearRequest) -> None:
        self.format, self.n, self.k = request.weight, request.n, request.k
        self.out_dtype = request.out_dtype
        self.layout = WeightLayout(self.format, self.n, self.k, sums=needs_sums(request.activation))
        scale, zero = numbers_of(request.activation)
        out_scale, out_zero = given_numbers(request.output)
        self._constants = (
            *self.layout.numbers, int(Mode.of(request.activation)), self.layout.divides, scale, zero,
            out_scale or 1.0, out_zero, ops.TYPES[self.out_dtype],
        )  # fmt: skip
        self.form = form_of(request, self.layout.at.group)
        """For a step of a program; None if calls take more than x."""
        self.direct = direct_linear(request, self.form)
        """The call past torch's dispatcher, if there is one for such layers."""

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        """Run on x ``(..., K)``, giving ``(..., N)``; raises `FormatError` for another K."""
        y = self.direct(x, packed, bias) if self.direct is not None and not given else None
        return super().__call__(x, packed, bias, **given) if y is None else y

    @property
    def packing(self) -> str:
        """Two layouts: with and without the sums that zero points of x need."""
        return f"{self.name}.sums" if self.layout.sums else self.name

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Raises `FormatError` unless the weight has the format and shape the kernel was made for."""
        check_weight(self.name, weight, self.format, self.n, self.k)
        return native.settled(self.layout.pack(weight))

    def unpack(self, packed: Packed) -> QTensor:
        return self.layout.unpack(packed)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **given: Tensor) -> Tensor:
        return ops.linear(  # type: ignore[no-any-return]
            x.contiguous(), *self.layout.arguments(packed), readable_bias(bias),
            _as(given.get("x_scale"), torch.float32), _as(given.get("x_zero_point"), torch.int32),
            _as(given.get("out_scale"), torch.float32), _as(given.get("out_zero_point"), torch.int32),
            *self._constants,
        )  # fmt: skip


def _as(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(dtype)
