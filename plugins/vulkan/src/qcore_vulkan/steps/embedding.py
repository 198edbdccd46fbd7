"""`embedding` as steps."""

from __future__ import annotations

import torch

from ..builder import Builder, Ref, fold
from ..device import Buffer
from ..layout import DeviceWeight
from .prepare import LANES
from .rows import NUMBERS, Rows, new_rows


def embedding(
    b: Builder, indices: Ref, count: int, weight: DeviceWeight, out_dtype: torch.dtype, out: Ref | None = None
) -> Rows:
    """Rows of the table ``(V, D)``: int32 ``indices``, which are in range, to ``(count, D)``."""
    g = weight.geometry
    y = new_rows(b, count, g.k, out_dtype, out)
    groups = fold(-(-count * g.row_bytes // (4 * LANES)))
    for part in weight.parts:
        sizes = [count, g.k, part.padded_n, g.group, g.groups, g.steps, y.pitch, NUMBERS[out_dtype], g.zero_kind]
        zero = part.scale if part.zero is None else part.zero
        refs: list[Ref | Buffer | None] = [part.codes, part.scale, zero, part.values, indices, None, None, y.ref]
        b.dispatch(
            "embedding",
            (LANES, g.bits, int(out_dtype == torch.float32), g.values),
            groups,
            [*sizes, groups[0], part.first, part.n],
            refs,
        )
    return y
