"""Joins experts that a file stores individually to the fused experts of transformers 5's models.

A file has ``...experts.0.gate_proj.weight``, ``up_proj`` and ``down_proj`` (Mixtral: ``w1``, ``w3`` and ``w2``, in a
module ``block_sparse_moe``); the model has the parameters ``...mlp.experts.gate_up_proj`` (E, 2 I, H) and ``down_proj``
(E, H, I). Weights are joined unchanged, quantized or float; the other tensors of such a block get the model's names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import QcoreWarning
from ..formats import FLOAT_SCALES, ScaleType, ZeroPoint
from ..nn.base import static_parameters
from ..weights.schemes import Scheme
from .archive import Archive
from .expert_names import OLD_BLOCK, Experts, Numbered, Rows, index_of, rows_of
from .header import shown
from .imported import ImportedArchive
from .importers.base import ForeignTensor, ForeignWeight, LayerRefused, Plan, Read, plan_layers
from .joining import join_biases, join_float, join_quantized
from .records import Record

_OLD_ROUTER, _ROUTER = "gate", "router"


def fuse_experts(archive: Archive, model: nn.Module) -> Archive:
    """The archive with the experts of ``model`` joined and under its names; itself if there is nothing to do.

    Raises `CheckpointError` for experts of different formats, naming them. Incomplete experts are left unchanged, so
    that a load lists them.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    modules = [found for name, module in layers.items() if name and (found := Experts.of(name, module))]
    if not modules:
        return archive
    fusing = _Fusing(archive, layers, modules)
    return fusing.result()


