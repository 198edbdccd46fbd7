"""Quantized layers as single nodes of a captured graph: ``torch.ops.qcore_graph.*``.

While a graph backend (`qcore.graphs`) captures a model, each layer of `qcore.nn` emits one of these ops instead of the
ops of its kernel. An op carries no weight: ``weight`` is one tensor of the packed weight, which identifies the layer
that owns it, so that all layers of one kind and scheme give equal graphs. `weight_of` finds the neutral weight. On the
host an op runs the layer's own kernel.
"""

# ruff: noqa: ARG001, SLF001 - a fake has the signature of its op; layers of this package are looked into

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..contracts import CONV2D, EMBEDDING, GROUPED_LINEAR, LINEAR
from ..contracts.conv2d import convolved_size
from ..discovery.kernels import define_op
from ..errors import FormatError
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme

if TYPE_CHECKING:
    from .base import QuantizedModule

NAMESPACE = "qcore_graph"
CAPTURES = "captures_quantized_layers"
"""An attribute that is true for a backend function of `torch.compile` which takes quantized layers as single nodes."""

layers: weakref.WeakSet[QuantizedModule] = weakref.WeakSet()
"""All living quantized layers."""
_owners: dict[int, list[weakref.ref[QuantizedModule]]] = {}
"""Layers by the identity of the tensor that stands for their weight; filled again when one is not found."""


def captures_layers() -> bool:
    """Whether `torch.compile` is tracing for a graph backend; a constant of the trace, as each backend has its own."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        found: Any = None if dynamo is None else dynamo.InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # nothing is being traced
        return False
    for _ in range(8):  # wrappers of torch.compile around the function that the user named
        if found is None or getattr(found, CAPTURES, False):
            break
        found = getattr(found, "compiler_fn", None) or getattr(found, "_torchdynamo_orig_backend", None)
    return bool(getattr(found, CAPTURES, False))


# What torch.compiler.assume_constant_result sets; calling that would import torch's compiler.
captures_layers._dynamo_marked_constant = True  # type: ignore[attr-defined]


Node = tuple[tuple[Any, ...], tuple[int, ...], str, str, bool, str | None]
"""What a trace reads of a layer: the arguments of its op that are no tensors (contract, scheme, sizes), the weight's
shape, the name of the buffer that stands for the weight, its device, whether this has autocast, and the dtype of
results, None for x's own."""


def node_of(layer: QuantizedModule) -> Node | None:
    """The node of a layer; None if it is not bound.

    The layer keeps it, in numbers and texts only. Dynamo guards on everything that a trace reads, at each call of the
    compiled model: on the fields of requests and schemes one by one, and, by Python code, on which layers share them.
    """
    bound = next(iter(layer._bounds.values()), None)
    if bound is None or not layer._shown:
        return None
    request: Any = bound.request
    if request.contract == EMBEDDING.name:
        sizes: tuple[Any, ...] = (request.k,)
    elif request.contract == CONV2D.name:
        geometry = (request.kernel_size, request.stride, request.padding, request.dilation, request.groups)
        sizes = (request.n, *map(_plain, geometry))
    else:
        sizes = (request.n,)
    store, out_dtype = layer._binding_store(), torch.int8 if layer.scheme.output else layer.out_dtype
    return (
        (request.contract, str(layer.scheme), *sizes),
        (*store.shape,),
        next(iter(layer._shown)),
        str(store.device),
        layer._autocasts,
        None if out_dtype is None else str(out_dtype).removeprefix("torch."),
    )


def _plain(size: Any) -> Any:
    """A copy of a tuple: layers that share none need no guard that they do."""
    return (*size,) if isinstance(size, tuple) else size


