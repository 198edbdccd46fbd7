"""Functional forms: `linear`, `conv2d` and `embedding` on a `QTensor`, and the cache of packed weights behind them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..contracts import Conv2dRequest, EmbeddingRequest, GroupedLinearRequest, LinearRequest, Request
from ..contracts.conv2d import as_pair, laid_out_like
from ..contracts.embedding import check_index_dtype
from ..errors import FormatError
from ..formats.tracing import without_base
from ..resolving.binding import Bound, WeightStore, bind, call_first
from ..runtime.forks import Lock
from ..runtime.settings import current
from ..weights.activations import Activation, OutputInt8, StaticInt8
from ..weights.qtensor import QTensor
from .autograd import call_differentiably, needs_derivatives
from .checks import (
    check_bias,
    check_dense,
    check_first_call,
    check_grouped,
    check_last_dimension,
    check_out_dtype,
    check_quantization,
    check_runtime_params,
    check_weight,
    check_x_dtype,
)

Pair = tuple[int, int]
_MAX_BOUNDS = 64
"""Pairs of request and settings for which one weight keeps a bound kernel."""


class PackedCache:
    """Caches bound kernels by the identity and version of the tensors that they were packed from.

    The cache is weak: an entry is dropped with its first tensor. A tensor that was changed in place is packed again.
    """

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._entries: Any = WeakTensorKeyDictionary()
        self._lock = Lock()

    def store(self, tensors: tuple[Tensor | None, ...], extra: Hashable, build: Callable[[], QTensor]) -> StoreEntry:
        """Return the store for ``tensors``; ``build`` makes its `QTensor` on a miss.

        ``extra``: the interpretation of the tensors (op, format); part of the key.
        """
        first = tensors[0]
        assert first is not None
        if any(t is not None and t.is_inference() for t in tensors):
            # Inference tensors have no version counter: a change in place would go unnoticed.
            return StoreEntry(build())
        key = (*(None if t is None else (id(t), t._version) for t in tensors), extra)  # noqa: SLF001
        with self._lock:
            entries: dict[Any, StoreEntry] = self._entries.setdefault(first, {})
            entry = entries.get(key)
            if entry is None or not entry.is_built_from(tensors):
                _drop_stale(entries, key[0])
                entry = entries[key] = StoreEntry(build(), tensors)
            return entry

    def __len__(self) -> int:
        return len(self._entries)


def _drop_stale(entries: dict[Any, StoreEntry], first: Any) -> None:
    """Drop entries for an earlier version of the first tensor, or for tensors that no longer exist."""
    for key in [key for key, entry in entries.items() if key[0] != first or not entry.is_alive()]:
        del entries[key]


class StoreEntry:
    """A weight and the kernels bound to it, by request and settings."""

    def __init__(self, weight: QTensor, tensors: tuple[Tensor | None, ...] = ()) -> None:
        from torch.utils.weak import TensorWeakRef

        # Detached aliases: a reference to the caller's own tensors, the weak keys, would keep them alive.
        self._store = WeightStore(weight.map(Tensor.detach))
        self._bounds: dict[Any, Bound] = {}
        self._sources = [None if t is None else TensorWeakRef(t) for t in tensors]

    def is_built_from(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Whether the entry was built from these very tensors: a new tensor may reuse the id of a deleted one."""
        return all((ref and ref()) is t for ref, t in zip(self._sources, tensors, strict=True))

    def is_alive(self) -> bool:
        """Whether every tensor that the entry was built from still exists."""
        return all(ref is None or ref() is not None for ref in self._sources)

    def run(self, request: Request, x: Tensor, bias: Tensor | None, runtime_params: dict[str, Tensor]) -> Tensor:
        """Call the kernel for ``request``; the first call under the current settings binds it."""
        key = (request, current())
        bound = self._bounds.get(key)
        if bound is not None and bound.proven:
            try:
                return _call(bound, x, bias, runtime_params)
            except Exception as error:
                bound.blame(error)
                raise
        check_first_call(request, x)
        bound = bound or bind(self._store, request)
        fresh, result = call_first(self._store, bound, lambda b: _call(b, x, bias, runtime_params))
        self._keep(key, fresh)
        return result

    def _keep(self, key: Any, bound: Bound) -> None:
        """Cache a bound kernel and drop the oldest ones: each new static scale is a new request."""
        self._bounds[key] = bound
        while len(self._bounds) > _MAX_BOUNDS:
            self._bounds.pop(next(iter(self._bounds)), None)


