"""Match the tensors of a checkpoint with those of a model, by names, shapes and dtypes. Reads no values."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, clipped, dtype_name, quoted
from ..nn.base import QuantizedModule, static_parameters
from ..nn.counterparts import (
    is_transposed_linear,
    weight_identity,
    weight_parameter,
    weight_shape,
    why_not_quantizable,
)
from .archive import Archive
from .buffers import recompute_buffers, unsaved_meta_buffers
from .experts import StandIn, stand_ins, with_stand_ins
from .header import Entry, file_error, shown
from .records import Record
from .values import FLOAT_CODES

_STATIC_DTYPES = {"scale": (torch.float64, torch.float32), "zero_point": (torch.int32, torch.int64, torch.int8)}


@dataclass(frozen=True)
class Swap:
    """A layer to replace. ``owner``: name of the stored weight; ``record``: includes the layer's scheme."""

    layer: str
    module: nn.Module
    record: Record
    owner: str

    def static_parameters(self) -> dict[str, dict[str, str]]:
        """Map each field of the scheme with calibrated parameters to their names in the file, by parameter."""
        found = {}
        for field_name, prefix in (("activation", "input"), ("output", "output")):
            start = f"{self.layer}.{prefix}" if self.layer else prefix
            names = {key: f"{start}_{key}" for key in static_parameters(getattr(self.record.scheme, field_name))}
            if names:
                found[field_name] = names
        return found


@dataclass(frozen=True)
class Dense:
    """A quantized weight, called ``source`` in the file, that is dequantized to float, and the reason."""

    source: str
    reason: str


@dataclass
class Match:
    """The plan of a load.

    **Fields:** ``swaps``: layers that become quantized; ``dense``: slots that take a quantized weight dequantized to
    float; ``plain``: slots that take a stored tensor; ``slots``: the model's own tensors by name; ``computed``: values
    of non-persistent meta buffers, by the id of the buffer; ``missing``, ``unexpected``: names; ``volatile``:
    non-persistent meta buffers that cannot be recomputed, a subset of ``missing``; ``experts``: replacements of fused
    float experts, whose layers are in ``swaps``, by name.
    """

    swaps: list[Swap] = field(default_factory=list)
    dense: dict[str, Dense] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    slots: dict[str, Tensor] = field(default_factory=dict)
    computed: dict[int, Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    volatile: list[str] = field(default_factory=list)
    experts: dict[str, StandIn] = field(default_factory=dict)


def match(model: nn.Module, archive: Archive) -> Match:
    """Plan a load. Raises `CheckpointError` if shapes or dtypes do not match."""
    layers = dict(model.named_modules(remove_duplicate=False))
    found = Match(experts=stand_ins(layers, archive.records))
    layers = with_stand_ins(layers, found.experts)
    untransposed = _has_untransposed_conv1d(layers, archive)
    for record in archive.records.values():
        _assign(layers, record, archive, found, untransposed)
    found.swaps += list(_tied_swaps(layers, found.swaps, archive))
    swapped = {id(swap.module) for swap in found.swaps}
    found.slots = dict(_slots(layers, swapped))
    _complete_dense(found, archive)
    _match_plain(found, archive, layers)
    _match_buffers(found, model)
    _check_scaled(found, archive)
    problems = [*_swap_problems(found, archive), *_slot_problems(found, archive)]
    if problems:
        raise _mismatch_error(archive, problems)
    return found


def _assign(layers: dict[str, nn.Module], record: Record, archive: Archive, found: Match, untransposed: bool) -> None:
    layer, _, attribute = record.name.rpartition(".")
    module = layers.get(layer)
    if module is None or attribute != "weight" or not _has_weight(module):
        if module is not None and _is_parameter(module, attribute):
            found.dense[record.name] = Dense(record.name, f"{type(module).__name__} reads {attribute!r} directly")
        else:
            found.unexpected += _stored_names(record, archive)
        return
    if is_transposed_linear(module):
        fits = record.shape == weight_shape(module) and not untransposed
        reason = "" if fits else f"{type(module).__name__} multiplies by the transpose of the matrix that was quantized"
    else:
        reason = why_not_quantizable(layers, layer)
    if reason:
        found.dense[record.name] = Dense(record.name, reason)
    else:
        found.swaps.append(Swap(layer, module, record, archive.aliases.get(record.name, record.name)))


def _has_untransposed_conv1d(layers: dict[str, nn.Module], archive: Archive) -> bool:
    """Whether the weights of Conv1D were quantized in the layout of float files, (K, N).

    `quantize_checkpoint` does so if no config.json names a model with Conv1D. Other tools and `quantize_` store (N, K),
    as for a linear layer. Square weights fit both, so those that are not square decide.
    """
    for record in archive.records.values():
        layer, _, attribute = record.name.rpartition(".")
        module = layers.get(layer)
        if module is not None and attribute == "weight" and is_transposed_linear(module):
            n, k = weight_shape(module)
            if n != k and record.shape == (k, n):
                return True
    return False


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module, QuantizedModule) or weight_parameter(module) is not None


