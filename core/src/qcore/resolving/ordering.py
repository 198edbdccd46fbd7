"""Weights whose stored columns are in another order than the features of x (GPTQ's act-order).

Kernels never see an order: `OrderedKernel` wraps the selected one, packs the weight without its order, and permutes x
with one gather. Layers that read the same x in the same order (query, key and value of an attention) share that gather.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from ..discovery.kernels import Kernel, Packed
from ..formats.bits import has_values
from ..weights.qtensor import QTensor

_SUFFIX = "+order"
_ORDER = "order"


class OrderedKernel(Kernel):
    """Wraps a kernel for plain weights into one for weights with an order."""

    def __init__(self, kernel: Kernel, name: str, packing: str) -> None:
        self.kernel, self.name, self._packing = kernel, name, packing + _SUFFIX
        self._last: tuple[Packed, dict[str, Tensor], Tensor] | None = None

    @property
    def packing(self) -> str:
        """The packing of the wrapped kernel, plus a suffix for the order."""
        return self._packing

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        """Pack ``weight`` without its order, which becomes one more packed tensor."""
        assert weight.order is not None
        return {**self.kernel.pack(weight.derived(order=None)), _ORDER: interned(weight.order)}

    def unpack(self, packed: Packed) -> QTensor:
        """The weight with its order."""
        inner, order = _split(packed)
        return self.kernel.unpack(inner).derived(order=order)

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> Tensor:
        """Call the wrapped kernel on x with its features in the stored order."""
        inner, order = self._parts(packed)
        if x.dim() < 1 or x.shape[-1] != order.shape[-1]:
            return self.kernel(x, inner, bias, **runtime_params)  # raises an error about x
        if order.dim() > 1:
            x = gathered_by_expert(x, order, runtime_params["offsets"])
            return self.kernel(x, inner, bias, **runtime_params)
        return self.kernel(gathered(x, order), inner, bias, **runtime_params)

    def _parts(self, packed: Packed) -> tuple[dict[str, Tensor], Tensor]:
        """The packed weight of the wrapped kernel, and the order: the same objects at every call of a layer.

        Kernels recognize a known weight by the identity of its dict.
        """
        if torch.compiler.is_compiling():
            return _split(packed)
        last = self._last
        if last is None or last[0] is not packed:
            last = self._last = (packed, *_split(packed))
        return last[1], last[2]

    def tune(self, x: Tensor, packed: Packed, bias: Tensor | None, **runtime_params: Tensor) -> None:
        """Tune the wrapped kernel."""
        inner, order = _split(packed)
        permuted = gathered(x, order) if order.dim() == 1 else gathered_by_expert(x, order, runtime_params["offsets"])
        self.kernel.tune(permuted, inner, bias, **runtime_params)

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes that the wrapped kernel reports for ``tensor``."""
        return self.kernel.nbytes(tensor)


def _split(packed: Packed) -> tuple[dict[str, Tensor], Tensor]:
    return {name: tensor for name, tensor in packed.items() if name != _ORDER}, packed[_ORDER]


class _LastGather(threading.local):
    """The last gather of a thread. ``x`` is a weak reference: the result is freed with x."""

    x: weakref.ref[Tensor] | None = None
    key: tuple[Any, ...] = ()
    result: Tensor | None = None

    def forget(self, _dead: Any = None) -> None:
        self.x, self.key, self.result = None, (), None


_last = _LastGather()


def gathered(x: Tensor, order: Tensor) -> Tensor:
    """Put feature ``order[j]`` of x ``(..., K)`` at position j.

    A second call with the same unmodified x and the same order, on the same stream, returns the same tensor.
    """
    if not _can_share(x):
        return x.index_select(-1, order)
    key = (id(order), x._version, _stream(x))  # noqa: SLF001 - the count of in-place writes has no public name
    last = None if _last.x is None else _last.x()
    if last is x and _last.key == key and _last.result is not None:
        return _last.result
    result = x.index_select(-1, order)
    local = _last

    def forget(dead: Any) -> None:
        if local.x is dead:
            local.forget()

    _last.x, _last.key, _last.result = weakref.ref(x, forget), key, result
    return result


def gathered_by_expert(x: Tensor, orders: Tensor, offsets: Tensor) -> Tensor:
    """Permute each row of x ``(T, K)`` by its expert's order; ``orders``: int32 ``(E, K)``, ``offsets``: ``(E,)``."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    # Rows after the last offset belong to no expert, so any order will do.
    expert = torch.searchsorted(offsets, rows, right=True).clamp_max(orders.shape[0] - 1)
    return x.gather(1, orders.index_select(0, expert).long())


def _can_share(x: Tensor) -> bool:
    """Whether the result may be shared: not in a trace, with gradients, for inference tensors or in a graph capture.

    Inference tensors have no version counter, and a captured graph would read memory that another graph owns.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_inference():
        return False
    if x.requires_grad and torch.is_grad_enabled():
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.device.type == "cuda" else 0


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Tensor] = weakref.WeakValueDictionary()


def interned(order: Tensor) -> Tensor:
    """The canonical tensor of an order on its device, so that layers of equal order share it by identity."""
    if not has_values(order):
        return order
    key = (str(order.device), order.cpu().numpy().tobytes())
    return _interned.setdefault(key, order)
