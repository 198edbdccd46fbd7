"""Functional forms: `linear`, `conv2d` and `embedding` on a `QTensor`, and the cache of packed weights behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .activations import Activation, OutputInt8, StaticInt8
from .autograd import call_differentiably
from .binding import Bound, WeightStore, bind, call_first
from .contracts import Conv2dRequest, EmbeddingRequest, LinearRequest
from .contracts.conv2d import laid_out_like
from .contracts.embedding import check_index_dtype
from .errors import FormatError
from .qtensor import QTensor
from .settings import current

Pair = tuple[int, int]


class PackedCache:
    """Bound kernels by the identity and version of the tensors they were packed from.

    Weak: an entry goes when its first tensor does. A tensor that is changed in place is packed anew.
    """

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._entries: Any = WeakTensorKeyDictionary()
        self._lock = threading.RLock()

    def store(self, tensors: tuple[Tensor | None, ...], extra: Hashable, build: Callable[[], QTensor]) -> StoreEntry:
        """The store for ``tensors`` read as ``extra`` says; ``build`` makes its `QTensor` where there is none."""
        first = tensors[0]
        assert first is not None
        if any(t is not None and t.is_inference() for t in tensors):
            # Inference tensors carry no version: a change in place would go unnoticed.
            return StoreEntry(build())
        key = (*(None if t is None else (id(t), t._version) for t in tensors), extra)  # noqa: SLF001
        with self._lock:
            entries: dict[Any, StoreEntry] = self._entries.setdefault(first, {})
            entry = entries.get(key)
            if entry is None or not entry.made_from(tensors):
                _drop_stale(entries, key[0])
                entry = entries[key] = StoreEntry(build(), tensors)
            return entry

    def __len__(self) -> int:
        return len(self._entries)


def _drop_stale(entries: dict[Any, StoreEntry], first: Any) -> None:
    """Drop what was packed from an earlier version of the first tensor, or from tensors that are gone."""
    for key in [key for key, entry in entries.items() if key[0] != first or not entry.is_alive()]:
        del entries[key]


class StoreEntry:
    """A weight and the kernels bound to it, by request and settings."""

    def __init__(self, weight: QTensor, tensors: tuple[Tensor | None, ...] = ()) -> None:
        from torch.utils.weak import TensorWeakRef

        # Aliases, so that holding the entry does not keep the caller's own tensors, its key, alive.
        self._store = WeightStore(weight.map(Tensor.detach))
        self._bounds: dict[Any, Bound] = {}
        self._made_from = [None if t is None else TensorWeakRef(t) for t in tensors]

    def made_from(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Whether these are the very tensors; another one may have got the id of one that is gone."""
        return all((ref and ref()) is t for ref, t in zip(self._made_from, tensors, strict=True))

    def is_alive(self) -> bool:
        """Whether every tensor it was made from still exists."""
        return all(ref is None or ref() is not None for ref in self._made_from)

    def run(self, request: Any, x: Tensor, bias: Tensor | None, given: dict[str, Tensor]) -> Tensor:
        """Bind on the first call under these settings, then call."""
        key = (request, current())
        bound = self._bounds.get(key) or bind(self._store, request)
        if bound.proven:
            return _call(bound, x, bias, given)
        self._bounds[key], result = call_first(self._store, bound, lambda b: _call(b, x, bias, given))
        return result


def _call(bound: Bound, x: Tensor, bias: Tensor | None, given: dict[str, Tensor]) -> Tensor:
    if getattr(bound.request, "training", False):
        return call_differentiably(x, bias, bound.kernel, bound.packed, bound.request, given)
    return bound.kernel(x, bound.packed, bias, **given)


_cache = PackedCache()


def entry_for(weight: QTensor) -> StoreEntry:
    """The cached store of a `QTensor`."""
    tensors = (weight.data, weight.scale, weight.zero)
    return _cache.store(tensors, (weight.format, tuple(weight.shape), weight.quantizer), lambda: weight)


