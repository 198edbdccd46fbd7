"""Recompute buffers that no checkpoint holds, such as the frequencies of rotary embeddings, for a model on meta.

A module's own initialization code computes them. It runs twice on a copy of the module with real buffers and meta
parameters: once with the buffers filled with zeros, once with ones, each time with a different random seed. A buffer
with the same values after both runs was computed completely, and from the module's settings alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.base import QuantizedModule
from .values import same_bits

# ruff: noqa: SLF001 - reads the tables that torch keeps in modules

_INIT_METHODS = ("reset_buffers", "init_buffers", "rope_init", "reset_parameters", "_reset_parameters")
"""Methods with which modules fill their buffers, by the conventions of torch, torchtune and others."""

Recipe = Callable[[nn.Module], object]


def unsaved_meta_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield name, module and key of every non-persistent buffer on meta."""
    for layer, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (QuantizedModule, torch.jit.ScriptModule)):
            continue
        for key in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(key)
            if buffer is not None and buffer.device.type == "meta":
                yield (f"{layer}.{key}" if layer else key), module, key


def recompute_buffers(model: nn.Module) -> dict[int, Tensor]:
    """Recompute non-persistent meta buffers as far as their modules can: id of the buffer to CPU tensor."""
    lost: dict[int, tuple[str, nn.Module, list[str]]] = {}
    for name, module, key in unsaved_meta_buffers(model):
        lost.setdefault(id(module), (name.rpartition(".")[0], module, []))[2].append(key)
    found: dict[int, Tensor] = {}
    layers = dict(model.named_modules(remove_duplicate=False))
    for layer, module, keys in lost.values():
        for recipe in _recipes(layers, layer, module):
            for key, value in _run_twice(recipe, module, keys).items():
                found.setdefault(_id(module, key), value)
    return found


def _id(module: nn.Module, key: str) -> int:
    return id(module._buffers[key])


def _recipes(layers: Mapping[str, nn.Module], layer: str, module: nn.Module) -> Iterator[Recipe]:
    # As in transformers 5: the innermost model that contains the module knows how to initialize it.
    parts = layer.split(".") if layer else []
    for depth in range(len(parts), -1, -1):
        owner: Any = layers[".".join(parts[:depth])]
        if callable(getattr(type(owner), "_init_weights", None)):
            yield owner._init_weights
            break
    if "config" in vars(module) and callable(vars(module).get("rope_init_fn")):
        yield _init_rope  # transformers 4
    for name in _INIT_METHODS:
        if callable(getattr(type(module), name, None)):
            yield lambda twin, name=name: getattr(twin, name)()  # type: ignore[misc]
    if "config" in vars(module) and set(inspect.signature(type(module)).parameters) <= {"config", "device"}:
        yield _reconstruct


def _init_rope(twin: Any) -> None:
    frequencies, _ = twin.rope_init_fn(twin.config, torch.device("cpu"))
    for key in {"inv_freq", "original_inv_freq"} & twin._buffers.keys():
        twin._buffers[key] = frequencies


def _reconstruct(twin: Any) -> None:
    twin._buffers.update(type(twin)(config=twin.config)._buffers)


def _run_twice(recipe: Recipe, module: nn.Module, keys: list[str]) -> dict[str, Tensor]:
    try:
        first, second = (_run(recipe, module, fill) for fill in (0, 1))
    except Exception:  # noqa: BLE001 - third-party code that may not run on the copy
        return {}
    alike = {key for key in keys if _usable(module, key, first) and _usable(module, key, second)}
    dtypes = {key: module._buffers[key].dtype for key in alike}  # type: ignore[union-attr]
    pairs = {key: [run[key].cpu().to(dtypes[key]) for run in (first, second)] for key in alike}
    return {key: one for key, (one, other) in pairs.items() if same_bits(one, other)}


def _usable(module: nn.Module, key: str, found: dict[str, Tensor]) -> bool:
    value, buffer = found.get(key), module._buffers[key]
    return value is not None and buffer is not None and value.device.type != "meta" and value.shape == buffer.shape


def _run(recipe: Recipe, module: nn.Module, fill: int) -> dict[str, Tensor]:
    twin = _twin(module, fill)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(fill)  # torch.manual_seed would also seed GPUs
        recipe(twin)
    return {key: buffer for key, buffer in twin._buffers.items() if buffer is not None}


def _twin(module: nn.Module, fill: int) -> nn.Module:
    """Copy a module's class and settings; the copy shares no tensor and no child with ``module``."""
    twin = object.__new__(type(module))
    vars(twin).update(
        {name: copy.copy(value) if _is_container(value) else value for name, value in vars(module).items()}
    )
    buffers = {k: b if b is None else torch.full_like(b, fill, device="cpu") for k, b in module._buffers.items()}
    parameters = {k: p if p is None else _empty(p) for k, p in module._parameters.items()}
    vars(twin).update(_buffers=buffers, _parameters=parameters, _modules={})
    return twin


def _is_container(value: object) -> bool:
    return isinstance(value, (list, dict, set))


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
