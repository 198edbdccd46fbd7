"""`COLUMNS`: im2col in chunks, quantized, then a product of `int8`; supports every convolution and device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qcore_triton.codes import columns_of_codes

from ..int8 import linear
from ..runtime.device import Device
from .base import ConvCall, Convolution
from .codes import column_codes

_COLUMN_BYTES = 1 << 25
"""Codes of columns made at a time: they stay in the L2 cache until the product reads them."""
_LEAST_COLUMNS = 128


class Chunk(NamedTuple):
    """**Fields:** ``columns``: the number quantized at a time."""

    columns: int


class Columns(Convolution[Chunk]):
    """Quantizes columns, several at a time, and multiplies them."""

    name: ClassVar[str] = "columns"

    def serves(self, device: Device, call: ConvCall) -> bool:
        del device, call
        return True

    def candidates(self, device: Device, call: ConvCall) -> Iterator[Chunk]:
        del device
        yield Chunk(max(_LEAST_COLUMNS, _COLUMN_BYTES // columns_of_codes(call.weight.k) // 128 * 128))

    def launch(self, call: ConvCall, device: Device, config: Chunk) -> Tensor:
        del device
        x, weight, (oh, ow) = call.x, call.weight, call.size
        rows, step, chunks = x.shape[0] * oh * ow, config.columns, []
        for first in range(0, rows, step):
            codes = column_codes(x, call.geometry, call.activation, first, min(step, rows - first), weight)
            chunks.append(linear(codes, weight, call.sums, call.bias, call.result.dtype, call.result.given))
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


COLUMNS = Columns()
