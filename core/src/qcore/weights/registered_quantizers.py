"""Quantizers of plugins: the class that a plugin returns from the hook ``qcore_quantizers``, and how core calls it.

The built-in quantizers are in `quantizers`; they share one namespace, so a plugin cannot replace a built-in one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, did_you_mean, message_of, quoted
from ..formats import BrokenLayoutError, Format, ScaleType, ZeroPoint
from .qtensor import QTensor

Parts = tuple[Tensor, Tensor, "Tensor | None"]
"""Codes ``(N, K)``, scales ``(G, N)`` and zero points ``(G, N)``, as `QTensor.from_codes` takes them."""

QuantizerFunction = Callable[[Tensor, Format, torch.dtype, "Tensor | None"], "QTensor | Parts"]


@dataclass(frozen=True)
class Quantizer:
    """A method to quantize a float weight, which schemes name after ``@``.

    **Fields:**

    - ``name``: lower-case letters, digits and underscores.
    - ``function``: called as ``function(weight, format, scale_dtype, moments)`` with a float32 weight ``(N, K)`` on any
      device, N and K at least 1. It returns a `QTensor` in ``format``, or codes ``(N, K)``, scales ``(G, N)`` and zero
      points ``(G, N)`` or None. Float scales have the dtype ``scale_dtype``: round them before the codes are chosen.
      ``moments`` is None, or the float sum of ``x x^T`` over the inputs of the layer, ``(K, K)``.
    - ``zeros``: the kinds of zero points that it supports.
    - ``elements``: names of the elements that it supports; None for every element.
    - ``needs_moments``: whether it needs ``moments``; `quantize_` then requires calibration batches.

    Core checks the result of each call: format, shape, finite scales and valid codes.
    Raises `FormatError` for fields of a wrong type.
    """

    name: str
    function: QuantizerFunction
    zeros: tuple[ZeroPoint, ...] = (ZeroPoint.NONE,)
    elements: tuple[str, ...] | None = None
    needs_moments: bool = False

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise FormatError(f"quantizer name {quoted(name)} must be lower-case letters, digits and underscores.")
        if not callable(self.function):
            raise FormatError(f"the function of quantizer {name!r} is {quoted(self.function)}; it must be callable.")
        object.__setattr__(self, "zeros", _names_of(name, "zeros", self.zeros, ZeroPoint))
        if self.elements is not None:
            object.__setattr__(self, "elements", _names_of(name, "elements", self.elements, str))
        if not isinstance(self.needs_moments, bool):
            raise FormatError(f"needs_moments of quantizer {name!r} must be True or False.")

    def makes(self, format: Format) -> bool:
        """Whether it supports the element and the kind of zero point of ``format``."""
        return format.zero in self.zeros and (self.elements is None or format.dtype in self.elements)


def _names_of(name: str, field: str, given: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(given, (tuple, list)) or not given or not all(isinstance(value, kind) for value in given):
        raise FormatError(f"{field} of quantizer {name!r} is {quoted(given)}; it must be a tuple of {kind.__name__}.")
    return tuple(given)


_REGISTERED: dict[str, tuple[Quantizer, str]] = {}
"""Quantizers with the plugin that provides each, by name."""

load_plugin_quantizers: Callable[[], object] | None = None
"""Set by the plugin registry: collects the quantizers of installed plugins."""


def register_quantizer(quantizer: Quantizer, plugin: str, built_in: Iterable[str]) -> None:
    """Register a quantizer under its name. Raises `FormatError` if ``built_in`` or another plugin has that name.

    A quantizer of the same plugin is replaced: a plugin may create a new object at each call of its hook.
    """
    if not isinstance(quantizer, Quantizer):
        raise FormatError(f"{quoted(quantizer)} is not a quantizer: pass a qcore.plugin_api.Quantizer(name, function).")
    name = quantizer.name
    holder = "qcore" if name in built_in else _REGISTERED[name][1] if name in _REGISTERED else plugin
    if holder != plugin:
        owner = "qcore" if holder == "qcore" else f"plugin {holder!r}"
        raise FormatError(f"quantizer name {name!r} of plugin {plugin!r} is taken by {owner}; choose another.")
    _REGISTERED[name] = quantizer, plugin


def forget_quantizers(names: Iterable[str], plugin: str) -> None:
    """Unregister quantizers of a plugin whose registration failed."""
    for name in names:
        if name in _REGISTERED and _REGISTERED[name][1] == plugin:
            del _REGISTERED[name]


def registered_quantizers() -> dict[str, tuple[Quantizer, str]]:
    """The quantizers of plugins registered so far, by name, with the plugin that provides each."""
    return dict(_REGISTERED)


def find_quantizer(name: str) -> Quantizer | None:
    """The quantizer of a plugin, None if there is none; loads installed plugins before it gives up."""
    if name not in _REGISTERED and load_plugin_quantizers is not None:
        load_plugin_quantizers()
    return _REGISTERED[name][0] if name in _REGISTERED else None


def check_registered(name: str, format: Format, built_in: Iterable[str]) -> str:
    """``name`` itself; raises `FormatError` if no plugin has it, or if it does not support ``format``."""
    found = find_quantizer(name)
    if found is None:
        known = [*built_in, *_REGISTERED]
        raise FormatError(
            f"unknown quantizer {quoted(name)}; known: {', '.join(known)}.{did_you_mean(str(name), known)}\n"
            f"A third-party quantizer needs its plugin installed."
        )
    if not found.makes(format):
        zeros = ", ".join(zero.name for zero in found.zeros)
        elements = "every element" if found.elements is None else ", ".join(found.elements)
        raise FormatError(
            f"quantizer {name!r} of plugin {_REGISTERED[name][1]!r} does not support {format}.\n"
            f"It supports {elements}, with zero points of kind {zeros}."
        )
    return name


def fitting(format: Format) -> list[str]:
    """The names of registered quantizers that support ``format``."""
    return [name for name, (quantizer, _) in _REGISTERED.items() if quantizer.makes(format)]


def apply_registered(
    name: str, weight: Tensor, format: Format, scale_dtype: torch.dtype, moments: Tensor | None, what: str
) -> QTensor:
    """Quantize a dense weight ``(N, K)`` with a plugin's quantizer and check the result.

    ``what``: the name of the weight, for errors. Raises `FormatError` that names the plugin if the quantizer raises or
    its result is not a valid weight of ``format``.
    """
    quantizer, plugin = _REGISTERED[name]
    dense = weight.to(torch.float32, copy=True)  # the function may work in place, and the weight is the user's
    if not torch.isfinite(dense).all():
        raise FormatError(
            f"{what} holds NaN or Inf, which has no quantized form.\nRepair the weight, or exclude this layer."
        )
    try:
        result = quantizer.function(dense, format, scale_dtype, moments)
        made = _built(result, format, name)
    except (BrokenLayoutError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        said = message_of(error).strip().partition("\n")[0][:200].rstrip(".")
        raise _broken(name, plugin, what, f"{type(error).__name__}: {said}") from error
    wanted = format, tuple(weight.shape), weight.device
    if (made.format, tuple(made.shape), made.device) != wanted:
        given = f"{made.format} of shape {tuple(made.shape)} on {made.device}"
        raise _broken(name, plugin, what, f"it returned {given}, not {format} of shape {wanted[1]} on {wanted[2]}")
    if format.scale is ScaleType.FLOAT and made.scale.dtype != scale_dtype:
        raise _broken(name, plugin, what, f"its scales are {made.scale.dtype} instead of {scale_dtype}")
    return made


def _built(result: Any, format: Format, name: str) -> QTensor:
    if isinstance(result, QTensor):
        checked = result.derived(quantizer=name)
        checked.validate()
        return checked
    if isinstance(result, (tuple, list)) and len(result) in (2, 3):
        codes, scale, zero = (*result, None)[:3]
        return QTensor.from_codes(codes, scale, zero, format, name)
    raise FormatError(f"it returned a {type(result).__name__} instead of a QTensor or (codes, scale, zero)")


def _broken(name: str, plugin: str, what: str, why: str) -> FormatError:
    return FormatError(
        f"quantizer {name!r} of plugin {plugin!r} failed for {what}: {why}.\n"
        f"Upgrade or remove the plugin, or choose another quantizer."
    )
