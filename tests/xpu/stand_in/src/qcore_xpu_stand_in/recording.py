"""What was asked of the device's ops."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One call of an op, by name.

    **Fields:** ``dtypes``, ``shapes``, ``strides``: of its tensors by argument; ``group``: of int4 weights, else None;
    ``tensors``: the tensors themselves.
    """

    op: str
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    strides: dict[str, tuple[int, ...]]
    group: int | None
    tensors: dict[str, Tensor]


_MOST = 64
"""Calls that are kept: a run of the conformance kit makes tens of thousands."""
_calls: deque[Call] = deque(maxlen=_MOST)


def record(op: str, group: int | None = None, **tensors: Tensor) -> None:
    """Note a call."""
    _calls.append(
        Call(
            op,
            {name: t.dtype for name, t in tensors.items()},
            {name: tuple(t.shape) for name, t in tensors.items()},
            {name: tuple(t.stride()) for name, t in tensors.items()},
            group,
            {name: t.detach().clone() for name, t in tensors.items()},
        )
    )


def calls() -> list[Call]:
    """The last calls, oldest first."""
    return list(_calls)


def forget() -> None:
    """Drop what was recorded."""
    _calls.clear()
