"""How embedding tables are packed: by rows, see `packing`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import Format, QTensor
from qcore.plugin_api import Packed

from .packing import NIBBLE_BITS, NIBBLES, codes_of, parameters, restored, signed, up, words_of


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


def plan_of_table(v: int, d: int, format: Format) -> TablePlan:
    """The plan for a table ``(v, d)`` in a format."""
    return table_plan(v, d, format.element.container_bits, format.group_size)


def pack_table(weight: QTensor, plan: TablePlan) -> dict[str, Tensor]:
    """``data``, ``scale`` and, if there is one, ``zero`` and ``factor``, ``(1, 1)``.

    Meanwhile, all unpacked codes of the table are in memory.
    """
    codes = pad(signed(weight.codes()), (0, plan.groups * plan.group - plan.d)).view(plan.v, plan.groups, plan.group)
    rows = pad(codes, (0, plan.width - plan.group)).flatten(1)
    packed = {name: parameter.t().contiguous() for name, parameter in parameters(weight).items()}
    packed["data"] = words_of(rows) if plan.bits == NIBBLE_BITS else rows.contiguous()
    if weight.global_scale is not None:
        packed["factor"] = weight.global_scale.reshape(1, 1).clone()
    return packed


def unpack_table(packed: Packed, plan: TablePlan, format: Format) -> QTensor:
    """The inverse of `pack_table`, bit for bit."""
    rows = codes_of(packed["data"]) if plan.bits == NIBBLE_BITS else packed["data"]
    codes = bare_columns(rows, plan).contiguous()
    return restored(packed, [codes], lambda parameter: parameter.t().contiguous(), (plan.v, plan.d), format)


def bare_columns(rows: Tensor, plan: TablePlan) -> Tensor:
    """Rows ``(n, groups * width)`` to ``(n, d)``."""
    if plan.width == plan.group or plan.groups == 1:
        return rows[:, : plan.d]
    spread = rows.view(rows.shape[0], plan.groups, plan.width)[:, :, : plan.group]
    return torch.flatten(spread, 1)[:, : plan.d]
