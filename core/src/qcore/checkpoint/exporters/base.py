"""The interface of exporters: each describes the tensors of a layer in another tool's format, and its settings.

Nothing is quantized again and nothing is rounded: a layer that the format cannot represent is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...formats import PLAIN, ScaleType, ZeroPoint
from ...weights.qtensor import QTensor
from ..header import TensorSpec
from ..importers.base import LayerRefused
from ..importers.packing import SIGN_OF_NIBBLES
from ..records import Record


@dataclass(frozen=True)
class Layer:
    """A quantized layer to write.

    **Fields:** ``name``: of the layer in the model; ``record``: of its weight; ``scale_dtype``: of its scales when
    read; ``zero``: reads its zero points, (G, N), before the weight is read; None without.
    """

    name: str
    record: Record
    scale_dtype: torch.dtype
    zero: Callable[[], Tensor | None]

    @property
    def n(self) -> int:
        """Outputs."""
        return self.record.shape[-2]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.record.shape[-1]

    @property
    def groups(self) -> int:
        """The number of scales per output."""
        return self.record.format.groups(self.k)

    def specs(self, **tensors: tuple[torch.dtype, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
        """The tensors of the layer, from dtype and shape by suffix."""
        return tuple(TensorSpec(f"{self.name}.{suffix}", *what) for suffix, what in tensors.items())


@dataclass(frozen=True)
class Written:
    """How a layer is written. ``pack``: the values of ``specs``, in this order, from the weight in layout PLAIN."""

    specs: tuple[TensorSpec, ...]
    pack: Callable[[QTensor], Sequence[Tensor]]


class Exporter(Protocol):
    """Describes one checkpoint. ``scales``: the dtype of the tool's scales, None for any float dtype."""

    scales: torch.dtype | None

    def add(self, layer: Layer) -> Written:
        """Describe a layer. Raises `LayerRefused`."""
        ...

    def settings(self, float_layers: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of the layers that were added; ``float_layers``: the layers that stay float."""
        ...


@contextmanager
def noting_refusal(name: str, refused: dict[str, str]) -> Iterator[None]:
    """Note a `LayerRefused` in ``refused``, so that the error of the conversion can name every layer."""
    try:
        yield
    except LayerRefused as reason:
        refused[name] = str(reason)


def check_integer_groups(layer: Layer, bits: tuple[int, ...], *, order: bool = False) -> None:
    """Raise `LayerRefused` unless a layer has integer codes of one of these widths in full groups, and float scales."""
    format = layer.record.format
    if len(layer.record.shape) != 2:
        raise LayerRefused("it holds several experts in one tensor")
    if format.dtype not in [f"int{b}" for b in bits] or format.zero is ZeroPoint.FLOAT:
        raise LayerRefused(f"its format is {format}")
    if format.scale is not ScaleType.FLOAT:
        raise LayerRefused(f"its scales are {format.scale.value}")
    if layer.record.order and not order:
        raise LayerRefused("its columns have an order")
    if format.group_size and layer.k % format.group_size and layer.groups > 1:
        raise LayerRefused(f"its last group is not full: {layer.k} columns in groups of {format.group_size}")


def check_float_activation(layer: Layer) -> None:
    """Raise `LayerRefused` for a layer that quantizes its input or output: the format is for weights only."""
    if layer.record.scheme.activation is not None or layer.record.scheme.output is not None:
        raise LayerRefused(f"its scheme {layer.record.scheme} quantizes activations")


def check_one_format(layers: Sequence[Layer], layer: Layer, key: Callable[[Layer], object], rule: str) -> None:
    """Raise `LayerRefused` if ``key`` of ``layer`` differs from that of those before it; ``rule``: of the tool."""
    if layers and key(layers[0]) != key(layer):
        first = layers[0]
        raise LayerRefused(f"its format is {layer.record.format}, but {first.name!r} has {first.record.format}; {rule}")


def check_multiple(layer: Layer, n: int, k: int) -> None:
    """Raise `LayerRefused` unless N and K fill whole words."""
    if layer.n % n or layer.k % k or not layer.n or not layer.k:
        raise LayerRefused(f"its shape is {layer.record.shape}; it must be a multiple of ({n}, {k}) to fill words")


def offset_bytes(weight: QTensor) -> Tensor:
    """The unsigned codes of int4 or int8, packed sequentially along K, uint8 (N, K * bits / 8), columns in order.

    Undoes the order of columns: the stored column j is feature ``order[j]``.
    """
    if weight.order is not None:
        weight = unordered(weight)
    data = weight.convert(PLAIN).data
    return data ^ SIGN_OF_NIBBLES if weight.format.bits == 4 else data.view(torch.uint8) ^ 128


def unordered(weight: QTensor) -> QTensor:
    """The same codes with the columns in the order of the features; its scales no longer belong to its columns."""
    assert weight.order is not None
    stored = weight.codes()
    codes = torch.empty_like(stored)
    codes[:, weight.order.long()] = stored
    return QTensor.from_codes(codes, weight.scale, weight.zero, weight.format)


def unsigned_zeros(weight: QTensor, bits: int) -> Tensor:
    """Unsigned zero points, uint8 (G, N); the centre of the codes for a weight without zero points."""
    centre = 1 << (bits - 1)
    if weight.zero is None:
        return torch.full(weight.scale.shape, centre, dtype=torch.uint8)
    return (weight.zero.to(torch.int16) + centre).to(torch.uint8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes of 4 or 8 bits, uint8 (R, C), packed sequentially along C as int32 (R, ceil(C * bits / 32))."""
    per_word = 32 // bits
    missing = -codes.shape[1] % per_word
    padded = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    raw = padded if bits == 8 else padded[:, ::2] | (padded[:, 1::2] << 4)
    return raw.contiguous().view(torch.int32)
