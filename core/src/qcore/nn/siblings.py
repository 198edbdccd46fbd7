"""`SiblingLinear`: linear layers that read the same x share one packed weight, one quantization of x and one call.

The first of the siblings that is called with an x computes the results of all; the others take their columns. Each
stays a layer of its own, with its rows of the weight in ``weight`` and ``state_dict``.
"""

# ruff: noqa: SLF001 - layers of one group rebind each other

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contracts import LinearRequest
from ..errors import FormatError
from ..formats.tracing import is_transformed
from ..functional.checks import check_bias
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from .capturing import captured_linear
from .linear import QuantizedLinear, _any_autocast
from .offloading import HOOK

# The public function makes an object at every call, which takes longer than all else that a sibling does.
_current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

_WASTED = 2
"""After so many calls in a row the results of which another sibling did not take, the layers are separated."""


class RowsStore(WeightStore):
    """The rows ``start .. start + length`` of the weight of another store, which siblings share.

    ``any_bias``: whether any sibling has a bias, so that the shared product adds one.
    """

    def __init__(self, whole: WeightStore, start: int, length: int, any_bias: bool) -> None:
        self.whole, self.start, self.length, self.any_bias = whole, start, length, any_bias
        self.lock, self.users = whole.lock, whole.users
        self._recent: dict[str, weakref.ref[Tensor]] = {}

    # Facts are read from the shared store, because a move or another sibling's new weight changes it.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """``(rows, K)``."""
        return torch.Size((self.length, *self.whole.shape[1:]))

    format = property(lambda self: self.whole.format)
    quantizer = property(lambda self: self.whole.quantizer)
    device = property(lambda self: self.whole.device)
    has_order = property(lambda self: self.whole.has_order)
    watch = property(lambda self: self.whole.watch)

    def neutral(self) -> QTensor:
        """The rows in the neutral format, as tensors of their own. Returns an earlier result while it is alive."""
        with self.lock:
            recent = self._recently_unpacked()
            if recent is None or recent.device != self.device:
                rows = self.whole.neutral().narrow(0, self.start, self.length)
                recent = rows.map(lambda t: t.contiguous().clone() if t.untyped_storage().nbytes() > t.nbytes else t)
                self._recent = {name: weakref.ref(tensor) for name, tensor in recent.tensors().items()}
                self.watch.add(recent, (), self._take)
            return recent

    def set(self, weight: QTensor) -> None:
        """Replace these rows. Raises `FormatError` if the siblings' weights have another format, order or scale."""
        self.watch.forget()
        self._take(weight)

    def _take(self, weight: QTensor) -> None:
        whole, end = self.whole.neutral(), self.start + self.length
        before, after = whole.narrow(0, 0, self.start), whole.narrow(0, end, whole.shape[0] - end)
        self._recent = {}
        self.whole._take(QTensor.cat([part for part in (before, weight, after) if part.shape[0]]))

    def move(self, fn: Callable[[Tensor], Tensor], device: torch.device) -> bool:
        """Move the whole weight, once for all siblings."""
        return self.whole.move(fn, device)

    def keep_only(self, packings: Any) -> None:
        """Drop packed forms of the whole weight that no sibling uses."""
        self.whole.keep_only(packings)

    def __getstate__(self) -> dict[str, Any]:
        return {"whole": self.whole, "start": self.start, "length": self.length, "any_bias": self.any_bias}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RowsStore.__init__(self, **state)


class _Results:
    """What one call computed for an x: each member's result until it takes it.

    ``x`` is a weak reference: results for an x that no longer exists are dropped with it. ``key``: what else they
    depend on; ``left``: how many were not taken.
    """

    __slots__ = ("key", "left", "parts", "x")

    def __init__(self, x: weakref.ref[Tensor], key: tuple[Any, ...], parts: list[Tensor | None]) -> None:
        self.x, self.key, self.parts, self.left = x, key, parts, len(parts)

    def pop(self, index: int) -> Tensor | None:
        """The result of a member, once."""
        part, self.parts[index] = self.parts[index], None
        self.left -= part is not None
        return part


class _Local(threading.local):
    """The results of a thread's last call that some members have not taken yet."""

    def __init__(self) -> None:  # runs in each thread: a class attribute instead would be a guard of Dynamo that fails
        self.results: _Results | None = None


