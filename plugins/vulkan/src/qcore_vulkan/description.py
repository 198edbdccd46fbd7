"""Properties of a physical device, known without opening it, and the choice of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from .native import NoDevice

_ORDER = ("discrete", "integrated", "virtual", "cpu", "other")
"""Types of devices, the best first."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes.

    ``storage_buffers`` of a shader; ``timestamp_period``: nanoseconds per tick, 0 without timestamps; ``cores``: 0 if
    unknown.
    """

    max_storage_range: int
    max_allocation: int
    max_groups: tuple[int, int, int]
    max_group_size: tuple[int, int, int]
    max_invocations: int
    shared_memory: int
    push_constants: int
    storage_buffers: int
    storage_align: int
    timestamp_period: float
    cores: int


@dataclass(frozen=True)
class Heap:
    """A heap of memory."""

    bytes: int
    device_local: bool


@dataclass(frozen=True)
class MemoryType:
    """A type of memory in a heap."""

    heap: int
    device_local: bool
    host_visible: bool
    coherent: bool
    cached: bool


@dataclass(frozen=True)
class Subgroup:
    """Sizes of subgroups; ``control``: a shader may require one; ``full``: it may require full subgroups."""

    size: int
    min: int
    max: int
    control: bool
    full: bool
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """A cooperative matrix product (m, k) x (k, n); element types as in ``f16``, ``s8``, ``bf16``."""

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str
    result: str
    saturating: bool
    scope: str


@dataclass(frozen=True)
class Description:
    """A physical device.

    ``missing``: why this package cannot use it, empty if it can. ``local_input``: the device reads INPUT as fast as
    its own memory; otherwise INPUT is across a bus.
    """

    index: int
    name: str
    type: str
    vendor_id: int
    device_id: int
    driver_name: str
    driver_info: str
    api_version: str
    device_uuid: str
    driver_uuid: str
    missing: str
    limits: Limits
    heaps: tuple[Heap, ...]
    local_input: bool
    memory_types: tuple[MemoryType, ...]
    subgroup: Subgroup
    features: Mapping[str, bool]
    cooperative_matrix: tuple[Matrix, ...]

    def has_matrix(self, shape: tuple[int, int, int], operand: str, result: str) -> bool:
        """Whether subgroups multiply matrices of ``shape`` (m, n, k) of these element types, as in ``f16``."""
        return any(
            (one.m, one.n, one.k) == shape
            and (one.a, one.b, one.c, one.result) == (operand, operand, result, result)
            and (one.scope, one.saturating) == ("subgroup", False)
            for one in self.cooperative_matrix
        )


_PARTS = {
    "limits": Limits,
    "heaps": Heap,
    "memory_types": MemoryType,
    "subgroup": Subgroup,
    "cooperative_matrix": Matrix,
}


def parse(known: Sequence[Mapping[str, Any]]) -> list[Description]:
    """Descriptions from the JSON of `qv_devices`."""
    return [
        _build(Description, {**one, **{name: _part(kind, one[name]) for name, kind in _PARTS.items()}}) for one in known
    ]


def _part(kind: type[_T], value: Any) -> _T | tuple[_T, ...]:
    return tuple(_build(kind, one) for one in value) if isinstance(value, list) else _build(kind, value)


def _build(kind: type[_T], values: Mapping[str, Any]) -> _T:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: tuple(v) if isinstance(v := values[name], list) else v for name in names})


def _is_named(name: str, part: str) -> bool:
    return part in (re.findall(r"\d+", name) if part.isdecimal() else name)


def select(known: Sequence[Description], wanted: int | str | None = None) -> Description:
    """The device of this index, the best whose name contains the text, or the best. Raises `NoDevice`.

    A text of digits is an index if there is such a device, else a whole number in a name: as in Radeon 7900.
    """
    if not known:
        raise NoDevice("no device: the installed Vulkan drivers report no device")
    if isinstance(wanted, str) and wanted in {str(one.index) for one in known}:
        wanted = int(wanted)
    if isinstance(wanted, int):
        found = [one for one in known if one.index == wanted]
    else:
        found = [one for one in known if _is_named(one.name.casefold(), (wanted or "").casefold())]
    if not found:
        names = ", ".join(f"{one.index}: {one.name}" for one in known)
        raise NoDevice(f"no device: no Vulkan device here matches {wanted!r}; choose one of {names}")
    best = min(found, key=lambda one: (bool(one.missing), _ORDER.index(one.type), one.index))
    if best.missing:
        raise NoDevice(f"no device: {best.name} cannot be used: {best.missing}")
    return best
