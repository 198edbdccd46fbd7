"""Experts that a file stores one by one, as the fused experts of transformers 5's models.

A file has ``...experts.0.gate_proj.weight``, ``up_proj`` and ``down_proj`` (Mixtral: ``w1``, ``w3`` and ``w2``, in a
module ``block_sparse_moe``); the model has the parameters ``...mlp.experts.gate_up_proj`` (E, 2 I, H) and ``down_proj``
(E, H, I). Weights are joined as they are, quantized or float.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from ..nn.experts import QuantizedExperts, expert_weights
from ..weights.qtensor import QTensor
from .archive import Archive
from .imported import ImportedArchive
from .importers.base import ForeignTensor, ForeignWeight, Plan, Read
from .records import Record

_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_OLD, _NEW = ".block_sparse_moe.", ".mlp."
_FUSED, _DOWN = "gate_up_proj", "down_proj"


def fuse_experts(archive: Archive, model: nn.Module) -> Archive:
    """The archive with the experts of ``model`` joined; itself where nothing is to join.

    Experts that cannot be joined (of different formats, or with an order) are left, so that a load names them.
    """
    plan, taken = Plan(), set[str]()
    for name, module in model.named_modules():
        fused = isinstance(module, QuantizedExperts) or _FUSED in expert_weights(module)
        if name and fused and f"{name}.{_FUSED}" not in archive.entries:
            taken |= _join(archive, name, plan)
    if not plan.weights and not plan.tensors:
        return archive
    own = [record for name, record in archive.records.items() if name not in taken and name not in archive.aliases]
    plan.weights += [_same(archive, record) for record in own]
    plan.tensors += [_renamed(archive, name) for name in archive.plain_names() if _is_router(name)]
    plan.dropped |= archive.guards
    found = ImportedArchive.of(archive, archive.method if isinstance(archive, ImportedArchive) else "", plan)
    found.version = archive.version
    found.records |= {record.name: record for record in own}
    _keep_aliases(archive, found)
    return found


def _keep_aliases(archive: Archive, found: Archive) -> None:
    for name, target in archive.aliases.items():
        if target in found.records or target in found.entries:
            found.aliases[name] = target
            if name in archive.records:
                found.records[name] = archive.records[name]


def _is_router(name: str) -> bool:
    """Whether it is the router beside joined experts, which is in a module of another name, too."""
    return _OLD in name and name.endswith(".gate.weight")


def _renamed(archive: Archive, name: str) -> ForeignTensor:
    entry = archive.entry(name)
    return ForeignTensor(name.replace(_OLD, _NEW), entry.dtype, entry.shape, (name,), _reader(name))


def _reader(name: str) -> Callable[[Read], torch.Tensor]:
    return lambda read: read(name)


def _same(archive: Archive, record: Record) -> ForeignWeight:
    """A weight as it is."""
    scale = archive.entries[f"{record.name}.scale"].dtype
    dtype = scale if scale in (torch.float16, torch.bfloat16) else torch.float32
    return ForeignWeight(
        record.name, record.shape, record.scheme, record.tensor_names, lambda _: archive.quantized(record.name), dtype,
        record.order,
    )  # fmt: skip


def _join(archive: Archive, name: str, plan: Plan) -> set[str]:
    """Plan the two weights of the experts called ``name``. Returns the names that they are made of."""
    stored = archive.records.keys() | set(archive.entries)
    prefixes = dict.fromkeys((name, name.replace(_NEW, _OLD)))
    for prefix in prefixes:
        for gate, up, down in _NAMES:
            numbers = _numbers(stored, prefix, down)
            groups = {_FUSED: (gate, up), _DOWN: (down,)}
            parts = {w: [[f"{prefix}.{e}.{p}.weight" for p in group] for e in numbers] for w, group in groups.items()}
            if numbers and all(part in stored for rows in parts.values() for row in rows for part in row):
                return _planned(archive, name, parts, plan)
    return set()


def _numbers(stored: set[str], prefix: str, down: str) -> range:
    """The numbers of experts that are stored, from 0 on."""
    pattern = re.compile(rf"{re.escape(prefix)}\.([0-9]{{1,6}})\.{down}\.weight")
    found = {int(match[1]) for match in map(pattern.fullmatch, stored) if match}
    return range(len(found)) if found == set(range(len(found))) else range(0)


def _planned(archive: Archive, name: str, parts: Mapping[str, list[list[str]]], plan: Plan) -> set[str]:
    made = [_one(archive, f"{name}.{which}", rows) for which, rows in parts.items()]
    if any(one is None for one in made):
        return set()
    plan.weights += [one for one in made if isinstance(one, ForeignWeight)]
    plan.tensors += [one for one in made if isinstance(one, ForeignTensor)]
    return {part for rows in parts.values() for row in rows for part in row}


def _one(archive: Archive, target: str, rows: list[list[str]]) -> ForeignWeight | ForeignTensor | None:
    """One joined weight; None for parts that do not fit together."""
    names = [part for row in rows for part in row]
    if all(name in archive.records for name in names):
        return _quantized(archive, target, rows, [archive.records[name] for name in names])
    if any(name in archive.records for name in names):
        return None
    entries = [archive.entries[name] for name in names]
    first = entries[0]
    if len(first.shape) != 2 or any((e.dtype, e.shape) != (first.dtype, first.shape) for e in entries):
        return None
    shape = (len(rows), first.shape[0] * len(rows[0]), first.shape[1])

    def build(read: Read) -> torch.Tensor:
        return torch.stack([torch.cat([read(name) for name in row]) for row in rows])

    return ForeignTensor(target, first.dtype, shape, tuple(names), build)


def _quantized(archive: Archive, target: str, rows: list[list[str]], records: list[Record]) -> ForeignWeight | None:
    first = records[0]
    same = all((r.format, r.scheme, r.shape) == (first.format, first.scheme, first.shape) for r in records)
    scales = {archive.entries[f"{record.name}.scale"].dtype for record in records}
    static = getattr(first.scheme.activation, "is_given", None) is not None
    if not same or len(scales) > 1 or static or len(first.shape) != 2 or any(record.order for record in records):
        return None
    dtype = scales.pop()

    def build(_: Read) -> QTensor:
        experts = [QTensor.cat([archive.quantized(name) for name in row]) for row in rows]
        return QTensor.stack(experts)

    shape = (len(rows), first.shape[0] * len(rows[0]), first.shape[1])
    sources = tuple(_tensors(records))
    wide = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
    return ForeignWeight(f"{target}.weight", shape, first.scheme, sources, build, wide)


def _tensors(records: list[Record]) -> Iterator[str]:
    for record in records:
        yield from record.tensor_names
