"""A part of a captured graph as one compiled JAX program over arrays that stay on the device.

Weights become arrays once. States are donated and updated in place. Per call only fresh arguments and results cross
over, on CPUs without copies.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from qcore import PluginError, QcoreWarning
from qcore.plugin_api import GraphPart, PartRefused, Resident, Role, Stamp, first_line, weight_of, why_shared

from .. import environment
from ..engines.crossing import array_of, array_of_bytes, in_pairs, joined, parted, tensor_of, wait_for_torch
from ..engines.inbox import Inbox
from ..engines.jax import alone_on, device_of, writable
from ..memo import Memo
from .apart import without_callers
from .kept import kept_on_disk
from .layers import Cuts, Made, Siblings, Together, joined_tensors, layer_of, siblings
from .lowering import lowered
from .meshes import MeshCut, Placement, cuts_of, placed
from .notes import LATE, check, note_late, raise_late
from .quantized import Arrays, Layer
from .states import State, States


def _packed(tensor: Tensor, layer: Layer, sharding: Any) -> tuple[Arrays, bool]:
    weight = weight_of(tensor)
    made = {name: placed(array_of(part), sharding) for name, part in layer.pack(weight).items()}
    for array in made.values():
        array.block_until_ready()
    return made, False


def _packed_together(tensors: Sequence[Tensor], of: Siblings) -> Made:
    weights = [weight_of(tensor) for tensor in tensors]
    parts = [layer.pack(weight) for layer, weight in zip(of.layers, weights, strict=True)]
    ordered = any(weight.order is not None for weight in weights)
    packed = parts if ordered else [joined_tensors(parts, of.whole)]
    made = jax.block_until_ready([{name: array_of(part) for name, part in one.items()} for one in packed])
    return made if ordered else made[0]  # type: ignore[no-any-return]


_weights: Memo[Arrays] = Memo(_packed)
_together = Together(_packed_together)
_statics: Resident[Array] = Resident(array_of)
_states = States()
_spread: Resident[Array] = Resident(array_of)
"""States on a mesh, beside torch's copy of them."""


def _static(tensor: Tensor, sharding: Any) -> Array:
    return _statics.get(tensor) if sharding is None else _on_mesh.get(tensor, sharding)


_on_mesh: Memo[Array] = Memo(lambda tensor, sharding: (placed(array_of(tensor), sharding), False))


def _state_array(tensor: Tensor, sharding: Any, *, paired: bool) -> Array:
    """An array with the values of a state that may be donated; ``paired``: int64 as pairs of words."""
    made = array_of_bytes if paired else array_of
    if sharding is None:
        return jax.numpy.array(made(tensor), copy=True)
    known = _spread.peek(tensor)
    usable = known is not None and known.sharding == sharding and not known.is_deleted()
    # Nothing counts writes to inference tensors, or through others that share the memory.
    usable = usable and not tensor.is_inference() and not why_shared(tensor)
    if known is not None and usable and _spread.get(tensor) is known:  # torch has not written to it since
        return known
    return placed(jax.numpy.array(made(tensor), copy=True), sharding)  # type: ignore[no-any-return]


def _kept(y: Array, sharding: Any) -> Array:
    kept: Array = y if sharding is None else jax.lax.with_sharding_constraint(y, sharding)
    return kept


_PAIR = 2
"""Elements of an integer of 64 bits."""


