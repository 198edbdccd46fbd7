"""`Weight`: a packed weight with its sizes, as functions on the host's side of kernels hand it on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Weight(NamedTuple):
    """A weight ``(n, k)`` packed as `packing` says.

    **Fields:** ``data``; ``scale``: ``(G, n)``, float32, bfloat16 or float16; ``zero``: None, or ``(G, n)``: int8 is
    subtracted from the codes, the scale's dtype is added to ``q * s``; ``bits``: 4 or 8; ``group``: codes along k that
    share a scale, k per channel.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    n: int
    k: int
    bits: int
    group: int

    @property
    def order(self) -> int:
        """Columns per block of planar16, in whose order codes of activations have to be; 0 for rows16."""
        return int(self.data.shape[3]) * 2 if self.bits == 4 else 0
