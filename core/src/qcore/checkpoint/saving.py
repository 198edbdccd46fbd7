"""`save`: write a model with quantized layers, or a state dict, to a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, quoted
from ..formats import Format
from ..formats.bits import has_values
from ..nn.parts import described, place_of, plain
from ..runtime.companions import tell_saving
from ..weights.qtensor import WEIGHT_TENSORS, QTensor
from ..weights.schemes import Scheme
from .header import NAMES, TensorSpec
from .records import WRITE_CONFIG, Record
from .writing import Aliases, Unit, guards, plan_shards, shard_limit, translate_os_errors, write_directory, write_file


def save(
    model_or_state: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a checkpoint in the neutral format.

    **Arguments:**

    - ``model_or_state``: a model; its ``state_dict()``; or a mapping from names to tensors and `QTensor`.
    - ``path``: a name that ends in ``.safetensors`` is one file; anything else is a directory, created if missing.
    - ``max_shard_size``: bytes, or a text such as ``"5GB"``: a directory is split into shards of at most this size.

    Tied tensors are stored once. An existing checkpoint at ``path`` is replaced after everything was written. Raises
    `CheckpointError` for values that cannot be stored (a tensor on ``meta``, an object that is not a tensor) and for
    errors of the file system; in that case nothing is left behind and an existing checkpoint is unchanged.
    """
    given: Any = path
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        what = f"save takes a model or state dict, then a path, not {quoted(given)}."
        raise CheckpointError(f"{what}\nPass the name of a directory, or of a file that ends in .safetensors.")
    target = Path(os.path.realpath(path))
    limit = shard_limit(max_shard_size)
    # Either a link or the file that it points to may have another name: files of a cache are hashes.
    single = ".safetensors" in (Path(path).suffix, target.suffix) and not target.is_dir()
    if single and limit is not None:
        raise CheckpointError(
            f"{path} names one file, which max_shard_size cannot split.\nPass the name of a directory."
        )
    units, aliases = _collect(_mapping_of(model_or_state))
    if isinstance(model_or_state, nn.Module) and tell_saving(model_or_state):
        units += guards(units, WRITE_CONFIG)
    with translate_os_errors(target):
        if single:
            write_file(target, units, aliases, lambda _: None)
        else:
            write_directory(target, plan_shards(units, limit), aliases, lambda _: None)