class Siblings:
    """The layers of a group, and the results that some of them have not taken yet."""

    def __init__(self, members: Sequence[SiblingLinear]) -> None:
        self.members = list(members)
        self._local = _Local()
        self._biases: tuple[tuple[Any, ...], Tensor] | None = None
        self._wasted = 0
        me = weakref.ref(self)

        def dropped(x: weakref.ref[Tensor]) -> None:
            group = me()
            if group is not None:
                group.drop(x)

        self._dropped = dropped

    def bias(self) -> Tensor | None:
        """The biases of all members ``(N,)``, zeros for one that has none; None if none has."""
        own = [member._parameters.get("bias") for member in self.members]
        if all(bias is None for bias in own):
            return None
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self._joined(own)
        key = tuple(None if bias is None else (bias, bias._version, bias.untyped_storage()) for bias in own)
        known = self._biases
        if known is None or not all(map(_is_unchanged, known[0], key)):
            known = self._biases = key, self._joined(own)
        return known[1]

    def _joined(self, own: Sequence[Tensor | None]) -> Tensor:
        for bias, member in zip(own, self.members, strict=True):
            check_bias(bias, member.out_features, self.members[0]._store.device)
        like = next(bias for bias in own if bias is not None)
        return torch.cat(
            [
                like.new_zeros(member.out_features) if bias is None else bias
                for member, bias in zip(self.members, own, strict=True)
            ]
        )

    def take(self, index: int, x: Tensor, key: tuple[Any, ...]) -> Tensor | None:
        """The result of a member for x and ``key``, if a sibling has computed it on this thread."""
        results = self._local.results
        if results is None or results.x() is not x or results.key != key:
            return None
        part = results.pop(index)
        if not results.left:
            self._local.results = None
            self._wasted = 0
        return part

    def give(self, index: int, x: Tensor, key: tuple[Any, ...], whole: Tensor) -> Tensor | None:
        """The result of a member; those of its siblings are kept until they take them or x is gone."""
        local = self._local
        if local.results is not None:
            self._wasted += 1
        results = local.results = _Results(weakref.ref(x, self._dropped), key, [*self.split(whole)])
        return results.pop(index)

    def drop(self, x: weakref.ref[Tensor]) -> None:
        """Drop the results that were kept for an x that no longer exists."""
        results = self._local.results
        if results is not None and results.x is x:
            self._local.results = None
            self._wasted += 1

    def split(self, whole: Tensor) -> list[Tensor]:
        """Each member's columns of ``(..., N)``, which may be changed in place; see `without_base`."""
        sizes = [member.out_features for member in self.members]
        if not torch.compiler.is_compiling():
            return [*torch.unsafe_split_with_sizes(whole, sizes, -1)]
        parts = whole.split_with_sizes(sizes, -1)
        return [part.contiguous() if whole.requires_grad else part for part in parts]

    @property
    def is_wasteful(self) -> bool:
        """Whether results for siblings were computed in vain, because they read another x."""
        return self._wasted >= _WASTED

    def separate(self) -> None:
        """Give each member a weight of its own."""
        for member in self.members:
            member._leave()
        self._local = _Local()

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Siblings.__init__(self, state["members"])