def linear(
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    output: OutputInt8 | None = None,
    out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> Tensor:
    """``A(x) @ W^T + bias`` by the best kernel for the weight's device; see the contract ``linear``.

    **Arguments:** ``x``: ``(..., K)``, float, or int8 codes under a `StaticInt8` activation; ``weight``: ``(N, K)``;
    ``bias``: ``(N,)``. ``out_dtype``: default x's (float32 for int8 x). ``x_scale``, ``x_zero_point``, ``out_scale``,
    ``out_zero_point``: ``(tokens,)``, for an activation or output that says ``per_token``.

    The packed weight is cached, weakly, by the identity and version of the weight's tensors.
    """
    check_linear(x, weight, bias)
    _check_output(activation, output)
    given = given_parameters(activation, output, x_scale, x_zero_point, out_scale, out_zero_point)
    out = torch.int8 if output else out_dtype or (torch.float32 if x.dtype == torch.int8 else x.dtype)
    n, k = weight.shape
    sizes, training = (x.dtype, out, n, k, None), needs_grad(x, bias, output)
    request = LinearRequest(weight.device, *sizes, weight.format, activation, output, bias is not None, training)
    return entry_for(weight).run(request, x, bias, given)


def needs_grad(x: Tensor, bias: Tensor | None, output: OutputInt8 | None = None) -> bool:
    """Whether a call has to be differentiable with respect to x or bias."""
    wanted = x.requires_grad or (bias is not None and bias.requires_grad)
    return wanted and output is None and torch.is_grad_enabled()


def check_linear(x: Tensor, weight: QTensor, bias: Tensor | None) -> None:
    """Raise `FormatError` unless the shapes fit and everything is on one device."""
    n, k = weight.shape
    if x.device != weight.device:
        raise FormatError(f"x is on {x.device}, the weight on {weight.device}; bring both to one device.")
    if x.dim() < 1 or x.shape[-1] != k:
        raise FormatError(f"x has shape {tuple(x.shape)}; its last dimension must be K = {k} of the weight.")
    if bias is not None and tuple(bias.shape) != (n,):
        raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({n},).")


def _check_output(activation: Activation | None, output: OutputInt8 | None) -> None:
    if output is not None and activation is None:
        raise FormatError(
            "int8 results go with int8 activations: give activation=DynamicInt8() or StaticInt8(...) as well."
        )


def given_parameters(
    activation: Activation | None, output: OutputInt8 | None, *tensors: Tensor | None
) -> dict[str, Tensor]:
    """Match per-token parameters with what activation and output ask for; `FormatError` where they disagree."""
    names = ("x_scale", "x_zero_point", "out_scale", "out_zero_point")
    given = {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
    wanted = [name for name in names[:2] if isinstance(activation, StaticInt8) and activation.per_token]
    wanted += [name for name in names[2:] if output is not None and output.per_token]
    if sorted(given) != sorted(wanted):
        raise FormatError(
            f"per-token parameters given: {', '.join(given) or 'none'}; wanted: {', '.join(wanted) or 'none'}.\n"
            f"Say per_token=True in StaticInt8 or OutputInt8 to pass them with each call."
        )
    return given


def conv2d(
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None = None,
    *,
    kernel_size: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    activation: Activation | None = None,
    output: OutputInt8 | None = None,
) -> Tensor:
    """A quantized convolution; see the contract ``conv2d``.

    ``x``: ``(B, IC, H, W)``, ``weight``: ``(OC, KH*KW*IC/groups)``, columns in (KH, KW, IC) order. The result has the
    memory format of x.
    """
    if x.dim() != 4:
        raise FormatError(f"x has shape {tuple(x.shape)}; it must be (B, IC, H, W).")
    _check_output(activation, output)
    geometry = (x.shape[1], weight.shape[0], kernel_size, stride, padding, dilation, groups)
    out = torch.int8 if output else x.dtype
    quantization = (weight.format, activation, output)
    training = needs_grad(x, bias, output)
    request = Conv2dRequest(weight.device, x.dtype, out, *geometry, *quantization, bias is not None, training)
    if weight.shape[1] != request.k:
        needs = f"this convolution needs KH*KW*IC/groups = {request.k}"
        raise FormatError(f"weight has {weight.shape[1]} columns; {needs}.")
    return laid_out_like(entry_for(weight).run(request, x, bias, {}), x)


def embedding(indices: Tensor, weight: QTensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of a quantized table ``(V, D)``; see the contract ``embedding``. ``out_dtype``: default the scale's."""
    check_index_dtype(indices)
    request = EmbeddingRequest(weight.device, out_dtype or weight.dtype, *weight.shape, weight.format)
    return entry_for(weight).run(request, indices, None, {})
