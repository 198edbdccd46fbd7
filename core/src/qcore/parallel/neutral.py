"""`unpack_` and `pack_`: models whose quantized weights are parameters, for tools that shard parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..model.selection import as_patterns, matches
from ..nn.linear import QuantizedLinear
from ..nn.neutral import NeutralLinear
from ..nn.siblings import SiblingLinear

# ruff: noqa: SLF001 - reads the groups of fused layers and the stores of quantized ones


def unpack_(model: nn.Module, exclude: str | Iterable[str] = ()) -> list[str]:
    """Replace each `QuantizedLinear` by a `NeutralLinear`, in place, so that FSDP2 shards its weight.

    Call it before ``fully_shard``. ``exclude``: patterns of names to leave packed, which every rank then holds whole.
    Layers that are fused are separated. Returns the names. Raises `UnsupportedError`, before anything is changed, for a
    linear layer that shares its weight with another one; layers of other kinds stay packed.
    """
    left = as_patterns(exclude) or ()
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and not any(matches(name, pattern) for pattern in left)
    }
    for name, module in found.items():
        kind = type(module)
        if kind not in (QuantizedLinear, SiblingLinear) or (kind is QuantizedLinear and len(module._store.users) > 1):
            why = "shares its weight with another layer (tied)" if kind is QuantizedLinear else f"is a {kind.__name__}"
            raise UnsupportedError(f"{name or 'the model'} {why}, so its weight cannot be parameters; exclude it.")
    for module in found.values():
        if isinstance(module, SiblingLinear) and module._group is not None:
            module._group.separate()
    return _replaced(model, found, NeutralLinear.from_linear)


def pack_(model: nn.Module) -> list[str]:
    """Replace each `NeutralLinear` by a `QuantizedLinear`, in place, packed for its device; returns the names.

    Raises `FormatError` for weights that are sharded: gather them first, for instance with ``load_state_dict`` of the
    full state into a model that FSDP2 has not sharded.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, NeutralLinear)}
    return _replaced(model, found, NeutralLinear.packed)


def _replaced(model: nn.Module, found: dict[str, Any], make: Callable[[Any], nn.Module]) -> list[str]:
    if "" in found:
        raise UnsupportedError(f"the model itself is a {type(model).__name__}, which cannot be replaced in place.")
    made = {id(module): make(module) for module in found.values()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in made:
            path, _, child = name.rpartition(".")
            setattr(model.get_submodule(path), child, made[id(module)])
    return list(found)