class Program:
    """See the module. Called with one tensor or number per input of the part, it returns the part's results.

    **Attributes:** ``jitted``: the function of states, of weights and other fixed arrays, and of fresh arguments;
    ``layers``: by position of a weight among the inputs, how it is packed. ``platform`` is by default that of the part;
    ``given``: how each weight is cut over a mesh, by default as that which the part was made with.
    """

    def __init__(
        self, part: GraphPart, platform: str | None = None, given: Sequence[MeshCut | None] | None = None
    ) -> None:
        self._device, self._platform = part.device, platform or part.device.type
        places = part.graph.graph.find_nodes(op="placeholder")
        weights = [at for at, one in zip(places, part.inputs, strict=True) if one.role is Role.WEIGHT]
        known = cuts_of([one.value for one in part.inputs if one.role is Role.WEIGHT]) if given is None else given
        cuts = {at: cut for at, cut in zip(weights, known, strict=True) if cut}
        self.placement = Placement(cuts, part.device if platform is None else None)
        groups = siblings(part, self._platform, cuts)
        self._run = lowered(part, self._platform, cuts, groups)
        self._plain = lowered(part, self._platform, cuts, groups, special=False) if self._platform == "cuda" else None
        roles = [one.role for one in part.inputs]
        self._states = [i for i, role in enumerate(roles) if role is Role.STATE]
        self._fixed = [i for i, role in enumerate(roles) if role in {Role.WEIGHT, Role.STATIC}]
        self._fresh = [i for i, role in enumerate(roles) if role is Role.FRESH]
        self._numbers = {i: one.example for i, one in enumerate(part.inputs) if one.role is Role.NUMBER}
        self.layers = _layers(part, self._platform, cuts, groups)
        self._siblings = {places.index(of.weights[0]): (of, [places.index(one) for one in of.weights]) for of in groups}
        self._state_places = [self.placement.state(tuple(part.inputs[i].example.shape)) for i in self._states]
        self._pairs = self._in_pairs(part)
        self._count = len(roles)
        self._updates = [(i, part.updates[i]) for i in self._states]
        self._returned = part.returned
        self._dtypes = [part.outputs[i].meta["val"].dtype for i in part.returned]
        self.jitted: Any = jax.jit(self._whole, donate_argnums=0)
        self._compiled = False
        self._known: _Known | None = None
        self._inbox = Inbox()
        floats = bool(self._dtypes) and all(dtype.is_floating_point for dtype in self._dtypes)
        self._late = self._platform in LATE and floats and bool(self._states) and self.placement.whole is None
        self._lock = threading.Lock()

    def _in_pairs(self, part: GraphPart) -> set[int]:
        """The inputs of int64 that are given as pairs of words. A compiler without a device gets none.

        A mesh gets states as pairs if torch can share their memory, and numbers of 32 bits otherwise.
        """
        if self._platform not in {"cpu", "cuda"}:
            return set()
        wide = {i for i, one in enumerate(part.inputs) if getattr(one.example, "dtype", None) is torch.int64}
        if self.placement.whole is not None:
            return wide & set(self._states) if self.placement.here is not None else set()
        return wide & {*self._states, *self._fresh}

    def _whole(self, states: list[Any], fixed: list[Any], fresh: list[Any]) -> Any:
        values: list[Any] = [None] * self._count
        for places, group in ((self._states, states), (self._fixed, fixed), (self._fresh, fresh)):
            for i, value in zip(places, group, strict=True):
                values[i] = value
        beyond = []
        counters = [i for i in self._states if i in self._pairs and values[i].size == _PAIR]
        if len(counters) > 1:
            # Read at once, and only then written: XLA would copy each before it writes it.
            read = jax.lax.optimization_barrier(jnp.stack([values[i].reshape(_PAIR) for i in counters]))
            for i, pair in zip(counters, read, strict=True):
                values[i] = pair.reshape(values[i].shape)
        for i in self._pairs:
            values[i], outside = joined(values[i])
            beyond.append(outside)
        for i, number in self._numbers.items():
            values[i] = number
        for i, layers in self.layers.items():
            values[i] = dict(zip(layers, values[i], strict=True))
        # The rules rely on rank promotion; the user's program may forbid it.
        with jax.numpy_rank_promotion("allow"):
            outputs, bad = self._run(values, beyond)
        states = [parted(outputs[to]) if i in self._pairs else outputs[to] for i, to in self._updates]
        updates = [_kept(y, at) for y, at in zip(states, self._state_places, strict=True)]
        returned = [outputs[i] for i in self._returned]
        if self._late and bad is not None:
            returned = [jnp.where(jnp.any(bad), jnp.nan, y) for y in returned]
        # States first: JAX donates their memory to the first output of the same shape and dtype, which a result may be.
        return updates, [_kept(y, self.placement.whole) for y in returned], bad

    def __call__(self, values: Sequence[Any]) -> Sequence[Tensor]:
        """Run the program; on a GPU torch's current stream waits for it."""
        if environment.forked:
            raise PluginError(
                "this process was forked from one that had used JAX, and JAX does not work after a fork.\n"
                "Start workers with the 'spawn' method: torch.multiprocessing.set_start_method('spawn')."
            )
        given = [value for value in values if isinstance(value, Tensor)][:1]
        with self._lock, device_of(given) if given else alone_on(self._device):
            return self._call(values)

    def _call(self, values: Sequence[Any]) -> Sequence[Tensor]:
        whole = self.placement.whole
        here = self.placement.here
        held = [_states.get(values[i], at, here) for i, at in zip(self._states, self._state_places, strict=True)]
        states = [
            _state_array(values[i], at, paired=i in self._pairs) if state is None else state.array
            for i, state, at in zip(self._states, held, self._state_places, strict=True)
        ]
        fixed = self._fixed_arrays(values)
        fresh = self._fresh_arrays([values[i] for i in self._fresh])
        raise_late(self._device)
        run = self.jitted if self._compiled else self._compile_and_run
        updates, results, bad = run(states, fixed, fresh)
        if self._platform != "cuda" or not results:
            jax.block_until_ready(updates)
        tensors = [self._result(y, dtype) for y, dtype in zip(results, self._dtypes, strict=True)]
        for i, state, array in zip(self._states, held, updates, strict=True):
            if state is None:
                self._copy_back(values[i], array, paired=i in self._pairs)
            else:
                state.replace(array, values[i])
        self._count_writes([values[i] for i in self._states], held)
        if bad is not None and self._late:
            note_late(self._device, bad)
        elif bad is not None:
            # On GPUs through torch: JAX took 400 us for these two bytes.
            on_gpu = self._platform == "cuda" and whole is None
            self._check(tensor_of(bad, self._device) if on_gpu else torch.from_numpy(np.array(bad)))
        return tensors

    def _count_writes(self, tensors: Sequence[Tensor], held: Sequence[State | None]) -> None:
        shared = [(tensor, state) for tensor, state in zip(tensors, held, strict=True) if state is not None]
        torch.autograd.graph.increment_version([tensor for tensor, _ in shared if not tensor.is_inference()])
        stamped = [(state.stamp, tensor) for tensor, state in shared if state.stamp is not None]
        if stamped:
            Stamp.renew_each(*zip(*stamped, strict=True))

    def _check(self, noted: Tensor) -> None:
        """Raise for what a call has noted: `PartRefused` where torch can repeat it."""
        try:
            check(noted)
        except OverflowError as error:
            if self._states:
                raise
            raise PartRefused(first_line(error), once=True) from error

    def _compile_and_run(self, states: list[Any], fixed: list[Any], fresh: list[Any]) -> Any:
        with kept_on_disk():
            try:
                found = self._first_run(states, fixed, fresh)
            except PartRefused as refused:
                if self._plain is None:
                    raise
                # A version of cuDNN may have no kernel for a shape after all, one of Pallas no lowering of a kernel.
                warnings.warn(
                    f"qcore_xla: this program runs without kernels for GPUs, which is slower: {refused}",
                    QcoreWarning,
                    stacklevel=2,
                )
                self._run = self._plain
                # JAX would find the trace of an equal function.
                self.jitted = jax.jit(partial(self._whole), donate_argnums=0)
                found = self._first_run(states, fixed, fresh)
        self._compiled, self._plain = True, None
        return found

    def _first_run(self, states: list[Any], fixed: list[Any], fresh: list[Any]) -> Any:
        """Raises `PartRefused` for what cannot be traced or compiled, such as arguments that no rule takes."""
        try:
            return without_callers(lambda: self.jitted(states, fixed, fresh))
        except PartRefused:
            raise
        except Exception as error:
            began = any(array.is_deleted() for array in states)  # it was compiled, and has taken the states
            if began or "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise PartRefused(f"{type(error).__name__}: {first_line(error)}") from error

    def _copy_back(self, tensor: Tensor, array: Array, *, paired: bool) -> None:
        """Write the new values of a state that does not share the memory of an array."""
        new = from_dlpack(self.placement.gathered(array))
        tensor.copy_(new.view(torch.int64).squeeze(-1) if paired else new)
        if self.placement.whole is not None:
            _spread.put(tensor, array)

    def _fixed_arrays(self, values: Sequence[Any]) -> list[Any]:
        """Arrays of weights, parameters and buffers: those of the last call if the tensors are the same."""
        tensors = [values[i] for i in self._fixed]
        known = self._known
        if known is not None and known.ids == list(map(id, tensors)) and known.stamp.fits(*tensors):
            return known.arrays
        try:
            arrays = [self._fixed_array(i, values) for i in self._fixed]
        except OverflowError as error:  # a parameter, buffer or constant of the graph
            raise PartRefused(first_line(error)) from error
        refs = [weakref.ref(tensor, self._forget) for tensor in tensors]
        self._known = _Known(list(map(id, tensors)), Stamp(*tensors), arrays, refs)
        return arrays

    def _forget(self, _ref: Any) -> None:
        self._known = None  # from now on ids may belong to other tensors

    def _fixed_array(self, i: int, values: Sequence[Any]) -> Any:
        if i in self._siblings:
            of, places = self._siblings[i]
            return [_together.get([values[at] for at in places], of)]
        if i in self.layers:
            return [_weights.get(values[i], layer, self.placement.parts(layer.cut)) for layer in self.layers[i]]
        return _static(values[i], self.placement.whole)

    def _fresh_arrays(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Arrays of the arguments that are new in each call; on a GPU the program then sees what torch has written."""
        if self._platform == "cuda" and self.placement.whole is None:
            if not tensors:
                wait_for_torch(self._device)
            elif all(tensor.is_cuda for tensor in tensors):
                found = self._inbox.arrays(tensors)
                if found is not None:
                    return found
        return [self._argument(tensor) for tensor in tensors]

    def _argument(self, tensor: Tensor) -> Any:
        whole = self.placement.whole
        if whole is not None:
            return placed(array_of(tensor), whole)
        if tensor.is_cuda or tensor.dtype == torch.bfloat16:
            return array_of_bytes(tensor)
        array = in_pairs(tensor).numpy()
        return array if self._fixed or self._states else jax.device_put(array, jax.devices("cpu")[0])

    def _result(self, y: Array, dtype: torch.dtype) -> Tensor:
        y = self.placement.gathered(y)
        if self._platform == "cuda" and self.placement.whole is None:
            return tensor_of(y, self._device).to(dtype)
        if self._platform == "cuda" or dtype == torch.bfloat16:
            y.block_until_ready()
            return from_dlpack(y).to(dtype)
        return writable(np.asarray(y)).to(dtype)


class _Known(NamedTuple):
    """The arrays of the last call's weights, parameters and buffers, and what tells that the tensors are the same."""

    ids: list[int]
    stamp: Stamp
    arrays: list[Any]
    refs: list[Any]


def _layers(part: GraphPart, platform: str, cuts: Cuts, groups: Sequence[Siblings]) -> dict[int, list[Layer]]:
    """How the weights among the inputs are packed, by position: a tied weight in one way for each kind of layer.

    Siblings' weights are packed at the position of the first of them.
    """
    places = part.graph.graph.find_nodes(op="placeholder")
    found: dict[int, list[Layer]] = {}
    for of in groups:
        found |= {places.index(weight): [of.whole] if weight is of.weights[0] else [] for weight in of.weights}
    joint = {node for of in groups for node in of.nodes}
    for node in part.nodes:
        layer = None if node in joint else layer_of(node, platform, cuts)
        if layer is not None:
            at = 2 if layer.kind == "grouped_linear" else 1
            known = found.setdefault(places.index(node.args[at]), [])
            if layer not in known:
                known.append(layer)
    return found
