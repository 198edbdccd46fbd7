"""`Weight`: a packed weight with its sizes, as the host side of the kernels passes it around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from qcore import FormatError
from qcore.plugin_api import contiguous

NO_ZERO, INT_ZERO, FLOAT_ZERO = 0, 1, 2
"""Kinds of zero points, as in the kernels: w = q * s, (q - z) * s, q * s + z."""

INTEGER = "int"
"""The `Weight.element` of signed integers."""
TABLE = "t"
"""What the `Weight.element` of a table begins with; its numbers follow."""
LONG_GROUP = 256
"""Columns of one scale from which on equal numbers, which 16 bits round alike, are so many that their errors add up.

They cancel if numbers lie around 0: not with float zero points, nor with most tables.
"""


ROWS = 16
"""Rows of a weight are packed this many at a time, and their parameters, too."""


def pitch_of(n: int) -> int:
    """The columns that scales, zero points and sums of codes of n rows have when packed: n rounded up to `ROWS`."""
    return -(-n // ROWS) * ROWS


def check_devices(x: Tensor, data: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Raise `FormatError` unless x, a packed weight's ``data`` and the ``others`` of a call are on one device.

    A kernel takes raw addresses, and would read those of another device as its own.
    """
    index = data.get_device()
    if x.get_device() != index:
        raise FormatError(f"x is on {x.device}, the weight on {data.device}; move both to the same device.")
    for name, tensor in others.items():
        if tensor is not None and tensor.get_device() != index:
            raise FormatError(f"{name} is on {tensor.device}, the weight on {data.device}; move both to one device.")


def nonempty(packed: Tensor | None) -> Tensor | None:
    """A part of a packed weight that is empty if there is none, as `packing.units_of`: then None."""
    return packed if packed is not None and packed.shape[0] else None


def bias_of(bias: Tensor | None, n: int) -> Tensor | None:
    """A contiguous bias, as kernels read it. Raises `FormatError` unless its shape is ``(n,)``."""
    if bias is None:
        return None
    if bias.shape != (n,):
        raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({n},).")
    return contiguous(bias)


def zero_kind(zero: Tensor | None) -> int:
    """`NO_ZERO`, `INT_ZERO` or `FLOAT_ZERO`: the kind of a packed weight's zero points."""
    if zero is None:
        return NO_ZERO
    return INT_ZERO if zero.dtype == torch.int8 else FLOAT_ZERO


class Weight(NamedTuple):
    """A weight ``(n, k)`` packed as described in `packing`.

    **Fields:** ``data``; ``scale``: ``(G, pitch_of(n))``, float32, bfloat16 or float16; ``zero``: None, or as many:
    int8 is subtracted from the codes, the scale's dtype is added to ``q * s``; ``bits``: 4 or 8, of a stored code;
    ``group``: codes along k that share a scale, k per channel; ``element``: what codes decode to, see
    `packing.element_text`; ``factor``: float32 ``(1,)`` that all results are multiplied with, or None; ``units``:
    see `packing.units_of`, or None. A scale may also be uint8, which is e8m0, or int8, the bits of e4m3.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    n: int
    k: int
    bits: int
    group: int
    element: str = INTEGER
    factor: Tensor | None = None
    units: Tensor | None = None

    @property
    def zero_kind(self) -> int:
        """See the function of this name."""
        return zero_kind(self.zero)

    @property
    def rounds_alike(self) -> bool:
        """Whether errors of the weight, rounded to 16 bits, add up over a row, see `LONG_GROUP`."""
        return self.group > LONG_GROUP and (self.zero_kind == FLOAT_ZERO or self.element.startswith(TABLE))

    @property
    def order(self) -> int:
        """Columns per block of planar16, whose order the codes of activations must follow; 0 for rows16."""
        return int(self.data.shape[3]) * 2 if self.bits == 4 else 0

    @property
    def columns(self) -> int:
        """The columns of x that it has codes for, padding behind k included."""
        return int(self.data.shape[1]) * (self.block if self.bits == 4 else 1)

    @property
    def block(self) -> int:
        """Columns of a block, which lies in one group."""
        if self.bits == 4:
            return self.order
        return 64 if self.scale.shape[0] == 1 or self.group % 64 == 0 else 32
