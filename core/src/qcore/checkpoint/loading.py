"""`load_`: load a checkpoint into a fresh model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, FormatError, QcoreWarning
from ..functional.checks import check_module
from ..model import Report, report
from ..model.report import LayerReport
from ..nn.base import QuantizedModule, with_static_parameters
from ..nn.counterparts import rebuild, weight_device_dtype
from ..resolving.binding import WeightStore
from ..runtime import progress as progress_bars
from ..runtime.companions import tell_changed
from ..runtime.progress import Progress, ProgressChoice
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .archive import Archive
from .buffers import unsaved_meta_buffers
from .fusing import fuse_experts
from .header import file_error, shown
from .matching import Match, Swap, match
from .opening import open_checkpoint
from .overlap import find_conflict, is_expanded
from .placing import Transaction
from .values import same_bits

Maker = Callable[[Swap, Scheme], "QuantizedModule | None"]


@dataclass(frozen=True)
class LoadReport(Report):
    """The `Report` of the loaded model. ``missing``, ``unexpected``: names, empty unless ``strict=False``."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def _table(self, lines: Sequence[tuple[str, Sequence[LayerReport]]]) -> str:
        lists = {"missing": self.missing, "unexpected": self.unexpected}
        return "\n".join([super()._table(lines), *(f"{k}: {', '.join(map(shown, v))}" for k, v in lists.items() if v)])


def load_(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    progress: ProgressChoice = None,
) -> LoadReport:
    """Load a checkpoint into a model in place; layers with quantized weights become their quantized counterparts.

    **Arguments:**

    - ``model``: of the architecture that was saved: float, quantized, or on ``meta``. It keeps its devices and dtypes:
      weights are packed for the device of their layer and used in the layer's dtype.
    - ``path``: a ``.safetensors`` file, or a directory with one or with shards and an index.
    - ``strict``: missing or unexpected tensors are an error; otherwise the report lists them.
    - ``device``: for tensors on ``meta``; default the CPU.
    - ``progress``: as for `quantize_`; counts tensors.

    A weight that the model cannot use quantized (of a layer class without a contract) is dequantized to float, as noted
    in the report. Tied weights are tied again. Returns the report of the model. If it raises `CheckpointError`, the
    model is unchanged: everything is read, validated and packed before the first layer is replaced.
    """
    check_module(model, "load_")
    # No inference tensors: they could not be trained or saved for backward. Files are read on the CPU, whatever device
    # the caller's torch.device(...) or set_default_device gives to new tensors.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        with open_checkpoint(Path(path), model) as stored:
            archive = fuse_experts(stored, model)
            found = match(model, archive)
            if strict:
                _check_complete(found, archive)
            own = torch.device(device or "cpu")
            loader = _Loader(model, archive, found, lambda _: own)
            with progress_bars.shown(progress, "loading", "tensors") as tell:
                loader.prepare(tell)
        report = loader.commit()
        tell_changed(model)
        return report


def _dense_reasons(found: Match) -> dict[str, str]:
    """Return the reason by layer for layers with a weight that was dequantized to float."""
    return {
        name.rpartition(".")[0]: f"dequantized to float: {dense.reason}"
        for name, dense in reversed(found.dense.items())
    }


def _check_complete(found: Match, archive: Archive) -> None:
    if not found.missing and not found.unexpected:
        return
    raise CheckpointError(
        f"{archive.path}: its tensors do not match those of the model.\n"
        f"Missing in the checkpoint: {_listing(found.missing)}.\n"
        f"Not used by the model: {_listing(found.unexpected)}.\n"
        f"Build the model that was saved, or pass strict=False to load the rest.{_remedy(found)}"
    )


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(shown(name) for name in names[:5]) or "none") + more


def _remedy(found: Match) -> str:
    if not found.volatile:
        return ""
    return (
        f"\nNo checkpoint holds the buffer {found.volatile[0]!r}: build the model on a real device, or with only its\n"
        f"parameters on meta, as accelerate.init_empty_weights(include_buffers=False) does."
    )