def emit(
    call: tuple[Any, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    params: dict[str, Tensor],
) -> Tensor:
    """Call the op of a layer; ``call``: the first part of its `Node`; ``weight``: see `marker_of`."""
    ops: Any = torch.ops.qcore_graph
    contract, scheme, *sizes = call
    if contract == EMBEDDING.name:
        return ops.embedding.default(x, weight, scheme, *sizes, out_dtype)  # type: ignore[no-any-return]
    if contract == GROUPED_LINEAR.name:
        return ops.grouped_linear.default(x, params["offsets"], weight, bias, scheme, *sizes, out_dtype)  # type: ignore[no-any-return]
    if contract == CONV2D.name:
        return ops.conv2d.default(x, weight, bias, scheme, *sizes, out_dtype)  # type: ignore[no-any-return]
    return ops.linear.default(x, weight, bias, scheme, *sizes, out_dtype)  # type: ignore[no-any-return]


def marker_of(layer: QuantizedModule) -> Tensor:
    """The first buffer of a bound layer: it changes whenever the layer is bound to another weight."""
    return next(iter(layer._shown.values()))


def _layers_of(weight: Tensor) -> Iterator[QuantizedModule]:
    for ref in _owners.get(id(weight), ()):
        layer = ref()
        if layer is not None and layer._shown and marker_of(layer) is weight:
            yield layer


def owners(weight: Tensor, contract: str = "", scheme: str = "") -> list[QuantizedModule]:
    """The layers whose packed weight ``weight`` stands for: several that are tied, or the copies of one.

    ``contract``, ``scheme``: of the node that asks, for the layers of this contract and, if there are any, this scheme.
    Raises `FormatError` if no layer owns the weight.
    """
    found = list(_layers_of(weight))
    if not found:
        _owners.clear()
        for layer in list(layers):
            if layer._shown:
                _owners.setdefault(id(marker_of(layer)), []).append(weakref.ref(layer))
        found = list(_layers_of(weight))
    if contract:
        found = [one for one in found if one._primary and one._primary.request.contract == contract]
    if not found:
        raise FormatError("no living quantized layer owns this weight: it was bound again or deleted.")
    return [one for one in found if str(one.scheme) == scheme] or found


def weight_of(weight: Tensor) -> QTensor:
    """The neutral weight that the tensor ``weight`` of a node stands for.

    Unpacked on demand: drop it once it is on the device.
    """
    return owners(weight)[0]._binding_store().neutral()


def _run(contract: str, scheme: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Any, **params: Any) -> Tensor:
    """Run the kernel of the layer that the node came from."""
    layer = owners(weight, contract, scheme)[0]
    dtype = layer._dtype if contract == EMBEDDING.name else x.dtype
    bound = layer._bound_for(dtype, False)
    return bound.kernel(x, bound.packed, bias, **params).to(out).contiguous()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: str, n: int, out_dtype: torch.dtype) -> Tensor:
    return _run(LINEAR.name, scheme, x, weight, bias, out_dtype)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: str, n: int, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


def _embedding(indices: Tensor, weight: Tensor, scheme: str, k: int, out_dtype: torch.dtype) -> Tensor:
    return _run(EMBEDDING.name, scheme, indices, weight, None, out_dtype)


def _embedding_fake(indices: Tensor, weight: Tensor, scheme: str, k: int, out_dtype: torch.dtype) -> Tensor:
    return indices.new_empty((*indices.shape, k), dtype=out_dtype)


def _grouped(
    x: Tensor, offsets: Tensor, weight: Tensor, bias: Tensor | None, scheme: str, n: int, out_dtype: torch.dtype
) -> Tensor:
    return _run(GROUPED_LINEAR.name, scheme, x, weight, bias, out_dtype, offsets=offsets)


def _grouped_fake(x: Tensor, offsets: Tensor, weight: Tensor, bias: Any, scheme: str, n: int, out_dtype: Any) -> Tensor:
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: str, n: int, *rest: Any) -> Tensor:
    return _run(CONV2D.name, scheme, x, weight, bias, rest[-1])


def _conv2d_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, scheme: str, n: int,
    kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    size = convolved_size(x.shape[2:], kernel, stride, padding, dilation)
    return x.new_empty((x.shape[0], n, *size), dtype=out_dtype)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_define = partial(define_op, _library, keys=("CompositeExplicitAutograd",))

_define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str scheme, int n, ScalarType out_dtype) -> Tensor",
    _linear,
    _linear_fake,
)
_define(
    "embedding(Tensor indices, Tensor weight, str scheme, int k, ScalarType out_dtype) -> Tensor",
    _embedding,
    _embedding_fake,
)
_define(
    "grouped_linear(Tensor x, Tensor offsets, Tensor weight, Tensor? bias, str scheme, int n, "
    "ScalarType out_dtype) -> Tensor",
    _grouped,
    _grouped_fake,
)
_define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, str scheme, int n, int[2] kernel_size, int[2] stride, "
    "int[2] padding, int[2] dilation, int groups, ScalarType out_dtype) -> Tensor",
    _conv2d,
    _conv2d_fake,
)


def scheme_of(text: str) -> Scheme:
    """The scheme of a node, with the numbers of static activations."""
    return Scheme.parse(text)