def described_state(model: nn.Module, *, guarded: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint of ``model`` by name, tied ones once, and the metadata that describes them.

    For programs that write files themselves. ``guarded``: add an empty tensor with the name of the first quantized
    weight: transformers without `qcore.hf` rejects it for its size, instead of giving that weight random values.
    """
    units, aliases = _collect(_mapping_of(model))
    every = [*units, *guards(units)] if guarded else units
    tensors = {spec.name: tensor for unit in every for spec, tensor in zip(unit.specs, unit.fetch(), strict=True)}
    return tensors, aliases.notes(units)


def _mapping_of(model_or_state: Any) -> Mapping[str, Any]:
    """Return the state dict of a model, or the mapping itself."""
    state: Any = _state_dict(model_or_state) if isinstance(model_or_state, nn.Module) else model_or_state
    if not isinstance(state, Mapping):
        raise CheckpointError(f"cannot save a {type(state).__name__}.\nPass a model, its state_dict(), or a mapping.")
    _check_names(state)
    return state


def _state_of(state: Mapping[str, Any]) -> dict[str, Tensor | tuple[QTensor, Scheme]]:
    """Return plain tensors by name, and quantized weights with their schemes."""
    weights = {**_described_weights(state), **_qtensor_weights(state)}
    taken = {f"{name}.{part}" for name in weights for part in WEIGHT_TENSORS} | weights.keys()
    plain = {name: _check_value(name, value) for name, value in state.items() if name not in taken}
    for name in plain:
        if name.endswith(".scale") and f"{name.removesuffix('scale')}data" in plain:
            raise CheckpointError(
                f"cannot save {name!r}: the format of this quantized weight is unknown.\n"
                f"Pass the model or its unchanged state_dict(), or QTensors."
            )
    return {**plain, **weights}


def _state_dict(model: nn.Module) -> Mapping[str, Any]:
    from ..graphs import synchronize  # not with `import qcore`, for which it takes too long

    synchronize(model)  # a compiled model may have written buffers on a device
    return model.state_dict()


def _check_names(state: Mapping[Any, Any]) -> None:
    for name in state:
        if not isinstance(name, str) or name == "__metadata__" or not _is_text(name):
            raise CheckpointError(
                f"cannot save {name!r}: it is not a valid name in safetensors.\nRename it; names must be strings."
            )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _qtensor_weights(state: Mapping[str, Any]) -> dict[str, tuple[QTensor, Scheme]]:
    weights = {name: (value, Scheme(value.format)) for name, value in state.items() if isinstance(value, QTensor)}
    for name in weights:
        taken = next((f"{name}.{part}" for part in WEIGHT_TENSORS if f"{name}.{part}" in state), None)
        if taken is not None:
            raise CheckpointError(
                f"cannot save {taken!r}: the quantized weight {name!r} is stored under that name.\nRename one of them."
            )
    return weights


def _described_weights(state: Mapping[str, Any]) -> dict[str, tuple[QTensor, Scheme]]:
    """Return the weights whose format is in the metadata that torch attaches to a state dict."""
    weights = {}
    for prefix, notes in getattr(state, "_metadata", {}).items():
        name = f"{prefix}.weight" if prefix else "weight"
        if "qcore" in notes and f"{name}.data" in state:
            weights[name] = _weight(state, name, notes["qcore"])
    return weights


def _weight(state: Mapping[str, Any], name: str, note: Mapping[str, Any]) -> tuple[QTensor, Scheme]:
    found: Any = {part: plain(state.get(f"{name}.{part}")) for part in WEIGHT_TENSORS}
    if (found["order"] is not None) != note.get("order", False):
        raise CheckpointError(
            f"cannot save {name!r}: the state dict's metadata and its tensor '{name}.order' disagree.\n"
            f"Pass the model or its unchanged state_dict(), or QTensors."
        )
    fmt = Format.parse(note["format"])
    weight = QTensor(**found, shape=tuple(note["shape"]), format=fmt, quantizer=note["quantizer"])
    return weight, Scheme.parse(note["scheme"])


def _check_value(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"cannot save {name!r}: it is a {type(value).__name__}, and safetensors holds tensors only.\n"
            f"Remove it from the state dict, or store it in another file."
        )
    if value.layout != torch.strided or value.dtype not in NAMES or value.is_nested or _is_wrapper(value):
        kind = f"{type(value).__name__}, {value.dtype}, {value.layout}"
        raise CheckpointError(
            f"cannot save {name!r}: safetensors cannot store {kind}.\nConvert it to a dense float tensor."
        )
    if not has_values(value):
        raise _no_values(name)
    found: Tensor = plain(value)
    return found


def _is_wrapper(value: Tensor) -> bool:
    """Whether a tensor wraps other tensors, like a DTensor."""
    return hasattr(value, "__tensor_flatten__")


def _no_values(name: str) -> CheckpointError:
    return CheckpointError(
        f"cannot save {name!r}: it is on the meta device and has no values.\nLoad its weights first."
    )


def _collect(given: Mapping[str, Any]) -> tuple[list[Unit], Aliases]:
    """Return one unit per stored tensor, and the aliases of tied tensors."""
    state = _state_of(given)
    owners: dict[Any, str] = {}
    units, targets, records = [], {}, {}
    for name, value in state.items():
        record = Record.of(name, *value) if isinstance(value, tuple) else None
        owner = owners.setdefault(_identity(name, value), name)
        if owner == name:
            units.append(_unit(name, value, record))
            continue
        targets[name] = owner
        if record is not None:
            records[name] = record
    return units, Aliases(targets, records, _part_of(given))


def _part_of(state: Mapping[str, Any]) -> str:
    """Return the rank and the number of ranks that tensors are parts of, for the metadata of a file."""
    place = next((place for value in state.values() if (place := place_of(value)) is not None), None)
    return "" if place is None else described(place)


def _identity(name: str, value: Tensor | tuple[QTensor, Scheme]) -> Any:
    """Return an identity that is equal for tensors that view the same memory in the same way."""
    if isinstance(value, tuple):
        return tuple(_memory(f"{name}.{part}", tensor) for part, tensor in value[0].tensors().items())
    return _memory(name, value)


def _memory(name: str, tensor: Tensor) -> Any:
    if tensor.device.type == "meta":
        raise _no_values(name)
    if not tensor.numel():
        return name
    # If memory has no address on this device, the tensor object identifies it.
    start = tensor.data_ptr() or id(tensor)
    # With lazy negation and conjugation, equal memory represents different values.
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, start, tensor.dtype, tuple(tensor.shape), tensor.stride(), *bits)


def _unit(name: str, value: Tensor | tuple[QTensor, Scheme], record: Record | None) -> Unit:
    tensors = (
        {f"{name}.{part}": t for part, t in value[0].tensors().items()} if isinstance(value, tuple) else {name: value}
    )
    specs = tuple(TensorSpec(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items())
    return Unit(name, specs, lambda: list(tensors.values()), record)
