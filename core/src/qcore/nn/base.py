"""The base class of the quantized modules: binding to a kernel, moving, saving, copying.

A module holds its weight in a `WeightStore`, packed for the kernel that runs it. Tensors leave the module in the
neutral format (``state_dict``, pickle, ``deepcopy``, ``module.weight``). Whenever tensors change (``load_state_dict``,
``to``), the module is bound to a kernel again.
"""

# ruff: noqa: SLF001 - layers that share a weight rebind each other; torch keeps hooks in private tables

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..contracts import Request
from ..errors import FormatError, QcoreWarning
from ..formats import ZeroPoint
from ..formats.tracing import without_base
from ..functional.autograd import call_differentiably, needs_derivatives
from ..functional.checks import check_bias, check_dense, check_first_call, check_out_dtype, check_x_dtype
from ..resolving.binding import Bound, WeightStore, WeightView, bind, call_first
from ..resolving.decision import Decision
from ..runtime.companions import run_pending
from ..runtime.settings import Settings, current
from ..weights.activations import Activation, OutputInt8, StaticFP8, StaticInt8
from ..weights.qtensor import WEIGHT_TENSORS, QTensor
from ..weights.schemes import Scheme
from . import state_notes
from .bind_settings import BindSettings
from .graph_ops import Node, captures_layers, emit, layers, node_of
from .offloading import HOOK, attach, check_passed, moved_to, traced
from .parts import take_parts

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PREFIX = "packed_"
_Module = TypeVar("_Module", bound=nn.Module)
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class QuantizedModule(nn.Module):
    """Base of the quantized modules; see `QuantizedLinear`, `QuantizedConv2d`, `QuantizedEmbedding`."""

    bias: nn.Parameter | None
    _fixed_out_dtype: torch.dtype | None = None
    _dtypes: tuple[torch.dtype, ...] = FLOATS  # that the layer's own may be

    def __init__(self, store: WeightStore, scheme: Scheme, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        if scheme.needs_numbers:
            raise FormatError(
                f"scheme {str(scheme)!r} lacks its scale and zero point: give them as StaticInt8(scale, zero_point) or "
                f"OutputInt8(scale, zero_point),\nor let qcore.quantize_(model, scheme, calibration=batches) find them."
            )
        if any(getattr(part, "per_token", False) for part in (scheme.activation, scheme.output)):
            raise FormatError(
                f"scheme {str(scheme)!r}: per-token parameters are passed with each call, but a layer takes x only;\n"
                f"use qcore.linear(x, weight, activation=..., x_scale=..., x_zero_point=...)."
            )
        self.scheme = replace(scheme, weight=store.format)
        self._store = store
        self._dtype = dtype if dtype in self._dtypes else torch.float32
        self._bias_shape = store.shape[:1]
        self.register_parameter("bias", _parameter(bias, store.device))
        # A name without a tensor: a lookup by name (get_buffer, transformers' tie_weights) finds `weight`, and code
        # that iterates over all buffers skips None. Not listed as non-persistent: accelerate takes those for tensors.
        self._buffers["weight"] = None
        self._bounds: dict[tuple[torch.dtype, bool], Bound] = {}
        self._primary: Bound | None = None
        self._shown: dict[str, Tensor] = {}
        self._node: Node | None = None
        store.users.add(self)
        layers.add(self)
        self._bind_primary()
        run_pending()

    # Overridden by the three modules.

    def _request(self, x_dtype: torch.dtype, training: bool) -> Request:
        raise NotImplementedError

    def _out_dtype(self, x_dtype: torch.dtype) -> torch.dtype:
        """Return int8 for ``-o8``, otherwise x's dtype; for int8 codes in x, the layer's own dtype."""
        if self.scheme.output:
            return torch.int8
        if self._fixed_out_dtype is not None:
            return self._fixed_out_dtype
        return x_dtype if x_dtype.is_floating_point else self._dtype

    @property
    def out_dtype(self) -> torch.dtype | None:
        """The dtype of results, whatever the dtype of x; None, the default, for x's own.

        Float logits of a half-precision model, say. Raises `FormatError` for a dtype that a result cannot have.
        """
        return self._fixed_out_dtype

    @out_dtype.setter
    def out_dtype(self, dtype: torch.dtype | None) -> None:
        check_out_dtype(dtype, self.scheme.output)
        self._fixed_out_dtype = dtype
        self._bind_primary(self._bind_settings.settings)

    def _call_bias(self) -> Tensor | None:
        """Return the bias that the bound kernel adds."""
        return self.bias

    # Binding.

    def _binding_store(self) -> WeightStore:
        """Return the store of the weight that is packed for kernels."""
        return self._store

    @property
    def weight(self) -> QTensor:
        """The weight as a `QTensor`, unpacked on demand; its ``dtype`` is the compute dtype of the layer."""
        self._follow()
        return WeightView(self._store, self._dtype)

    @property
    def decision(self) -> Decision | None:
        """The decision that selected this layer's kernel; None on ``meta``, because nothing is bound there."""
        return None if self._primary is None else self._primary.decision

    def _bind_primary(self, settings: Settings | None = None) -> None:
        """Bind a kernel for the layer's own dtype, under ``settings`` or the current ones, which the layer keeps.

        Nothing is bound on ``meta``: there is nothing to pack yet.
        """
        self._bind_settings = BindSettings(settings or current())
        # New dictionaries instead of clear(): another thread may be reading the old ones.
        self._primary = self._node = None
        self._bounds = {}
        # torch raises for autocast queries on devices without autocast (meta, vulkan).
        self._autocasts = torch.amp.is_autocast_available(self._store.device.type)
        if self._store.device.type != "meta":
            self._primary = self._bound_for(self._dtype, False)
            # Drop packed weights for dtypes that are no longer used.
            self._store.keep_only({b.packing for user in self._store.users for b in user._bounds.values()})
        self._expose_packed()

    def _bind_all(self) -> None:
        """Bind every layer that shares the weight, because the weight has changed."""
        for user in list(self._store.users):
            user._bind_primary()

    def _bound_for(self, x_dtype: torch.dtype, training: bool) -> Bound:
        key = (x_dtype, training)
        bound = self._bounds.get(key)
        if bound is None:
            with self._store.lock, self._bind_settings.in_force():
                bound = self._bounds.get(key) or bind(self._binding_store(), self._request(x_dtype, training))
                self._keep(key, bound)
        return bound

    def _keep(self, key: tuple[torch.dtype, bool], bound: Bound) -> None:
        self._bounds = {**self._bounds, key: bound}
        if key == (self._dtype, False):
            self._primary = bound
        self._expose_packed()

    def _expose_packed(self) -> None:
        """Expose the packed tensors as non-persistent buffers, for tracing and for tools that count memory.

        Tensors in a library's own layout (oneDNN) have no strides and no address, and tools that copy or move buffers
        fail on them: an empty tensor replaces each, so that there is a buffer to move.
        """
        every = {_buffer_name(b, key): tensor for b in self._bounds.values() for key, tensor in b.packed.items()}
        packed = {name: tensor for name, tensor in every.items() if tensor.layout is torch.strided}
        if len(packed) < len(every):
            packed[f"{_PREFIX}device"] = torch.empty(0, device=self._store.device)
        self._shown = packed
        self._set_packed_buffers(packed)
        self._node = node_of(self)

    def _follow(self) -> None:
        """Move to the device that a tool has moved the layer's buffers to; restore buffers that a tool has replaced.

        Take over what was written to tensors of a state dict.
        """
        if not torch.compiler.is_compiling() and self._store.watch.handed and self._store.watch.is_changed():
            self._absorb()
        shown = self._shown
        if torch.compiler.is_compiling() or self._has_own_buffers():
            return
        check_passed(shown, self._buffers)
        device = moved_to(shown, self._buffers, self._store.device)
        self._expose_packed()
        if device is not None:
            self._apply(lambda t: t.to(device))

    def _absorb(self) -> None:
        """Take over what was written in place to tensors that the weight was unpacked to."""
        with self._store.lock:
            if self._store.watch.absorb():
                self._bind_all()

    def _has_own_buffers(self) -> bool:
        return all(map(is_, map(self._buffers.get, self._shown), self._shown.values()))

    def _set_packed_buffers(self, packed: dict[str, Tensor]) -> None:
        kept = {name for name in self._non_persistent_buffers_set if not name.startswith(_PREFIX)}
        self._non_persistent_buffers_set = kept | packed.keys()
        others = {name: buffer for name, buffer in self._buffers.items() if not name.startswith(_PREFIX)}
        self._buffers = {**others, **packed}

    # Running.

    def _check(self, x: Tensor) -> None:
        """Raise `FormatError` if x, or a bias that was replaced, is invalid."""
        self._follow()
        device = self._store.device
        check_dense("x", x, device)
        if x.dtype not in FLOATS:  # a trace guards on all that it reads; activations are often shared by many layers
            check_x_dtype(x, self.scheme.activation)
        self._check_shape(x)
        check_bias(self.bias, self._bias_shape[0], device)

    def _check_shape(self, x: Tensor) -> None:
        """Raise `FormatError` unless the layer accepts x's shape."""

    def _run(self, x: Tensor, **params: Tensor) -> Tensor:
        """Handle everything but the fast path: first calls, gradients, autocast, other dtypes, traces, wrong inputs."""
        self._check(x)
        return self._run_checked(x, **params)

    def _run_checked(self, x: Tensor, **params: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._run_traced(x, **params)
        dtype = self._compute_dtype(x)
        x = x if dtype == x.dtype or not x.is_floating_point() else x.to(dtype)
        training = self._needs_grad(x)
        bound = self._bound_for(dtype, training)
        if bound.proven:
            try:
                return self._call(bound, bound.packed, x, training, params)
            except Exception as error:
                bound.blame(error)
                raise
        check_first_call(bound.request, x)
        with self._bind_settings.in_force():
            fresh, result = call_first(
                self._binding_store(), bound, lambda b: self._call(b, b.packed, x, training, params)
            )
        if fresh is not bound:
            with self._store.lock:
                # If the layer was moved in the meantime, this kernel is for the old device: drop it.
                if self._bounds.get((dtype, training)) is bound:
                    self._keep((dtype, training), fresh)
        return result

    def _run_traced(self, x: Tensor, **params: Tensor) -> Tensor:
        dtype = self._compute_dtype(x)
        if captures_layers() and self._node is not None and not self._needs_grad(x):
            return self._emitted(x.to(dtype) if x.is_floating_point() else x, self._out_dtype(dtype), params)
        # A trace cannot pack weights, so a dtype without a bound kernel is computed in the layer's own dtype.
        bound = self._bounds.get((dtype, False)) or self._primary
        if bound is None:
            raise RuntimeError("a quantized layer on the meta device cannot be compiled; load its weights first.")
        shown, now = self._shown, self._buffers
        packed: Any = {key: traced(shown, now, _buffer_name(bound, key), own) for key, own in bound.packed.items()}
        result = self._call(bound, packed, x.to(self._trace_dtype(bound, x)), self._needs_grad(x), params)
        return result.to(self._out_dtype(dtype)) if result.is_floating_point() else result

    def _trace_dtype(self, bound: Bound, x: Tensor) -> torch.dtype:
        """Return the dtype of x that a trace passes to the kernel."""
        dtype: torch.dtype = getattr(bound.request, "x_dtype", x.dtype)
        return dtype

    def _emitted(self, x: Tensor, out_dtype: torch.dtype, params: dict[str, Tensor]) -> Tensor:
        """The layer as one node of a graph that a graph backend captures."""
        assert self._node is not None
        call, _, marker, *_ = self._node
        weight: Any = self._buffers[marker]
        return emit(call, x, weight, self._call_bias(), out_dtype, params)

    def _call(
        self, bound: Bound, packed: dict[str, Tensor], x: Tensor, training: bool, params: dict[str, Tensor]
    ) -> Tensor:
        bias = self._call_bias()
        if training:
            return call_differentiably(x, bias, bound.kernel, packed, bound.request, params)
        y = bound.kernel(x, packed, bias, **params)
        return y if torch.compiler.is_compiling() else without_base(y)

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        kind = x.device.type
        if x.is_floating_point() and self._autocasts and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return x.dtype

    def _needs_grad(self, x: Tensor) -> bool:
        return self.scheme.output is None and needs_derivatives(x, self.bias)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self._set_weight(value)
        else:
            super().__setattr__(name, value)
            if name == HOOK:
                attach(self, value, _PREFIX)

    def _set_weight(self, weight: Any) -> None:
        """Replace the weight by another of the same shape; the weight of another layer is shared with it."""
        if not isinstance(weight, QTensor):
            raise FormatError(
                f"the weight of a {type(self).__name__} must be a QTensor, not a {type(weight).__name__}.\n"
                f"Give qcore.quantize(tensor, {str(self.scheme.weight)!r}), or change the float layer beforehand."
            )
        if tuple(weight.shape) != tuple(self._store.shape):
            raise FormatError(f"weight has shape {tuple(weight.shape)}; this layer needs {tuple(self._store.shape)}.")
        self._follow()
        store = weight.store if isinstance(weight, WeightView) else WeightStore(weight)
        if store is not self._store:
            self._store.users.discard(self)
            self._store = store
            store.users.add(self)
            self.scheme = replace(self.scheme, weight=store.format, quantizer=store.quantizer or "")
            self._bind_all()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as in any module; adding or removing a bias binds the layer to a kernel again."""
        super().register_parameter(name, param)
        primary = self.__dict__.get("_primary")
        if name == "bias" and primary is not None and primary.request.bias != (param is not None):
            self._bind_primary(self._bind_settings.settings)

    # Moving, copying, saving.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        with self._store.lock:
            return self._apply_locked(fn, recurse)

    def _apply_locked(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> QuantizedModule:
        self._follow()
        # fn must not be applied to packed tensors: .half() would round their scales. An empty sample reveals the
        # target.
        sample = fn(torch.empty(0, dtype=self._dtype, device=self._store.device))
        self._set_packed_buffers({})
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        before, self._dtype = self._dtype, sample.dtype if sample.dtype in self._dtypes else self._dtype
        if self._store.move(fn, sample.device):
            self._bind_all()
        elif self._dtype != before:
            self._bind_primary()
        else:
            self._expose_packed()
        return self

    def __getstate__(self) -> dict[str, Any]:
        self._follow()
        shown = {name: value for name, value in self._buffers.items() if not name.startswith(_PREFIX)}
        kept = {name for name in self._non_persistent_buffers_set if not name.startswith(_PREFIX)}
        unbound: dict[str, Any] = {"_bounds": {}, "_primary": None, "_shown": {}, "_node": None}
        changed = {"_buffers": shown, "_non_persistent_buffers_set": kept, **unbound}
        return {**self.__dict__, **changed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._store.users.add(self)
        layers.add(self)
        self._bind_primary(state.get("_bind_settings", BindSettings()).settings)
        run_pending()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._follow()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self._store.neutral().tensors().items():
            destination[f"{prefix}weight.{name}"] = tensor
        for name, value in self._static_parameters():
            destination[prefix + name] = value
        notes, store = getattr(destination, "_metadata", {}).get(prefix[:-1]), self._store
        state_notes.describe(notes, store.format, store.shape, store.quantizer, self.scheme, has_order=store.has_order)

    def _static_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, part in (("input", self.scheme.activation), ("output", self.scheme.output)):
            for name, dtype in static_parameters(part).items():
                yield f"{prefix}_{name}", torch.tensor(getattr(part, name), dtype=dtype)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        take_parts(self, state_dict, prefix, local_metadata, error_msgs)
        own = [f"{prefix}weight.{part}" for part in WEIGHT_TENSORS] + [
            prefix + name for name, _ in self._static_parameters()
        ]
        found = {key: state_dict[key] for key in own if key in state_dict}
        rest = {key: value for key, value in state_dict.items() if key not in found}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        absent = {f"{prefix}weight.{part}" for part in self._absent_tensors()}
        missing = [key for key in own if key not in found and key not in absent]
        missing_keys += missing
        if not any(key.startswith(f"{prefix}weight.") for key in missing) and found:
            self._load_found(found, prefix, local_metadata, error_msgs)

    def _absent_tensors(self) -> Iterator[str]:
        """Yield the names of tensors that the current weight does not have."""
        has = {"zero": self._store.format.zero is not ZeroPoint.NONE, "order": self._store.has_order}
        has["global_scale"] = self._store.format.scale.has_global
        yield from (name for name, present in has.items() if not present)

    def _load_found(self, found: dict[str, Tensor], prefix: str, notes: Any, error_msgs: list[str]) -> None:
        self._follow()
        assign = bool(notes.get("assign_to_params_buffers"))
        parts: Any = {part: found.get(f"{prefix}weight.{part}") for part in WEIGHT_TENSORS}
        store = self._store
        try:
            state_notes.check_whole(notes, self)
            weight = QTensor(**parts, shape=store.shape, format=store.format, quantizer=store.quantizer)
            scheme = self._scheme_with(found, prefix)
            state_notes.check_format(notes, store.format, store.shape[-1])
        except FormatError as error:
            error_msgs.append(f"{prefix}weight: {error}")
            return
        if self._store.device.type == "meta" and not assign:
            text = "copying to a layer on meta is a no-op; pass assign=True, or call to_empty first."
            warnings.warn(f"for {prefix}weight: {text}", QcoreWarning, stacklevel=2)
        # As for any parameter: assign=True adopts the tensors themselves, otherwise they are copied to the layer's
        # device.
        taken = weight if assign else weight.map(lambda t: t.detach().to(self._store.device, copy=True))
        with self._store.lock:
            self.scheme = scheme
            self._store.set(taken)
            self._bind_all()

    def _scheme_with(self, found: dict[str, Tensor], prefix: str) -> Scheme:
        scheme = self.scheme
        for field, name in (("activation", "input"), ("output", "output")):
            part: Any = getattr(scheme, field)
            kinds = static_parameters(part)
            given = {key: found[f"{prefix}{name}_{key}"] for key in kinds if f"{prefix}{name}_{key}" in found}
            if given and given.keys() == kinds.keys():
                scheme = replace(scheme, **{field: with_static_parameters(part, given)})
        return scheme


def static_parameters(part: Activation | OutputInt8 | None) -> dict[str, torch.dtype]:
    """Return name and dtype of the scalars that a state dict holds for a static activation or output.

    float64 holds a Python float exactly. Empty for other parts, and if the parameters are passed with each call.
    """
    if isinstance(part, StaticFP8):
        return {"scale": torch.float64}
    if isinstance(part, (StaticInt8, OutputInt8)) and not part.per_token:
        return {"scale": torch.float64, "zero_point": torch.int32}
    return {}


def with_static_parameters(part: Any, given: Mapping[str, Tensor]) -> Any:
    """Return a static activation or output with the scalars ``given``; raises `FormatError` for impossible numbers."""
    casts = {name: float if dtype.is_floating_point else int for name, dtype in static_parameters(part).items()}
    return replace(part, **{name: casts[name](value) for name, value in given.items()})


def _buffer_name(bound: Bound, key: str) -> str:
    return f"{_PREFIX}{bound.packing}_{key}".replace(".", "_")


def _parameter(bias: Tensor | None, device: torch.device) -> nn.Parameter | None:
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(bias.to(device), requires_grad=bias.requires_grad)


def adopt_hooks(module: _Module, original: nn.Module) -> _Module:
    """As `adopt`; returns ``module``."""
    adopt(module, original)
    return module


def adopt(module: nn.Module, original: nn.Module) -> None:
    """Copy training mode and hooks of a float module to its quantized counterpart."""
    module.train(original.training)
    for name in HOOKS:
        getattr(module, name).update(getattr(original, name))
    module._is_full_backward_hook = original._is_full_backward_hook
