"""The interface of a convolution's kernel, and the arguments of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from qcore_triton.codes import Given
from qcore_triton.geometry import Geometry
from qcore_triton.weights import Weight

from ..runtime.device import Device

_EXACT_K = 1 << 15
"""Below this K, sums of products and their corrections by zero points fit int32."""


class ActivationParameters(NamedTuple):
    """Parameters of x: per column, ``symmetric`` or not, if ``scale`` is None; else one scale and zero point."""

    symmetric: bool
    scale: float | None
    zero: int

    @property
    def given(self) -> Given | None:
        """Scale and zero point as arguments of `qcore_triton.codes.mode_of`."""
        return None if self.scale is None else Given(self.scale, self.zero)


class Result(NamedTuple):
    """**Fields:** ``dtype`` of the result; ``scale``, ``zero``: of int8 results, else None and 0."""

    dtype: torch.dtype
    scale: float | None
    zero: int

    @property
    def given(self) -> Given | None:
        """Scale and zero point of int8 results, as arguments of `int8.linear`."""
        return None if self.scale is None else Given(self.scale, self.zero)

    @property
    def numbers(self) -> tuple[float, float]:
        """Scale and zero point as numbers of a kernel's epilogue; 1 and 0 for float results."""
        return (1.0, 0.0) if self.scale is None else (float(self.scale), float(self.zero))


class ConvCall(NamedTuple):
    """A convolution of one channel group.

    **Fields:** ``x``: ``(B, IC, H, W)``, B >= 1; ``weight``: packed, ``(OC, KH * KW * IC)``; ``sums``: of its codes,
    int32 ``(G, OC)``, needed if x has a zero point; ``bias``: ``(OC,)``; ``geometry``; ``activation``; ``result``.
    """

    x: Tensor
    weight: Weight
    sums: Tensor | None
    bias: Tensor | None
    geometry: Geometry
    activation: ActivationParameters
    result: Result

    @property
    def size(self) -> tuple[int, int]:
        """(OH, OW)."""
        return self.geometry.output(*self.x.shape[2:])

    @property
    def per_channel(self) -> bool:
        """Whether the weight is int8 per channel without zero point, and int32 sums over all of K are exact."""
        w = self.weight
        return w.bits == 8 and w.zero is None and w.scale.shape[0] == 1 and w.k < _EXACT_K

    @property
    def one_scale(self) -> bool:
        """Whether a product can gather its columns from codes of the image: x has a single scale, and 32 divides IC."""
        return self.activation.scale is not None and self.sums is not None and self.x.shape[1] % 32 == 0


C = TypeVar("C", bound=tuple[Any, ...])
"""A kernel's configuration: a named tuple of plain values."""


class Convolution(ABC, Generic[C]):
    """A kernel that convolves."""

    name: ClassVar[str]

    @abstractmethod
    def serves(self, device: Device, call: ConvCall) -> bool:
        """Whether the kernel supports a call."""

    @abstractmethod
    def candidates(self, device: Device, call: ConvCall) -> Iterator[C]:
        """Configurations for a call that it supports, the best first; at least one."""

    @abstractmethod
    def launch(self, call: ConvCall, device: Device, config: C) -> Tensor:
        """Rows ``(B * OH * OW, OC)`` of ``call.result.dtype``."""