class SiblingLinear(QuantizedLinear):
    """A `QuantizedLinear` that shares its packed weight with siblings; `qcore.fuse_` makes them."""

    _group: Siblings | None = None
    _index: int

    @property
    def siblings(self) -> tuple[QuantizedLinear, ...]:
        """The layers that share the packed weight, this one included; empty if they were separated."""
        return () if self._group is None else tuple(self._group.members)

    def _request(self, x_dtype: torch.dtype, training: bool) -> LinearRequest:
        request = super()._request(x_dtype, training)
        store = self._store
        shared: dict[str, Any] = (
            {"n": store.whole.shape[0], "bias": store.any_bias} if isinstance(store, RowsStore) else {}
        )
        return replace(request, **shared)

    def _binding_store(self) -> WeightStore:
        return self._store.whole if isinstance(self._store, RowsStore) else self._store

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer. Raises `FormatError` if the last dimension of x is not ``in_features``."""
        group = self._group
        if group is None:
            return super().forward(x)
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            # In a graph each sibling asks for the same product, which the compiler computes once.
            whole = captured_linear(self, x, group) if torch.compiler.is_compiling() else None
            return group.split(self._run(x) if whole is None else whole)[self._index]
        if x.is_inference() or is_transformed():  # it may change unseen; results live as long as a transform
            return group.split(self._whole(x, group))[self._index]
        autocast = _autocast(x) if _any_autocast() else None
        numbers = (self.scheme.activation, self.scheme.output)  # of static ones, which may be loaded for one member
        key = (
            x._version,
            torch.is_grad_enabled(),
            self._dtype,
            self._fixed_out_dtype,
            _stream_of(x),
            autocast,
            numbers,
        )
        found = group.take(self._index, x, key)
        if found is not None:
            return found
        if group.is_wasteful:
            group.separate()
            return self.forward(x)
        own = group.give(self._index, x, key, self._whole(x, group))
        assert own is not None  # nobody has taken it
        return own

    def _whole(self, x: Tensor, group: Siblings) -> Tensor:
        """The results of all members side by side."""
        bound = self._fast_bound(x, None)
        return self._run(x) if bound is None else bound.call(x, group.bias())

    def _call_bias(self) -> Tensor | None:
        return super()._call_bias() if self._group is None else self._group.bias()

    def _needs_grad(self, x: Tensor) -> bool:
        group = self._group
        members: Any = (self,) if group is None else group.members
        return any(super(SiblingLinear, member)._needs_grad(x) for member in members)

    def _leave(self) -> None:
        """Hold the weight alone from now on."""
        with self._store.lock:
            weight, self._group = self._store.neutral(), None
            self._store.users.discard(self)
            self._store = WeightStore(weight)
            self._store.users.add(self)
            self._bind_primary(self._bind_settings.settings)

    def _set_weight(self, weight: Any) -> None:
        """Replace the rows of this layer in the shared weight; a weight of another format separates the siblings."""
        group = self._group
        if group is not None and not _fits(weight, self._store):
            group.separate()
        if self._group is None:
            super()._set_weight(weight)
            return
        self._follow()
        with self._store.lock:
            self._store.set(weight.map(Tensor.detach))
            self._bind_all()

    def _load_found(self, found: dict[str, Tensor], prefix: str, assign: bool, error_msgs: list[str]) -> None:
        try:
            super()._load_found(found, prefix, assign, error_msgs)
        except FormatError:
            if self._group is None:
                raise
            self._group.separate()  # scales of another dtype, say
            super()._load_found(found, prefix, assign, error_msgs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == HOOK and self._group is not None and value is not None:
            self._group.separate()  # an offloaded weight is loaded for one layer at a time
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return super().extra_repr() + (f", siblings={len(self.siblings)}" if self._group is not None else "")


def _is_unchanged(one: Any, other: Any) -> bool:
    """Whether two biases have the same version and memory; ``bias.data = t`` changes the memory alone."""
    if one is None or other is None:
        return one is other
    return one[0] is other[0] and one[1] == other[1] and one[2]._cdata == other[2]._cdata


def _fits(weight: Any, store: WeightStore) -> bool:
    """Whether a weight can replace rows of a store's."""
    same = isinstance(weight, QTensor) and weight.format == store.format and tuple(weight.shape) == tuple(store.shape)
    return same and not store.has_order and weight.order is None and not store.format.scale.has_global


def _stream_of(x: Tensor) -> int:
    """The stream that x's kernels run on: results of another stream may not be complete."""
    return _current_stream(x.get_device()) if x.is_cuda else 0


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def join(layers: Sequence[QuantizedLinear]) -> list[SiblingLinear]:
    """Siblings that replace ``layers``, which have one scheme, compute dtype, device and number of input features.

    Raises `FormatError` if their weights cannot be joined: different orders, global scales or dtypes of scales.
    """
    whole = WeightStore(QTensor.cat([layer._store.neutral() for layer in layers]))
    any_bias, start = any(layer.bias is not None for layer in layers), 0
    made: list[SiblingLinear] = []
    for layer in layers:
        store = RowsStore(whole, start, layer.out_features, any_bias)
        made.append(getattr(type(layer), "sibling", _sibling)(layer, store))
        if layer.out_dtype is not None:
            made[-1].out_dtype = layer.out_dtype
        start += layer.out_features
    group = Siblings(made)
    for index, member in enumerate(made):
        member._group, member._index = group, index
    return made


def _sibling(layer: QuantizedLinear, store: RowsStore) -> SiblingLinear:
    return SiblingLinear(store, layer.scheme, layer.bias, layer._dtype)