def load_weights(
    model: nn.Module, archive: Archive, device_of: Callable[[str], torch.device], make: Maker | None = None
) -> LoadReport:
    """Load the quantized weights of a checkpoint and nothing else; see `load_`.

    ``archive``: with its experts joined for ``model``, see `fuse_experts`; ``device_of``: the device for a layer or
    tensor on meta, by its name; ``make``: returns another layer for a swap and its scheme, or None for the usual one.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        found = match(model, archive)
        found.plain, found.computed = [], {}
        used = {swap.record.name for swap in found.swaps} | {dense.source for dense in found.dense.values()}
        lost = [name for name in archive.records if name not in used]
        if lost and used and all(_is_of_another_head(name, model) for name in lost):
            what = f"not loaded, as the model has no layer for them: {_listing(lost)}"
            warnings.warn(f"{archive.path}: {what}.", QcoreWarning, stacklevel=2)
        elif lost:
            what = f"the model has no layer for {len(lost)} of its quantized weights: {_listing(lost)}."
            remedy = "Build the model that was saved. Separately stored experts are joined if all have the same format."
            raise file_error(archive.path, what, remedy)
        loader = _Loader(model, archive, found, device_of, make)
        with progress_bars.shown(False, "loading", "tensors") as tell:
            loader.prepare(tell)
        return loader.commit()


def _is_of_another_head(name: str, model: nn.Module) -> bool:
    """Whether a weight belongs to a head that the model lacks: to no part of it, and to none of several blocks."""
    first, *others = name.split(".")
    return not hasattr(model, first) and not any(part.isdecimal() for part in others)


class _Loader:
    """Reads, checks and builds everything outside of the model, then installs all of it, or nothing."""

    def __init__(
        self,
        model: nn.Module,
        archive: Archive,
        found: Match,
        device_of: Callable[[str], torch.device],
        make: Maker | None = None,
    ) -> None:
        self.make = make
        self.model, self.archive, self.found, self.device_of = model, archive, found, device_of
        self.stores: dict[tuple[str, torch.device], WeightStore] = {}
        self.modules: dict[int, QuantizedModule] = {}
        self.values: dict[int, tuple[str, Tensor, Tensor]] = {}
        stand_ins = found.experts.values()
        self.expert_devices = {id(m): s.device for s in stand_ins for m in s.experts.projections().values()}
        self.new_modules = [module for stand_in in stand_ins for module in stand_in.experts.modules()]
        self.replaced: dict[int, tuple[Tensor, Tensor]] = {}
        """Id of a model's tensor to the old tensor and its replacement."""

    def prepare(self, tell: Progress) -> None:
        """Read and validate all values, build and bind the quantized layers. Does not change the model."""
        schemes = [self._scheme(swap) for swap in self.found.swaps]
        plain = len(self.found.plain) + len(self.found.dense)
        total = plain + len(self.found.swaps)
        for done, (name, value) in enumerate(self._plain_values()):
            tell(done, total, name)
            self._stage(name, value)
        self._stage_computed()
        self._check_memory()
        self._tie()
        for done, (swap, scheme) in enumerate(zip(self.found.swaps, schemes, strict=True), start=plain):
            tell(done, total, swap.layer)
            if id(swap.module) not in self.modules:
                made = None if self.make is None else self.make(swap, scheme)
                self.modules[id(swap.module)] = self._rebuilt(swap, scheme) if made is None else made
        self._plan_changes()
        tell(total, total, "")

    def _rebuilt(self, swap: Swap, scheme: Scheme) -> QuantizedModule:
        try:
            return rebuild(swap.module, self._store(swap), scheme)
        except FormatError as error:
            kind, name = type(swap.module).__name__, swap.record.name
            what = f"scheme {scheme} cannot be used by {swap.layer!r}, a {kind}: {error}"
            remedy = "The metadata was edited, or the checkpoint belongs to another model."
            raise file_error(self.archive.path, what.replace("\n", " "), remedy, name) from None

    def _plain_values(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.found.plain:
            yield name, self.archive.read(name)
        for name in self.found.dense:
            yield name, _dense(self.archive.quantized(self.found.dense[name].source), self.found.slots[name])

    def _stage(self, name: str, value: Tensor) -> None:
        slot = self.found.slots[name]
        value = value.to(slot.dtype).contiguous()
        _, _, earlier = self.values.setdefault(id(slot), (name, slot, value))
        if earlier is not value and not same_bits(earlier, value):
            # Tied tensors must be equal in the file: the model can hold only one value.
            raise self._torn_error(name)
        if id(slot) not in self.replaced and (slot.device.type == "meta" or is_expanded(slot)):
            self._replace(slot, value.to(self.device_of(name) if slot.device.type == "meta" else slot.device))

    def _replace(self, slot: Tensor, value: Tensor) -> None:
        new = nn.Parameter(value, slot.requires_grad) if isinstance(slot, nn.Parameter) else value
        self.replaced[id(slot)] = slot, new

    def _torn_error(self, name: str) -> CheckpointError:
        remedy = "Untie them in the model first."
        return file_error(
            self.archive.path, "the model ties it to a tensor that has different values in this file.", remedy, name
        )

    def _stage_computed(self) -> None:
        for name, module, key in unsaved_meta_buffers(self.model):
            buffer = module._buffers[key]  # noqa: SLF001
            if buffer is not None and id(buffer) in self.found.computed:
                self._replace(buffer, self.found.computed[id(buffer)].to(self.device_of(name)))

    def _check_memory(self) -> None:
        """Raise if distinct tensors of the model overlap in memory and cannot hold all of their new values."""
        written = [(name, slot, value) for name, slot, value in self.values.values() if id(slot) not in self.replaced]
        conflict = find_conflict(written)
        if conflict:
            raise self._torn_error(conflict)

    def _tie(self) -> None:
        """Tie parameters in the model that are tied in the file, except in scripted modules."""
        scripted = [m for m in self.model.modules() if isinstance(m, torch.jit.ScriptModule)]
        fixed = {id(parameter) for module in scripted for parameter in module.parameters(recurse=False)}
        for name, target in self.archive.aliases.items():
            mine, other = self.found.slots.get(name), self.found.slots.get(target)
            if not (isinstance(mine, nn.Parameter) and isinstance(other, nn.Parameter)):
                continue
            if _same_device_dtype(mine, other) and id(mine) not in fixed:
                self.replaced[id(mine)] = mine, self.replaced.get(id(other), (other, other))[1]

    def _scheme(self, swap: Swap) -> Scheme:
        """Return the scheme with its calibrated scales and zero points."""
        scheme = swap.record.scheme
        for field, names in swap.static_parameters().items():
            given = {key: self.archive.read(name) for key, name in names.items()}
            try:
                part = with_static_parameters(getattr(scheme, field), given)
            except FormatError as error:
                raise file_error(self.archive.path, str(error), tensor=names["scale"]) from None
            scheme = replace(scheme, **{field: part})
        return scheme

    def _store(self, swap: Swap) -> WeightStore:
        device = self.expert_devices.get(id(swap.module)) or weight_device_dtype(swap.module)[0]
        device = self.device_of(swap.layer) if device.type == "meta" else device
        if (swap.owner, device) not in self.stores:
            # Read no earlier: a neutral weight is freed once packed. Tied layers may be on two devices.
            others = (store for (owner, _), store in self.stores.items() if owner == swap.owner)
            other = next(others, None)
            weight = self.archive.quantized(swap.owner) if other is None else other.neutral()
            self.stores[swap.owner, device] = WeightStore(weight.to(device))
        return self.stores[swap.owner, device]

    def _plan_changes(self) -> None:
        """List all changes to the model; raise for modules that cannot be changed."""
        replacements: dict[int, nn.Module] = {id(s.module): s.experts for s in self.found.experts.values()}
        replacements.update(self.modules)
        self.children = [
            (parent, name, replacements[id(child)])
            for parent in (*self.new_modules, *self.model.modules())
            for name, child in parent._modules.items()  # noqa: SLF001
            if child is not None and id(child) in replacements
        ]
        # The new layers share bias and other tensors with the old ones.
        every = (*self.model.modules(), *self.new_modules, *self.modules.values())
        modules = {id(module): module for module in every}
        self.tensors = [
            (module, key, *self.replaced[id(tensor)])
            for module in modules.values()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())  # noqa: SLF001
            if tensor is not None and id(tensor) in self.replaced
        ]
        for module in (*(parent for parent, _, _ in self.children), *(module for module, *_ in self.tensors)):
            if isinstance(module, torch.jit.ScriptModule):
                what = f"the model holds a scripted {module.original_name}, whose tensors cannot be replaced."
                raise file_error(self.archive.path, what, "Build the model on a real device; script it after loading.")

    def commit(self) -> LoadReport:
        """Change the model. If this raises, the model is restored."""
        transaction = Transaction()
        try:
            with transaction.all_or_nothing():
                self._put(transaction)
                transaction.step = "reporting"
                reasons = _dense_reasons(self.found)
                layers = tuple(replace(row, reason=reasons.get(row.name, row.reason)) for row in report(self.model))
        except Exception as error:
            what = f"the model cannot be changed: {transaction.step} raised {type(error).__name__}: {error}"
            remedy = "The model is unchanged. Load before it is frozen, wrapped or scripted."
            raise file_error(self.archive.path, what.replace("\n", " "), remedy) from error
        return LoadReport(layers, tuple(self.found.missing), tuple(self.found.unexpected))

    def _put(self, transaction: Transaction) -> None:
        for key in list(self.values):
            name, slot, value = self.values.pop(key)
            if id(slot) not in self.replaced:
                transaction.fill(name, slot, value)
        for parent, name, module in self.children:
            transaction.put_module(parent, name, module)
        for holder, name, old, new in self.tensors:
            transaction.put_tensor(holder, name, old, new)
        root = self.modules.get(id(self.model))
        if root is not None:
            assert isinstance(self.model, QuantizedModule)
            transaction.become(self.model, root)


def _same_device_dtype(mine: nn.Parameter, other: nn.Parameter) -> bool:
    return mine is not other and (mine.device, mine.dtype) == (other.device, other.dtype)


def _dense(weight: QTensor, slot: Tensor) -> Tensor:
    """Dequantize a weight to the shape of its slot; those of convolutions have columns in (KH, KW, IC) order."""
    dense = weight.dequantize(torch.float32)
    if slot.dim() != 4:
        return dense
    o, i, h, w = slot.shape
    return dense.reshape(o, h, w, i).permute(0, 3, 1, 2)