class _Fusing:
    """One archive for one model."""

    def __init__(self, archive: Archive, layers: Mapping[str, nn.Module], modules: list[Experts]) -> None:
        self.archive, self.plan = archive, Plan()
        self.taken: set[str] = set()
        self.joined: dict[str, Record] = {}
        self.index = index_of(archive, {base for m in modules for base in m.bases()})
        named = {experts.name: experts for experts in modules}
        self.plan.refused = plan_layers(named, lambda name, _: self._join(named[name])).refused
        self.blocks = {m.old_block: m for m in modules if m.old_block and m.old_block not in layers}
        self.routers = {m.block for m in modules if f"{m.block}.{_OLD_ROUTER}" not in layers}
        self.biases = {
            f"{m.name}.{weight}_bias": f"{m.name}.{weight}.bias"
            for m in modules
            for weight in m.weights
            if m.quantized or all(f"{m.name}.{each}.weight" in archive.records for each in m.weights)
        }

    def result(self) -> Archive:
        """The archive under the model's names."""
        archive, plan = self.archive, self.plan
        gone = self.taken | archive.aliases.keys()
        own = [record for name, record in archive.records.items() if name not in gone]
        names = {record.name: self._renamed(record.name) for record in own}
        plain = [name for name in archive.plain_names() if name not in gone]
        moved = {name: new for name in plain if (new := self._renamed(name)) != name}
        if not (plan.weights or plan.tensors or plan.refused or moved or any(a != b for a, b in names.items())):
            return archive
        plan.weights += [_same(archive, record, names[record.name]) for record in own]
        plan.tensors += [_moved(archive, name, new) for name, new in moved.items()]
        plan.dropped |= archive.guards
        found = ImportedArchive.of(archive, archive.method if isinstance(archive, ImportedArchive) else "", plan)
        found.version, found.metadata = archive.version, archive.metadata
        # Records of other tools have no quantizer; qcore's own do.
        found.records |= {names[record.name]: replace(record, name=names[record.name]) for record in own}
        found.records |= self.joined
        _keep_aliases(archive, found)
        return found

    def _renamed(self, name: str) -> str:
        """The model's name of a tensor that is not joined."""
        start, dot, rest = name.partition(f".{OLD_BLOCK}.")
        if dot and f"{start}.{OLD_BLOCK}" in self.blocks:
            block = self.blocks[f"{start}.{OLD_BLOCK}"].block
            if block in self.routers and rest.startswith(f"{_OLD_ROUTER}."):
                rest = _ROUTER + rest.removeprefix(_OLD_ROUTER)
            return f"{block}.{rest}"
        return self.biases.get(name, name)

    # Joining.

    def _join(self, experts: Experts) -> None:
        for base in experts.bases():
            found = self.index.get(base, {})
            for groups in experts.spellings():
                if all(rows_of(found, parts, "weight") for parts in groups.values()):
                    self._plan(experts, groups, found)
                    return

    def _plan(self, experts: Experts, groups: Mapping[str, tuple[str, ...]], found: Numbered) -> None:
        if experts.alternating and len(groups[experts.weights[0]]) > 1:
            raise LayerRefused("its rows of gate and up alternate in the model; qcore cannot join separate ones")
        for which, parts in groups.items():
            target, rows = f"{experts.name}.{which}", rows_of(found, parts, "weight")
            names = _flat(rows)
            quantized = sum(name in self.archive.records for name in names)
            if quantized not in (0, len(names)):
                raise LayerRefused(f"of the {len(names)} tensors of its {which} only {quantized} are quantized")
            if quantized:
                self._add_quantized(target, rows, [self.archive.records[name] for name in names])
            else:
                self._add_float(target, rows, transposed=experts.transposed)
            self.taken.update(names)
            biases = rows_of(found, parts, "bias")
            if experts.biased and biases:
                self._add_bias(f"{target}.bias" if quantized or experts.quantized else f"{target}_bias", biases)

    def _add_float(self, target: str, rows: Rows, *, transposed: bool) -> None:
        dtype, (n, k) = self._common(rows, 2)
        sizes = (k, n * len(rows[0])) if transposed else (n * len(rows[0]), k)
        build = partial(join_float, rows, dtype, sizes, transposed)
        names = tuple(_flat(rows))
        self.plan.tensors.append(ForeignTensor(target, dtype, (len(rows), *sizes), names, build))

    def _add_bias(self, target: str, rows: Rows) -> None:
        dtype, (n,) = self._common(rows, 1)
        names = tuple(_flat(rows))
        shape = (len(rows), n * len(rows[0]))
        self.plan.tensors.append(ForeignTensor(target, dtype, shape, names, partial(join_biases, rows)))
        self.taken.update(names)

    def _common(self, rows: Rows, dims: int) -> tuple[torch.dtype, tuple[int, ...]]:
        """The common dtype and shape of float tensors."""
        entries = [self.archive.entry(name) for name in _flat(rows)]
        first = entries[0]
        if len(first.shape) != dims or first.dtype not in (*FLOAT_SCALES, torch.float64):
            raise LayerRefused(f"{shown(rows[0][0])!r} is {first.dtype} of shape {first.shape}")
        other = next((e for e in entries if (e.dtype, e.shape) != (first.dtype, first.shape)), None)
        if other is not None:
            raise LayerRefused(
                f"{shown(first.name)!r} is {first.dtype} of shape {first.shape}, but {shown(other.name)!r} "
                f"{other.dtype} of shape {other.shape}"
            )
        return first.dtype, first.shape

    def _add_quantized(self, target: str, rows: Rows, records: list[Record]) -> None:
        # If only some weights have zero points or an order, the others get neutral ones: zeros, and 0, 1, 2...
        first = next((r for r in records if r.format.zero is ZeroPoint.INT), records[0])
        scales = {self.archive.entries[f"{self._stored(r.name)}.scale"].dtype: r.name for r in records}
        without = replace(first.format, zero=ZeroPoint.NONE)
        for record in records:
            alike = record.format == first.format or (first.format.zero is ZeroPoint.INT and record.format == without)
            if not alike or len(record.shape) != 2 or record.shape != first.shape:
                held = f"{first.format} of shape {first.shape}"
                other = f"{shown(record.name)!r} {record.format} of shape {record.shape}"
                raise LayerRefused(f"{shown(first.name)!r} is {held}, but {other}")
        if len(scales) > 1:
            dtypes = " and ".join(f"{dtype} in {shown(name)!r}" for dtype, name in scales.items())
            raise LayerRefused(f"its scales have different dtypes: {dtypes}")
        order, scheme = any(record.order for record in records), self._scheme(target, first, records)
        (dtype,) = scales
        if not self._have_one_global_scale(rows, first):
            # In float32, in which the tool itself combines both.
            scheme = Scheme(replace(first.format, scale=ScaleType.FLOAT), activation=scheme.activation)
            dtype = torch.float32
        n, k = first.shape
        shape = (len(rows), n * len(rows[0]), k)
        sources = tuple(dict.fromkeys(part for r in records for part in self._parts(r)))
        build = partial(join_quantized, self.archive, rows, scheme.weight, shape, order)
        wide = _float_scale(dtype)
        self.plan.weights.append(ForeignWeight(f"{target}.weight", shape, scheme, sources, build, wide, order))
        self.joined[f"{target}.weight"] = Record(
            f"{target}.weight", scheme.weight, shape, _one_or_none(r.quantizer for r in records), scheme, order
        )

    def _have_one_global_scale(self, rows: Rows, like: Record) -> bool:
        """Whether the parts of each expert have the same global scale: a weight has only one."""
        if not like.format.scale.has_global or len(rows[0]) == 1:
            return True
        return all(
            len({None if scale is None else scale.item() for scale in map(self.archive.global_scale, row)}) == 1
            for row in rows
        )

    def _stored(self, name: str) -> str:
        return self.archive.aliases.get(name, name)

    def _parts(self, record: Record) -> tuple[str, ...]:
        return self.archive.records[self._stored(record.name)].tensor_names

    def _scheme(self, target: str, first: Record, records: list[Record]) -> Scheme:
        """The scheme of the joined weight; static activations are kept if all experts have the same parameters."""
        scheme = first.scheme
        if any(r.scheme.activation != scheme.activation for r in records):
            raise LayerRefused(f"the experts of {shown(target)!r} have activations of different kinds")
        scheme, given = replace(scheme, output=None), {}
        for key in static_parameters(scheme.activation):
            given[key] = [f"{record.name.rpartition('.')[0]}.input_{key}" for record in records]
            for name in given[key]:
                entry = self.archive.entries.get(name)
                if entry is None or entry.shape != ():
                    raise LayerRefused(f"its activations are static, but {shown(name)!r} is not a single number")
        self.taken.update(*given.values())
        if all(len({self.archive.read(name).item() for name in names}) == 1 for names in given.values()):
            for key, names in given.items():
                dtype = self.archive.entries[names[0]].dtype
                self.plan.tensors.append(
                    ForeignTensor(f"{target}.input_{key}", dtype, (), tuple(names), _reader(names[0]))
                )
            return scheme
        self.plan.dropped.update(*given.values())
        what = f"{shown(target)!r} has a different input scale for each expert: it runs with float activations"
        warnings.warn(f"{self.archive.path}: {what}.", QcoreWarning, stacklevel=2)
        return replace(scheme, activation=None)


