"""Layers under hooks that move, replace or offload the tensors of modules, as accelerate's do.

Such a hook does not call `torch.nn.Module.to`: it writes each named parameter and buffer of a module, moved to a
device, back into the module's tables. A quantized layer exposes its packed weight as buffers but holds it elsewhere, so
it follows the device of the buffers (`moved_to`). A hook that offloads keeps the layer's state dict, in memory or on
disk, and writes the parameters back before each call; the weight is not a parameter, so `attach` makes the hook load
the weight, too. Nothing of accelerate is imported: hooks are recognized by their attributes.
"""

# ruff: noqa: SLF001 - part of the base class of the layers, in a module of its own

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats.tracing import in_functional_call, is_wrapped
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor

if TYPE_CHECKING:
    from .base import QuantizedModule

HOOK = "_hf_hook"
"""The attribute in which accelerate keeps the hook of a module."""


_PASSED = (
    "the packed weight of a quantized layer was replaced by that of another one (torch.func.functional_call with\n"
    "another model's buffers, a stack of several models): quantized weights stay fixed.\n"
    "Pass parameters only, or call the model that the buffers belong to."
)


def moved_to(shown: Mapping[str, Tensor], now: Mapping[str, Any], device: torch.device) -> torch.device | None:
    """Return the device that a tool has moved buffers to, or None if it has not moved them.

    ``shown``: the buffers as the layer exposed them, on ``device``; ``now``: the buffers in their place now. Tensors on
    ``meta`` are ignored.
    """
    found = (now.get(name) for name in shown)
    devices = {tensor.device for tensor in found if isinstance(tensor, Tensor)} - {device, torch.device("meta")}
    return next(iter(devices), None)


def check_passed(shown: Mapping[str, Tensor], now: Mapping[str, Any]) -> None:
    """Raise `FormatError` if buffers in place of ``shown`` were passed to be computed with, and differ from those.

    A tool that has loaded a model may fill buffers with anything; what ``torch.func`` passes is meant.
    """
    passed = [(tensor, now[name]) for name, tensor in shown.items() if isinstance(now.get(name), Tensor)]
    differ = any(is_wrapped(given) for _, given in passed)
    if not differ and in_functional_call():
        # Tensors of a trace have no values.
        differ = any(type(given) is Tensor and not _is_equal(own, given) for own, given in passed)
    if differ:
        raise FormatError(_PASSED)


def traced(shown: Mapping[str, Tensor], now: Mapping[str, Any], name: str, own: Tensor) -> Tensor:
    """Return the tensor that a trace computes with in place of ``own``, a packed tensor whose buffer has this name.

    The buffer, if an export traces with it or ``functional_call`` was given it; ``own`` if a tool has replaced it.
    Raises `FormatError` if others were passed and this one, which has no strides, is not among them.
    """
    buffer = now.get(name)
    if buffer is None:
        if in_functional_call() and any(now.get(other) is not tensor for other, tensor in shown.items()):
            raise FormatError(_PASSED)
        return own
    if buffer is own or type(buffer) is not type(own) or in_functional_call():
        return buffer  # type: ignore[no-any-return]
    return own


def _is_equal(own: Tensor, given: Tensor) -> bool:
    # `moved_to` looks at tensors on another device and on meta. Bytes, because scales may be NaN.
    if own is given or given.device != own.device or own.device.type == "meta":
        return True
    if own.dtype != given.dtype or own.shape != given.shape:
        return False
    return torch.equal(own.flatten().view(torch.uint8), given.flatten().view(torch.uint8))


def attach(module: QuantizedModule, hook: Any, prefix: str) -> None:
    """Make ``hook``, or each part of a sequence of hooks, offload the weight of ``module``, too, if it offloads.

    A hook whose map does not hold the weight (it was created from parameters alone) leaves it in memory. ``prefix``: of
    the names of packed buffers.
    """
    for part in getattr(hook, "hooks", (hook,)):
        kept = getattr(part, "weights_map", None)
        if getattr(part, "offload", False) is True and isinstance(kept, Mapping) and "weight.data" in kept:
            _Offloaded(part, weakref.ref(module._store), module._store.device).start(module, prefix)


@dataclass
class _Offloaded:
    """A layer whose weight ``hook`` keeps; between calls the layer holds tensors on ``meta``.

    **Fields:** ``origin``: the store that held the weight, for layers tied to this one that stay in memory; ``device``:
    where the weight was; ``brought``: the store that was loaded for the current call.
    """

    hook: Any
    origin: weakref.ref[WeightStore]
    device: torch.device
    brought: WeightStore | None = None

    def start(self, module: QuantizedModule, prefix: str) -> None:
        """Drop the weight from memory and bring it back around each call."""
        self._release(module)
        places = getattr(self.hook, "original_devices", {})
        self.hook.original_devices = {name: at for name, at in places.items() if not name.startswith(prefix)}
        for step in (self.pre_forward, self.post_forward, self.detach_hook):
            # On the object, before the methods of its class; partial, so that a deep copy takes the copied hook.
            setattr(self.hook, step.__name__, partial(_step, self, step.__name__))

    def pre_forward(self, module: QuantizedModule, *args: Any, **kwargs: Any) -> Any:
        """Let the hook load parameters and move inputs, then load the weight."""
        given = type(self.hook).pre_forward(self.hook, module, *args, **kwargs)
        if module._store.device.type == "meta":
            self._bring(module, self.hook.execution_device)
        return given

    def post_forward(self, module: QuantizedModule, output: Any) -> Any:
        """Let the hook offload the parameters, and drop the weight, unless it was replaced meanwhile."""
        if module._store is self.brought:
            self._release(module)
        return type(self.hook).post_forward(self.hook, module, output)

    def detach_hook(self, module: QuantizedModule) -> Any:
        """Load the weight permanently; if a layer tied to this one holds it, share that."""
        for name in ("pre_forward", "post_forward", "detach_hook"):
            delattr(self.hook, name)
        if module._store.device.type == "meta":
            shared = self.origin()
            if shared is not None and shared.device == self.device and len(shared.users):
                _use(module, shared)
            else:
                self._bring(module, self.device)
        return self.hook.detach_hook(module)

    def _release(self, module: QuantizedModule) -> None:
        # A store of its own: layers tied to this one may stay in memory.
        self.brought = None
        _use(module, WeightStore(module._store.neutral().map(lambda t: t.to("meta"))))

    def _bring(self, module: QuantizedModule, device: Any) -> None:
        store = module._store
        tensors = {name: self.hook.weights_map[f"weight.{name}"].to(device) for name in store.neutral().tensors()}
        self.brought = WeightStore(QTensor.from_tensors(tensors, store.shape, store.format, store.quantizer))
        _use(module, self.brought)


def _step(offloaded: _Offloaded, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(offloaded, name)(*args, **kwargs)


def _use(module: QuantizedModule, store: WeightStore) -> None:
    """Make ``module`` take its weight from ``store``, under the settings that it was bound with."""
    settings = module._bind_settings.settings
    with module._store.lock, store.lock:
        module._store.users.discard(module)
        module._store = store
        store.users.add(module)
        module._bind_primary(settings)
