"""How embedding tables are packed: by rows, see `packing`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Format, QTensor, ZeroPoint
from qcore.plugin_api import Packed

from .packing import NIBBLES, codes_of, float_scale, up, words_of


@dataclass(frozen=True)
class TablePlan:
    """The layout of a table ``(v, d)``: ``groups`` of ``group`` codes each, stored in ``width`` columns."""

    v: int
    d: int
    bits: int
    group: int
    groups: int
    width: int


@lru_cache(maxsize=256)
def table_plan(v: int, d: int, bits: int, group_size: int | None) -> TablePlan:
    """The plan for a table ``(v, d)`` in groups of ``group_size`` codes (None: per row)."""
    group = d if group_size is None else min(group_size, d)
    return TablePlan(v, d, bits, group, -(-d // group), up(group, NIBBLES))


def pack_table(weight: QTensor, plan: TablePlan) -> dict[str, Tensor]:
    """``data``, ``scale`` and, if there is one, ``zero``; meanwhile, all unpacked codes of the table are in memory."""
    codes = pad(weight.codes(), (0, plan.groups * plan.group - plan.d)).view(plan.v, plan.groups, plan.group)
    rows = pad(codes, (0, plan.width - plan.group)).flatten(1)
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    packed = {
        "data": words_of(rows) if plan.bits == 4 else rows.contiguous(),
        "scale": float_scale(weight).t().contiguous(),
    }
    return packed if zero is None else {**packed, "zero": zero.t().contiguous()}


def unpack_table(packed: Packed, plan: TablePlan, format: Format) -> QTensor:
    """The inverse of `pack_table`, bit for bit."""
    rows = codes_of(packed["data"]) if plan.bits == 4 else packed["data"]
    codes = bare_columns(rows, plan).contiguous()
    zero = packed.get("zero")
    zero = None if zero is None else zero.t().contiguous()
    if zero is not None and format.zero is ZeroPoint.INT:
        zero = format.codec.encode_zero(zero)
    return QTensor(format.codec.encode(codes), packed["scale"].t().contiguous(), zero, (plan.v, plan.d), format)


def bare_columns(rows: Tensor, plan: TablePlan) -> Tensor:
    """Rows ``(n, groups * width)`` to ``(n, d)``."""
    if plan.width == plan.group or plan.groups == 1:
        return rows[:, : plan.d]
    spread = rows.view(rows.shape[0], plan.groups, plan.width)[:, :, : plan.group]
    return torch.flatten(spread, 1)[:, : plan.d]