def _call(bound: Bound, x: Tensor, bias: Tensor | None, runtime_params: dict[str, Tensor]) -> Tensor:
    if getattr(bound.request, "training", False):
        return call_differentiably(x, bias, bound.kernel, bound.packed, bound.request, runtime_params)
    return without_base(bound.kernel(x, bound.packed, bias, **runtime_params))


_cache = PackedCache()


def entry_for(weight: QTensor) -> StoreEntry:
    """Return the cached store of a `QTensor`."""
    tensors = (weight.data, weight.scale, weight.zero, weight.order, weight.global_scale)
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
    """Compute ``A(x) @ W^T + bias`` with the best kernel for the weight's device; see the contract ``linear``.

    **Arguments:** ``x``: ``(..., K)``, float, or int8 codes under a `StaticInt8` activation; ``weight``: ``(N, K)``;
    ``bias``: ``(N,)``. ``out_dtype``: default x's (float32 for int8 x). ``x_scale``, ``x_zero_point``, ``out_scale``,
    ``out_zero_point``: ``(tokens,)``, for an activation or output with ``per_token=True``.

    The packed weight is cached, weakly, by the identity and version of the weight's tensors.
    """
    check_linear(x, weight, bias)
    check_quantization(activation, output, weight)
    check_x_dtype(x, activation)
    check_out_dtype(out_dtype, output)
    runtime_params = collect_runtime_params(activation, output, x_scale, x_zero_point, out_scale, out_zero_point)
    if runtime_params:
        check_runtime_params(runtime_params, x.shape[:-1].numel(), weight.device)
    n, k = weight.shape
    sizes, training = (x.dtype, _out_dtype(x, output, out_dtype), n, k, None), needs_grad(x, bias, output)
    request = LinearRequest(weight.device, *sizes, weight.format, activation, output, bias is not None, training)
    return entry_for(weight).run(request, x, bias, runtime_params)


def _out_dtype(x: Tensor, output: OutputInt8 | None, wanted: torch.dtype | None = None) -> torch.dtype:
    return torch.int8 if output else wanted or (torch.float32 if x.dtype == torch.int8 else x.dtype)


def needs_grad(x: Tensor, bias: Tensor | None, output: OutputInt8 | None = None) -> bool:
    """Whether a call needs derivatives with respect to x or bias."""
    return output is None and needs_derivatives(x, bias)


def check_linear(x: Tensor, weight: QTensor, bias: Tensor | None) -> None:
    """Raise `FormatError` unless all arguments are dense tensors on one device with matching shapes."""
    check_weight(weight)
    check_dense("x", x, weight.device)
    n, k = weight.shape
    check_last_dimension(x, k)
    check_bias(bias, n, weight.device)