def _flat(rows: Rows) -> list[str]:
    return [name for row in rows for name in row]


def _float_scale(dtype: torch.dtype) -> torch.dtype:
    """The dtype of float scales; float32 for other scale types, whose dtype follows from the format."""
    return dtype if dtype in FLOAT_SCALES else torch.float32


def _reader(name: str) -> Callable[[Read], Tensor]:
    return lambda read: read(name)


def _one_or_none(names: Iterable[str | None]) -> str | None:
    found = set(names)
    return found.pop() if len(found) == 1 else None


def _same(archive: Archive, record: Record, name: str) -> ForeignWeight:
    """An unchanged weight, called ``name``."""
    dtype = _float_scale(archive.entries[f"{record.name}.scale"].dtype)
    return ForeignWeight(
        name, record.shape, record.scheme, record.tensor_names, lambda _: archive.quantized(record.name), dtype,
        record.order,
    )  # fmt: skip


def _moved(archive: Archive, name: str, new: str) -> ForeignTensor:
    entry = archive.entry(name)
    return ForeignTensor(new, entry.dtype, entry.shape, (name,), _reader(name))


def _keep_aliases(archive: Archive, found: Archive) -> None:
    for name, target in archive.aliases.items():
        if target in found.records or target in found.entries:
            found.aliases[name] = target
            if name in archive.records:
                found.records[name] = archive.records[name]
