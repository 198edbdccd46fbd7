"""A part of a captured graph as one compiled JAX program over arrays that stay on the device.

Weights become arrays once. States are donated and updated in place. Per call only fresh arguments and results cross
over, on CPUs without copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import Array
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from qcore import PluginError
from qcore.plugin_api import GraphPart, Resident, Role, version, weight_of

from .. import environment
from ..engines.jax import device_of, writable
from ..memo import Memo
from .kept import kept_on_disk
from .lowering import layer_of, lowered
from .quantized import Arrays, Layer
from .states import States

_INT32 = torch.iinfo(torch.int32)


def _narrowed(tensor: Tensor) -> Tensor:
    """int64 as int32, in which programs compute integers. Raises `OverflowError` for values that do not fit."""
    if tensor.dtype != torch.int64:
        return tensor
    narrow = tensor.to(torch.int32)
    if not torch.equal(narrow.to(torch.int64), tensor):
        raise OverflowError("an integer does not fit the 32 bits in which qcore_xla computes integers.")
    return narrow


def array_of(tensor: Tensor) -> Array:
    """An array that shares the memory of a tensor if it can."""
    dense = _narrowed(tensor.detach()).contiguous()
    return jax.dlpack.from_dlpack(dense)  # type: ignore[no-any-return]


def _packed(tensor: Tensor, layer: Layer) -> tuple[Arrays, bool]:
    weight = weight_of(tensor)
    made = {name: array_of(part) for name, part in layer.pack(weight).items()}
    for array in made.values():
        array.block_until_ready()
    return made, False


_weights: Memo[Arrays] = Memo(_packed)
_statics: Resident[Array] = Resident(array_of)
_states = States()


class Program:
    """See the module. Called with one tensor or number per input of the part, it returns the part's results."""

    def __init__(self, part: GraphPart) -> None:
        self._platform = part.device.type
        self._run = lowered(part, self._platform)
        roles = [one.role for one in part.inputs]
        self._states = [i for i, role in enumerate(roles) if role is Role.STATE]
        self._fixed = [i for i, role in enumerate(roles) if role in {Role.WEIGHT, Role.STATIC}]
        self._fresh = [i for i, role in enumerate(roles) if role is Role.FRESH]
        self._numbers = {i: one.example for i, one in enumerate(part.inputs) if one.role is Role.NUMBER}
        self._layers = _layers(part, self._platform)
        self._count = len(roles)
        self._updates = [part.updates[i] for i in self._states]
        self._returned = part.returned
        self._dtypes = [part.outputs[i].meta["val"].dtype for i in part.returned]
        self._empty = [tuple(part.outputs[i].meta["val"].shape) for i in part.returned]
        self._jitted: Callable[..., Any] = jax.jit(self._whole, donate_argnums=0)
        self._compiled = False
        self._known: tuple[list[Any], list[Any]] | None = None
        self._lock = threading.Lock()

    def _whole(self, states: list[Any], fixed: list[Any], fresh: list[Any]) -> Any:
        values: list[Any] = [None] * self._count
        for places, group in ((self._states, states), (self._fixed, fixed), (self._fresh, fresh)):
            for i, value in zip(places, group, strict=True):
                values[i] = value
        for i, number in self._numbers.items():
            values[i] = number
        for i, layers in self._layers.items():
            values[i] = dict(zip(layers, values[i], strict=True))
        # The rules rely on rank promotion; the user's program may forbid it.
        with jax.numpy_rank_promotion("allow"):
            outputs, bad = self._run(values)
        return [outputs[i] for i in self._returned], [outputs[i] for i in self._updates], bad

    def __call__(self, values: Sequence[Any]) -> Sequence[Tensor]:
        """Run the program, and wait for it."""
        if environment.forked:
            raise PluginError(
                "this process was forked from one that had used JAX, and JAX does not work after a fork.\n"
                "Start workers with the 'spawn' method: torch.multiprocessing.set_start_method('spawn')."
            )
        with self._lock, device_of([value for value in values if isinstance(value, Tensor)][:1]):
            return self._call(values)

    def _call(self, values: Sequence[Any]) -> Sequence[Tensor]:
        held = [_states.get(values[i]) for i in self._states]
        states = [
            jax.numpy.array(array_of(values[i]), copy=True) if state is None else state.array
            for i, state in zip(self._states, held, strict=True)
        ]
        fixed = self._fixed_arrays(values)
        fresh = [self._argument(values[i]) for i in self._fresh]
        if self._compiled:
            results, updates, bad = self._jitted(states, fixed, fresh)
        else:
            with kept_on_disk():
                results, updates, bad = self._jitted(states, fixed, fresh)
            self._compiled = True
        jax.block_until_ready(updates)
        for i, state, array in zip(self._states, held, updates, strict=True):
            if state is None:
                values[i].copy_(from_dlpack(array))
            else:
                state.replace(array, values[i])
        if bad is not None:
            _check(*np.asarray(bad))
        return [self._result(y, dtype) for y, dtype in zip(results, self._dtypes, strict=True)]

    def _fixed_arrays(self, values: Sequence[Any]) -> list[Any]:
        """Arrays of weights, parameters and buffers: those of the last call if the tensors are the same."""
        tensors = [values[i] for i in self._fixed]
        known = self._known
        if known is not None:
            same = all(a is b() and version(a) == n for a, (b, n) in zip(tensors, known[0], strict=True))
            if same:
                return known[1]
        arrays = [
            [_weights.get(tensor, layer) for layer in self._layers[i]] if i in self._layers else _statics.get(tensor)
            for i, tensor in zip(self._fixed, tensors, strict=True)
        ]
        self._known = [(_ref(tensor), version(tensor)) for tensor in tensors], arrays
        return arrays

    def _argument(self, tensor: Tensor) -> Any:
        narrow = _narrowed(tensor.detach())
        if narrow.is_cuda or narrow.dtype == torch.bfloat16:
            return jax.dlpack.from_dlpack(narrow.contiguous())
        array = narrow.numpy()
        return array if self._fixed or self._states else jax.device_put(array, jax.devices("cpu")[0])

    def _result(self, y: Array, dtype: torch.dtype) -> Tensor:
        if self._platform == "cuda" or dtype == torch.bfloat16:
            y.block_until_ready()
            return from_dlpack(y)
        return writable(np.asarray(y)).to(dtype)


def _check(outside: bool, overflow: bool) -> None:
    """Raise for what a program has noted, see `lowering.Flags`."""
    if outside:
        raise IndexError("an index of an embedding, a cache or an indexing operation is out of range.")
    if overflow:
        raise OverflowError(
            "an integer does not fit the 32 bits in which qcore_xla computes integers.\n"
            "Compute large integers (hashes, products of ids) outside of the compiled model."
        )


def _ref(tensor: Tensor) -> Callable[[], Tensor | None]:
    import weakref

    return weakref.ref(tensor)


def _layers(part: GraphPart, platform: str) -> dict[int, list[Layer]]:
    """How the weights among the inputs are packed, by position: a tied weight in one way for each kind of layer."""
    places = part.graph.graph.find_nodes(op="placeholder")
    found: dict[int, list[Layer]] = {}
    for node in part.nodes:
        layer = layer_of(node, platform)
        if layer is not None:
            at = 2 if layer.kind == "grouped_linear" else 1
            known = found.setdefault(places.index(node.args[at]), [])
            if layer not in known:
                known.append(layer)
    return found