def collect_runtime_params(
    activation: Activation | None, output: OutputInt8 | None, *tensors: Tensor | None
) -> dict[str, Tensor]:
    """Collect the per-token parameters of a call by name.

    Raises `FormatError` unless they are exactly those that the activation and the output require.
    """
    names = ("x_scale", "x_zero_point", "out_scale", "out_zero_point")
    runtime_params = {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
    wanted = [name for name in names[:2] if isinstance(activation, StaticInt8) and activation.per_token]
    wanted += [name for name in names[2:] if output is not None and output.per_token]
    if sorted(runtime_params) != sorted(wanted):
        raise FormatError(
            f"per-token parameters passed: {', '.join(runtime_params) or 'none'}; "
            f"required: {', '.join(wanted) or 'none'}.\n"
            f"Set per_token=True in StaticInt8 or OutputInt8 to pass them with each call."
        )
    return runtime_params


def conv2d(
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None = None,
    *,
    kernel_size: int | Pair,
    stride: int | Pair = (1, 1),
    padding: int | Pair = (0, 0),
    dilation: int | Pair = (1, 1),
    groups: int = 1,
    activation: Activation | None = None,
    output: OutputInt8 | None = None,
) -> Tensor:
    """Apply a quantized convolution; see the contract ``conv2d``.

    ``x``: ``(B, IC, H, W)``, float, or int8 codes under a `StaticInt8` activation; ``weight``:
    ``(OC, KH*KW*IC/groups)``, columns in (KH, KW, IC) order; ``bias``: ``(OC,)``. The result has the memory format and
    dtype of x (float32 for int8 x, int8 codes under ``output``).
    """
    check_weight(weight)
    check_dense("x", x, weight.device)
    if x.dim() != 4:
        raise FormatError(f"x has shape {tuple(x.shape)}; it must be (B, IC, H, W).")
    check_bias(bias, weight.shape[0], weight.device)
    check_quantization(activation, output, weight)
    check_x_dtype(x, activation)
    pairs = (
        _pair("kernel_size", kernel_size),
        _pair("stride", stride),
        _pair("padding", padding),
        _pair("dilation", dilation),
    )
    geometry = (x.shape[1], weight.shape[0], *pairs, groups)
    quantization = (weight.format, activation, output, bias is not None, needs_grad(x, bias, output))
    request = Conv2dRequest(weight.device, x.dtype, _out_dtype(x, output), *geometry, *quantization)
    if weight.shape[1] != request.k:
        needs = f"this convolution needs KH*KW*IC/groups = {request.k}"
        raise FormatError(f"weight has {weight.shape[1]} columns; {needs}.")
    return laid_out_like(entry_for(weight).run(request, x, bias, {}), x)


def grouped_linear(
    x: Tensor,
    weight: QTensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``A(x[i]) @ W[e]^T + bias[e]`` for every row i of expert e; see the contract ``grouped_linear``.

    **Arguments:** ``x``: float ``(T, K)``, rows sorted by expert; ``weight``: ``(E, N, K)``; ``offsets``: int32
    ``(E,)``, the end of each expert's rows, as in `torch.nn.functional.grouped_mm`; ``bias``: ``(E, N)``;
    ``out_dtype``: default x's.
    Rows after the last end give 0.

    Raises `FormatError` for other shapes or dtypes, and for ends that descend or leave 0..T.
    """
    check_weight(weight, dims=3)
    e, n, k = weight.shape
    check_grouped(x, offsets, bias, weight)
    check_quantization(activation, None, weight)
    check_out_dtype(out_dtype)
    sizes = (x.dtype, out_dtype or x.dtype, e, n, k)
    request = GroupedLinearRequest(
        weight.device, *sizes, weight.format, activation, bias is not None, needs_grad(x, bias)
    )
    return entry_for(weight).run(request, x, bias, {"offsets": offsets})


def _pair(name: str, value: int | Pair) -> Pair:
    # The request validates pairs itself.
    return value if type(value) is tuple else as_pair(name, value)


def embedding(indices: Tensor, weight: QTensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Look up rows of a quantized table ``(V, D)``; see the contract ``embedding``.

    ``out_dtype``: of the result; default the scale's dtype.
    """
    check_weight(weight)
    check_dense("indices", indices, weight.device)
    check_index_dtype(indices)
    check_out_dtype(out_dtype)
    request = EmbeddingRequest(
        weight.device, out_dtype or weight.dtype, weight.shape[0], weight.shape[1], weight.format
    )
    return entry_for(weight).run(request, indices, None, {})
