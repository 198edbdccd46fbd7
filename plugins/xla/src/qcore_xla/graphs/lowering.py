"""A part of a captured graph as one function of JAX arrays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from torch import Tensor, fx

from qcore.plugin_api import GraphPart, PartRefused, base_name, first_line, is_whole

from . import decoding, powers, quantized, windows  # noqa: F401 - powers and windows register rules
from .layers import Cuts, Siblings, layer_of, siblings
from .overflow import overflow
from .quantized import Layer
from .rules import RULES, jax_dtype
from .special import SPECIAL


@dataclass(frozen=True)
class Flags:
    """Booleans that a program collects.

    **Fields:** ``outside``: an index is out of range; ``overflow``: an integer of torch's 64 bits does not fit 32.
    """

    outside: list[Array] = field(default_factory=list)
    overflow: list[Array] = field(default_factory=list)

    def both(self) -> Array | None:
        """``(2,)``: whether any of either kind is true; None if there are none."""
        if not (self.outside or self.overflow):
            return None
        kinds = (self.outside, self.overflow)
        return jnp.stack([jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), jnp.bool_) for flags in kinds])


def rule_name(target: Any) -> str:
    """The name of an op in `RULES`."""
    name = base_name(target)
    return f"qcore_graph.{name}" if is_whole(target) else name


def lowered(
    part: GraphPart, platform: str, cuts: Cuts, groups: Sequence[Siblings] | None = None, *, special: bool = True
) -> Callable[..., tuple[list[Any], Array | None]]:
    """``part`` as a function of one value per input, and of `Flags.overflow` found in them: outputs, and `Flags.both`.

    ``groups``: `siblings` of the part, if the caller knows them; ``special``: by the rules for the platform. A value is
    an array; for the weight of a quantized layer its arrays by `Layer`; a number stays a number.
    """
    nodes = list(part.graph.graph.nodes)
    constants = {
        node: getattr(part.graph, str(node.target)).numpy(force=True) for node in nodes if node.op == "get_attr"
    }
    rules: Mapping[str, Callable[..., Any]] = {**RULES, **SPECIAL.get(platform, {})} if special else RULES
    joint = siblings(part, platform, cuts) if groups is None else groups
    together = {node: of for of in joint for node in of.nodes}

    def run(values: Sequence[Any], overflow: Sequence[Array] = ()) -> tuple[list[Any], Array | None]:
        flags = Flags(overflow=list(overflow))
        known: dict[fx.Node, Any] = {}
        given = iter(values)
        row = decoding.OneRow(nodes) if special and not cuts and decoding.serves(platform) else None
        for node in nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "get_attr":
                known[node] = jnp.asarray(constants[node])
            elif node.op == "call_function":
                if node in together:  # the first that is met computes them all
                    if node not in known:
                        known |= _joint_products(together[node], known, row)
                    continue
                layer = layer_of(node, platform, cuts)
                done = None if row is None else _in_one_row(node, layer, known, row)
                if done is not None:
                    known[node] = _as_torch(done, node.meta["val"])
                    continue
                args = fx.node.map_arg(node.args, known.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, known.__getitem__)
                known[node] = _call(node, args, kwargs, layer, flags, rules)
        outputs = [known[node] for node in part.outputs]
        return outputs, flags.both()

    return run


def _call(
    node: fx.Node, args: Any, kwargs: Any, layer: Layer | None, flags: Flags, rules: Mapping[str, Callable[..., Any]]
) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    name = rule_name(node.target)
    if layer is not None:
        y = _quantized(layer, args, flags)
    else:
        if name in _ALONG and not args[0].ndim:
            args = [one.reshape(1) if isinstance(one, Array) else one for one in args]
        if name in _PROMOTED:
            args = _promoted(node, args)
        try:
            y = rules[name](*args, **kwargs)
        except Exception as error:
            raise PartRefused(f"{name} in qcore_xla: {type(error).__name__}: {first_line(error)}") from error
        _check_indices(node, args, flags)
        wrapped = overflow(name, node, args)
        if wrapped is not None:
            flags.overflow.append(wrapped)
    return _as_torch(y, node.meta["val"])


_ALONG = frozenset({
    "_softmax", "_log_softmax", "sort", "topk", "argmax", "argmin", "max", "min", "index_select", "gather", "scatter",
    "scatter_add", "scatter_reduce",
})  # fmt: skip
"""Ops along a dimension, of which torch lets a tensor without dimensions have one of size 1."""


_PROMOTED = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod"})


def _promoted(node: fx.Node, args: Sequence[Any]) -> list[Any]:
    """Both arguments in the dtype in which torch computes: a tensor without dimensions takes that of the other."""
    values: list[Any] = [one.meta["val"] if isinstance(one, fx.Node) else one for one in node.args[:2]]
    dtype = jax_dtype(torch.result_type(*values))
    return [one.astype(dtype) if isinstance(one, Array) else one for one in args]


def _in_one_row(node: fx.Node, layer: Layer | None, known: dict[fx.Node, Any], row: decoding.OneRow) -> Any:
    """The result by the kernels for steps of one token; None if they do not compute it."""
    if layer is None:
        return row.other(node, known)
    return row.product(node, layer, known) if layer.kind == "linear" else None


def _joint_products(
    of: Siblings, known: Mapping[fx.Node, Any], row: decoding.OneRow | None = None
) -> dict[fx.Node, Any]:
    """The results of siblings."""
    first = of.nodes[0]
    found = None if row is None else row.siblings(of, known)
    if found is not None:
        return {node: _as_torch(y, node.meta["val"]) for node, y in zip(of.nodes, found, strict=True)}
    x, dtype, weight = known[first.args[0]], first.args[5], known[of.weights[0]][of.whole]  # type: ignore[index]
    if isinstance(weight, list):
        ys = [quantized.dense_rows(x, own, None, layer, dtype) for own, layer in zip(weight, of.layers, strict=True)]  # type: ignore[arg-type]
    else:
        y = quantized.dense_rows(x, weight, None, of.whole, dtype)  # type: ignore[arg-type]
        ends = list(itertools.accumulate(layer.n for layer in of.layers))
        ys = jnp.split(y, ends[:-1], axis=-1)
    return {node: _as_torch(y, node.meta["val"]) for node, y in zip(of.nodes, ys, strict=True)}


def _quantized(layer: Layer, args: Any, flags: Flags) -> Any:
    if layer.kind == "embedding":
        indices, weight, _, _, dtype = args
        flags.outside.append(_outside(indices, weight[layer]["data"].shape[0]))
        return quantized.gathered(indices, weight[layer], layer, dtype)
    if layer.kind == "grouped_linear":
        x, ends, weight, bias, _, _, dtype = args
        return quantized.experts(x, ends, weight[layer], bias, layer, dtype)
    if layer.kind == "conv2d":
        x, weight, bias, _, _, kernel, stride, padding, dilation, _, dtype = args
        return quantized.convolved(x, weight[layer], bias, layer, dtype, kernel, stride, padding, dilation)
    x, weight, bias, _, _, dtype = args
    return quantized.dense_rows(x, weight[layer], bias, layer, dtype)


def _check_indices(node: fx.Node, args: Any, flags: Flags) -> None:
    """Note indices out of range where torch would raise."""
    name = rule_name(node.target)
    if name == "embedding":
        flags.outside.append(_outside(args[1], args[0].shape[0]))
    elif name in {"index_copy", "index_select", "gather", "scatter", "scatter_add", "scatter_reduce"}:
        flags.outside.append(_outside(args[2], (args[0].shape or (1,))[args[1]]))
    elif name in {"index", "index_put"}:
        for dim, index in enumerate(args[1]):
            if index is not None and index.dtype != jnp.bool_:
                flags.outside.append(_outside(index, args[0].shape[dim], negative=True))


def _outside(indices: Array, size: int, negative: bool = False) -> Array:
    return jnp.any((indices < (-size if negative else 0)) | (indices >= size))


def _as_torch(y: Any, like: Any) -> Any:
    """The results with the dtypes that torch gives them."""
    if isinstance(like, (tuple, list)):
        return tuple(_as_torch(one, of) for one, of in zip(y, like, strict=False))
    if y is None or not isinstance(like, Tensor):  # None: a result of several that nothing reads
        return y
    y = jnp.asarray(y)
    if like.numel() == 1 and y.size == 1:
        y = y.reshape(like.shape)
    assert y.shape == tuple(like.shape), (y.shape, tuple(like.shape))
    return y.astype(jax_dtype(like.dtype))


def why_not(node: fx.Node) -> str:
    """Why a node cannot be lowered, a sentence; empty if it can."""
    if bad := next((str(t.dtype) for t in _tensors(node) if t.dtype not in _DTYPES), ""):
        return f"it has tensors of {bad}, which XLA programs here do not compute in"
    if is_whole(node.target) and _is_quantized(node):
        return ""
    name = rule_name(node.target)
    if name not in RULES:
        return f"{name} has no lowering to XLA"
    return _why_not_arguments(name, node)


_DTYPES = frozenset({
    torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool,
})  # fmt: skip


def _tensors(node: fx.Node) -> list[Tensor]:
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    return [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, Tensor)]


def _is_quantized(node: fx.Node) -> bool:
    """Whether a node stands for a quantized layer: the bodies run all schemes."""
    return "scheme" in {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr] # noqa: SLF001


def _why_not_arguments(name: str, node: fx.Node) -> str:
    """Why a rule does not take these arguments."""
    args: Any = node.args
    unsupported: dict[str, Callable[[], Any]] = {
        "convolution": lambda: args[0].meta["val"].dim() < 3,
        "max_pool2d_with_indices": lambda: _is_read(node, 1),
        "max_pool3d_with_indices": lambda: _is_read(node, 1),
        "adaptive_max_pool2d": lambda: _is_read(node, 1) or _is_uneven(node),
        "as_strided": lambda: not _is_within(args[0].meta["val"], *args[1:]),
        "_native_batch_norm_legit": lambda: not isinstance(args[3], bool),
        "scatter_reduce": lambda: not args[0].meta["val"].is_floating_point(),
        "view": lambda: isinstance(args[1], torch.dtype) and not _has_same_bits(args[0].meta["val"].dtype, args[1]),
        "scatter": lambda: node.kwargs.get("reduce") and not args[0].meta["val"].is_floating_point(),
        "cumprod": lambda: not node.meta["val"].is_floating_point(),
        "searchsorted": lambda: node.kwargs.get("sorter") is not None,
        "linalg_vector_norm": lambda: len(args) > 1 and not args[1] > 0,
        "native_batch_norm": lambda: args[5],  # in training
    }
    if unsupported.get(name, lambda: False)():
        return f"{name} with these arguments has no lowering to XLA: {_UNSUPPORTED[name]}"
    if name in {"index", "index_put"}:
        return _why_not_index(name, node)
    large = [one for one in args if isinstance(one, int) and not isinstance(one, bool) and abs(one) >= 1 << 31]
    if name not in {"slice", "slice_scatter"} and large:
        return f"{large[0]} does not fit the 32 bits in which integers are computed"
    return ""


_UNSUPPORTED = {
    "convolution": "x has no batch",
    "max_pool2d_with_indices": "its indices are read",
    "max_pool3d_with_indices": "its indices are read",
    "adaptive_max_pool2d": "its indices are read, or windows overlap",
    "as_strided": "it reads the memory of a view",
    "_native_batch_norm_legit": "running statistics",
    "scatter_reduce": "integers",
    "view": "numbers of other sizes in the same memory",
    "scatter": "integers that it adds or multiplies",
    "cumprod": "products of integers, which may exceed 32 bits",
    "searchsorted": "a sorter",
    "linalg_vector_norm": "an order that is not positive",
    "native_batch_norm": "training",
}


def _has_same_bits(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether numbers of two dtypes have as many bits as each other, and here as many as in torch."""
    return one.itemsize == other.itemsize and not {one, other} & {torch.int64, torch.bool}


def _is_read(node: fx.Node, at: int) -> bool:
    """Whether something reads a result of a node that gives several."""
    return any(user.target is operator.getitem and user.args[1] == at and user.users for user in node.users)


def _is_uneven(node: fx.Node) -> bool:
    x, size = node.args[0].meta["val"], node.args[1]  # type: ignore[union-attr]
    return any(own % to for own, to in zip(x.shape[-2:], size, strict=True))  # type: ignore[arg-type]


def _is_within(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether a strided view is one of the elements of x, which must be in order."""
    last = (offset or 0) + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    return x.is_contiguous() and x.storage_offset() == 0 and last < x.numel()


def _why_not_index(name: str, node: fx.Node) -> str:
    for index in node.args[1]:  # type: ignore[union-attr]
        if isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8):
            return f"{name} by a mask gives a size that depends on values"
    return ""