def _is_parameter(module: nn.Module, attribute: str) -> bool:
    """Whether a module without a quantized counterpart holds a parameter, such as experts."""
    return not isinstance(module, QuantizedModule) and dict(module._parameters.items()).get(attribute) is not None  # noqa: SLF001


def _stored_names(record: Record, archive: Archive) -> tuple[str, ...]:
    return (record.name,) if record.name in archive.aliases else record.tensor_names


def _tied_swaps(layers: dict[str, nn.Module], swaps: list[Swap], archive: Archive) -> Iterator[Swap]:
    """Yield layers that the model ties to a quantized layer and that the file does not name, as is usual."""
    by_weight = {weight_identity(swap.module): swap for swap in swaps}
    named = {swap.layer for swap in swaps}
    for layer, module in layers.items():
        kinds = (nn.Linear, nn.Embedding, nn.Conv2d, QuantizedModule)
        if layer in named or not (isinstance(module, kinds) or is_transposed_linear(module)):
            continue
        swap = by_weight.get(weight_identity(module))
        name = f"{layer}.weight"
        absent = name not in archive.entries and name not in archive.aliases
        if swap is not None and absent and not why_not_quantizable(layers, layer):
            yield Swap(layer, module, swap.record, swap.owner)


def _slots(layers: dict[str, nn.Module], swapped: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by name, except weights that are replaced."""
    for layer, module in layers.items():
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001
        lasting = {k: b for k, b in module._buffers.items() if k not in unsaved}  # noqa: SLF001
        for key, tensor in {**dict(module._parameters.items()), **lasting}.items():  # noqa: SLF001
            if tensor is not None and not (key == "weight" and id(module) in swapped):
                yield (f"{layer}.{key}" if layer else key), tensor


def _complete_dense(found: Match, archive: Archive) -> None:
    """Drop names without a slot; add parameters that are tied to a quantized weight but cannot use it quantized."""
    for name in found.dense.keys() - found.slots.keys():
        del found.dense[name]
        found.unexpected += _stored_names(archive.records[name], archive)
    by_weight = {weight_identity(swap.module): swap for swap in found.swaps}
    for name, slot in found.slots.items():
        swap = by_weight.get(id(slot))
        if swap is not None and name not in archive.entries and name not in archive.aliases and name not in found.dense:
            found.dense[name] = Dense(swap.owner, f"the model ties it to {swap.layer!r} and reads it directly")


def _match_plain(found: Match, archive: Archive, layers: dict[str, nn.Module]) -> None:
    static = {name for swap in found.swaps for names in swap.static_parameters().values() for name in names.values()}
    stored = set(archive.plain_names())
    found.plain = [name for name in found.slots if name in stored]
    layers_of = {swap.layer: swap for swap in found.swaps}
    left = sorted(stored - found.slots.keys() - static)
    found.unexpected += [name for name in left if not _changes_nothing(name, layers_of, archive)]
    filled = {id(found.slots[name]) for name in (*found.plain, *found.dense)}
    # Names of transformers' models whose values are computed and not saved, such as Marian's positions.
    computed = getattr(layers.get(""), "_keys_to_ignore_on_save", None) or ()
    kept = {id(slot) for name, slot in found.slots.items() if name in computed and slot.device.type != "meta"}
    found.missing += [name for name, slot in found.slots.items() if id(slot) not in filled | kept]
    found.missing += _quantized_only_in_model(found, layers)


def _changes_nothing(name: str, swaps: dict[str, Swap], archive: Archive) -> bool:
    """Whether a tensor that the model has no slot for is a bias of zeros: AutoGPTQ stores one for every layer."""
    layer, _, attribute = name.rpartition(".")
    if layer not in swaps or attribute != "bias":
        return False
    entry = archive.entry(name)
    fits = entry.dtype.is_floating_point and entry.shape == swaps[layer].record.shape[-2:-1]
    return fits and not bool(archive.read(name).any())


def _match_buffers(found: Match, model: nn.Module) -> None:
    found.computed = recompute_buffers(model)
    lost = unsaved_meta_buffers(model)
    found.volatile = [name for name, module, key in lost if id(module._buffers[key]) not in found.computed]  # noqa: SLF001
    found.missing += found.volatile


def _quantized_only_in_model(found: Match, layers: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of layers that are quantized in the model but not in the file."""
    swapped = {id(swap.module) for swap in found.swaps}
    for layer, module in layers.items():
        if isinstance(module, QuantizedModule) and id(module) not in swapped:
            yield f"{layer}.weight.data" if layer else "weight.data"


def _swap_problems(found: Match, archive: Archive) -> Iterator[str]:
    for swap in found.swaps:
        expected = weight_shape(swap.module)
        if swap.record.shape != expected:
            yield f"{shown(swap.record.name)!r} has shape {swap.record.shape}; {swap.layer!r} needs {expected}"
        for names in swap.static_parameters().values():
            yield from _static_problems(archive, names)


def _static_problems(archive: Archive, names: dict[str, str]) -> Iterator[str]:
    for part, name in names.items():
        dtypes = _STATIC_DTYPES[part]
        entry = archive.entries.get(name)
        if entry is None:
            yield f"{name!r} is missing, although its layer's scheme needs it"
        elif entry.dtype not in dtypes or entry.shape != ():
            yield f"{name!r} is {entry.dtype} of shape {quoted(entry.shape)}; it must be one {dtypes[0]}"


def _slot_problems(found: Match, archive: Archive) -> Iterator[str]:
    for name in (*found.plain, *found.dense):
        slot = found.slots[name]
        if is_lazy(slot):
            yield f"{name!r} is not initialized in the model, so its shape is unknown: run the model once first"
        elif name in found.dense:
            yield from _dense_problems(name, slot, archive.records[found.dense[name].source].shape)
        else:
            yield from _plain_problems(name, slot, archive.entry(name))


def _check_scaled(found: Match, archive: Archive) -> None:
    """Raise for 8-bit floats that a model would take for weights, although a scale belongs to each of them."""
    scales = sorted(name for name in found.unexpected if "scale" in name.rpartition(".")[2])
    of_layer = {name.rpartition(".")[0]: name for name in reversed(scales)}
    for name in found.plain if scales else ():
        entry = archive.entry(name)
        if entry.dtype == found.slots[name].dtype or entry.dtype not in FLOAT_CODES:
            continue
        # Whatever a tool calls it: a parameter of the same layer, or a part of this one.
        scale = of_layer.get(name.rpartition(".")[0])
        for start in (f"{name}.", f"{name}_"):
            following = bisect.bisect_left(scales, start)
            if scale is None and following < len(scales) and scales[following].startswith(start):
                scale = scales[following]
        if scale is not None:
            what = f"it is {dtype_name(entry.dtype)} and {shown(scale)!r} its scale, but no settings say how to use it."
            remedy = "Put the config.json of the checkpoint beside it: its quantization_config names the tool."
            raise file_error(archive.path, what, remedy, name)


def _plain_problems(name: str, slot: Tensor, entry: Entry) -> Iterator[str]:
    if entry.shape != tuple(slot.shape):
        yield f"{name!r} has shape {quoted(entry.shape)}; the model needs {tuple(slot.shape)}"
    elif not _convertible(entry, slot):
        yield f"{name!r} is {entry.dtype}; the model needs {slot.dtype}"


def _dense_problems(name: str, slot: Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    logical = (slot.shape[0], slot.shape[1:].numel()) if slot.dim() == 4 else tuple(slot.shape)
    if slot.dim() not in (2, 3, 4) or shape != logical:
        yield f"{name!r} has shape {shape}; the model needs {tuple(slot.shape)}"


def _convertible(entry: Entry, slot: Tensor) -> bool:
    return entry.dtype == slot.dtype or (entry.dtype.is_floating_point and slot.dtype.is_floating_point)


def _mismatch_error(archive: Archive, problems: list[str]) -> CheckpointError:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return CheckpointError(
        f"{archive.path}: tensor {clipped(problems[0], 700)}{more}.\n"
        f"The checkpoint belongs to another model: build the model with the configuration that was saved."
    )
