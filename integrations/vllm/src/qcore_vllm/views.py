"""Tensors without memory that stand for weights while vLLM's loaders cut them.

A model of vLLM loads ``param.data.narrow(...).copy_(loaded_weight.narrow(...))``: its layers know which rows or columns
a rank needs, where the parts of a fused layer go, and which experts are here. A quantized weight is several tensors,
which cannot be cut that way. So both sides of the copy are a `WeightView`: slices of it only note what was asked for,
and the copy moves a part of a `QTensor`. vLLM's loaders stay as they are, whatever they do for a model.

Anything else that a loader does with a weight works on the dense values. Where it transposes what a float checkpoint
stores as ``(K, N)``, as for GPT-2 and gpt-oss, it gets a view of that shape, and transposes it to that of the weight.
"""

# ruff: noqa: SLF001 - torch's interface to subclasses of Tensor

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from qcore import UnsupportedError

from .windows import Window

_ATEN = torch.ops.aten


class WeightView(Tensor):
    """The shape of a part of a weight, without its values. Slices are views of the same class.

    **Fields:** ``window``: the part.
    """

    window: Window

    @classmethod
    def _make(cls, window: Window, dtype: torch.dtype, device: torch.device, **fields: Any) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, window.shape, dtype=dtype, device=device, requires_grad=False
        )
        made.window = window
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def part(self, window: Window) -> WeightView:
        """The view of another part of the same weight."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The values of the part. Raises `UnsupportedError` for a weight that has none yet."""
        raise NotImplementedError

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    _HANDLERS: ClassVar[dict[Any, Callable[..., Any]]] = {}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = cls._HANDLERS.get(func)
        made = NotImplemented if handler is None else handler(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        dense = torch.utils._pytree.tree_map_only(WeightView, lambda view: _dense_for(func, view), (args, kwargs or {}))
        return func(*dense[0], **dense[1])


def _dense_for(func: Any, view: WeightView) -> Tensor:
    try:
        return view.dense()
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}\nvLLM's loader of this layer called {func}.") from None


def _handles(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        WeightView._HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register


def _of(view: WeightView, window: Window | None) -> Any:
    return NotImplemented if window is None else view.part(window)


@_handles(_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default)
def _same(view: WeightView, **_: Any) -> Any:
    return view.part(view.window)


@_handles(_ATEN._to_copy.default)
def _moved(view: WeightView, *, device: Any = None, **_: Any) -> Any:
    # Dtype and device of a weight follow from its layer.
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(view.shape, dtype=view.dtype, device="meta")
    return view.part(view.window)


@_handles(_ATEN.clone.default)
def _cloned(view: WeightView, **_: Any) -> Any:
    return view.part(view.window)


@_handles(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
def _viewed(view: WeightView, size: Any) -> Any:
    return view.part(view.window) if tuple(size) == tuple(view.shape) else NotImplemented


@_handles(_ATEN.slice.Tensor)
def _sliced(view: WeightView, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if step != 1:
        return NotImplemented
    dim, size = dim % view.dim(), view.shape[dim]
    first, last, _ = slice(start, end).indices(size)
    return _of(view, view.window.sliced(dim, first, max(first, last)))


@_handles(_ATEN.select.int)
def _selected(view: WeightView, dim: int, index: int) -> Any:
    dim = dim % view.dim()
    return _of(view, view.window.selected(dim, index % view.shape[dim]))


@_handles(_ATEN.unsqueeze.default)
def _unsqueezed(view: WeightView, dim: int) -> Any:
    return _of(view, view.window.unsqueezed(dim % (view.dim() + 1)))


@_handles(_ATEN.permute.default)
def _permuted(view: WeightView, dims: Any) -> Any:
    return _of(view, view.window.transposed(tuple(dim % view.dim() for dim in dims)))


@_handles(_ATEN.transpose.int, _ATEN.t.default)
def _transposed(view: WeightView, dim0: int = 0, dim1: int = 1) -> Any:
    order = list(range(view.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _of(view, view.window.transposed(tuple(order)))


@_handles(_ATEN.unbind.int)
def _unbound(view: WeightView, dim: int = 0) -> Any:
    found = [_selected(view, dim, index) for index in range(view.shape[dim])]
    return NotImplemented if any(one is NotImplemented for one in found) else found


@_handles(_ATEN.split.Tensor)
def _split(view: WeightView, split_size: int, dim: int = 0) -> Any:
    size = view.shape[dim]
    return _pieces(view, [min(split_size, size - start) for start in range(0, size, split_size)], dim)


@_handles(_ATEN.split_with_sizes.default)
def _pieces(view: WeightView, split_sizes: Any, dim: int = 0) -> Any:
    found, start = [], 0
    for size in split_sizes:
        found.append(_sliced(view, dim, start, start + size))
        start += size
    return NotImplemented if any(one is NotImplemented for one in found) else found


@_handles(_ATEN.copy_.default)
def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if isinstance(target, WeightView):
        return target.receive(source)  # type: ignore[attr-defined]
    assert isinstance(source, WeightView)
    return target.copy_(source.dense(), non_blocking)


@_handles(_ATEN.fill_.Scalar, _ATEN.fill_.Tensor)
def _filled(target: WeightView, value: Any) -> Any:
    return target.fill(float(value))  # type: ignore[attr-defined]


@_handles(_ATEN.zero_.default)
def _zeroed(target: WeightView) -> Any:
    return target.fill(0.0)  # type: ignore[attr-defined]
