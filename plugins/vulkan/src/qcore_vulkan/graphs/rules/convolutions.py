"""Rules of float convolutions, norms and pooling over images; sequences are images of one row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ...steps.batch_norm import Norm, batch_norm
from ...steps.convolution import Geometry2d
from ...steps.float_convolution import convolution
from ...steps.norms import layer_norm
from ...steps.operand import Operand
from ...steps.pointwise import binary
from ...steps.pooling import Windows, max_pool, mean_pool
from ..lowering import Lowering
from .reductions import why_not_statistics
from .registry import rule, rule_name

Pair = tuple[int, int]

_MOST_STEP = (1 << 16) - 1
"""Kernels of pooling, strides, padding and dilation: two of them share a word."""


def _pair(values: Any, default: Pair | None = None) -> Pair:
    """Height and width of an argument of one or two numbers; an empty one means the default."""
    given = [values] if isinstance(values, int) else list(values)
    if not given and default is not None:
        return default
    return (given[0], given[-1])


def _flat(values: Sequence[int], filled: int) -> Pair:
    """The same of a convolution, over sequences with ``filled`` for the height."""
    given = list(values)
    return (filled, given[0]) if len(given) == 1 else (given[0], given[1])


def _why_not_convolution(node: fx.Node) -> str:
    _, weight, _, stride, padding, dilation, transposed, *_ = node.args
    if transposed:
        return "a transposed convolution has no kernel in qcore_vulkan"
    value = weight.meta["val"]  # type: ignore[union-attr]
    if value.dim() not in {3, 4}:
        return f"a convolution over {value.dim() - 2} dimensions has no kernel in qcore_vulkan"
    if not value.is_floating_point():
        return f"a convolution of {value.dtype} has no kernel in qcore_vulkan"
    return _why_not_steps(*stride, *padding, *dilation)  # type: ignore[misc]


def _why_not_steps(*numbers: int) -> str:
    bad = next((one for one in numbers if not 0 <= one <= _MOST_STEP), None)
    return "" if bad is None else f"a kernel size, stride, padding or dilation of {bad} has no kernel in qcore_vulkan"


@rule("convolution", why_not=_why_not_convolution)
def _convolution(
    c: Lowering, node: fx.Node, x: Operand, weight: Operand, bias: Operand | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], _transposed: bool, _output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    sequence = len(weight.shape) == 3
    if sequence:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    kernel = (weight.shape[2], weight.shape[3])
    geometry = Geometry2d(kernel, _flat(stride, 1), _flat(padding, 0), _flat(dilation, 1), groups)
    x, weight = c.cast(x, torch.float32), c.cast(weight, torch.float32)
    bias = None if bias is None else c.cast(bias, torch.float32)
    if not sequence and _is_normed(node):
        return Pending(x, weight, bias, geometry)
    y = convolution(c.b, x, weight, bias, geometry)
    return y.select(2, 0) if sequence else y


class Pending(NamedTuple):
    """A convolution that is computed together with the batch norm that reads it. A tuple: its operands are kept."""

    x: Operand
    weight: Operand
    bias: Operand | None
    geometry: Geometry2d


_NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training")


def _is_normed(node: fx.Node) -> bool:
    """Whether the only reader of a convolution is the batch norm of its result."""
    user = next(iter(node.users), None)
    called = len(node.users) == 1 and user is not None and user.op == "call_function"
    return called and rule_name(user.target) in _NORMS and user.all_input_nodes.count(node) == 1  # type: ignore[union-attr]


def _why_not_batch_norm(node: fx.Node) -> str:
    training = rule_name(node.target) == "native_batch_norm" and node.args[5]
    return "a batch norm in training has no kernel in qcore_vulkan" if training else why_not_statistics(node)


@rule(*_NORMS, why_not=_why_not_batch_norm)
def _batch_norm(
    c: Lowering, node: fx.Node, x: Operand | Pending, weight: Operand | None, bias: Operand | None, mean: Operand,
    variance: Operand, *rest: Any,
) -> tuple[Operand, None, None]:  # fmt: skip
    weight, bias = (None if one is None else c.cast(one, torch.float32) for one in (weight, bias))
    norm = Norm(c.cast(mean, torch.float32), c.cast(variance, torch.float32), weight, bias, float(rest[-1]))
    y = convolution(c.b, *x, norm) if isinstance(x, Pending) else batch_norm(c.b, c.cast(x, torch.float32), norm)
    return y, None, None


@rule("native_group_norm", why_not=why_not_statistics)
def _group_norm(
    c: Lowering, node: fx.Node, x: Operand, weight: Operand | None, bias: Operand | None, batch: int, channels: int,
    _pixels: int, groups: int, eps: float,
) -> tuple[Operand, None, None]:  # fmt: skip
    shape, ones = x.shape, (1,) * (len(x.shape) - 2)
    rows = c.reshaped(c.cast(x, torch.float32), (batch, groups, x.numel // (batch * groups)))
    y = c.reshaped(layer_norm(c.b, rows, None, None, eps), shape)
    for name, parameter in (("mul", weight), ("add", bias)):
        if parameter is not None:
            y = binary(c.b, name, y, c.reshaped(c.cast(parameter, torch.float32), (channels, *ones)))
    return y, None, None


# Pooling. Dimensions before the last two, or the last of sequences, are images and channels.


def _image(x: Operand) -> Operand:
    return x if len(x.shape) == 4 else x.unsqueeze(0)


def _shaped(c: Lowering, y: Operand, shape: Sequence[int]) -> Operand:
    return c.reshaped(y, tuple(shape))


def _first(node: fx.Node) -> torch.Tensor:
    """What a node gives, of a tuple the first."""
    value = node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value  # type: ignore[no-any-return]


def _why_not_pool(node: fx.Node) -> str:
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    if not x.is_floating_point():
        return f"pooling of {x.dtype} has no kernel in qcore_vulkan"
    sizes: list[Any] = [one for one in node.args[1:5] if isinstance(one, (list, tuple))]
    return _why_not_steps(*(number for size in sizes for number in size))


def _size(node: fx.Node) -> Pair:
    shape = _first(node).shape
    return (shape[-2], shape[-1])


def _is_read(node: fx.Node, at: int) -> bool:
    return any(user.target is operator.getitem and user.args[1] == at and user.users for user in node.users)


@rule("max_pool2d_with_indices", why_not=_why_not_pool)
def _max_pool(
    c: Lowering, node: fx.Node, x: Operand, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    _ceil_mode: bool = False,
) -> tuple[Operand, Operand | None]:  # fmt: skip
    windows = Windows(_pair(kernel), _pair(stride, _pair(kernel)), _pair(padding), _pair(dilation))
    return _largest(c, node, x, windows)


@rule("adaptive_max_pool2d", why_not=_why_not_pool)
def _adaptive_max_pool(c: Lowering, node: fx.Node, x: Operand, _size: Any) -> tuple[Operand, Operand | None]:
    return _largest(c, node, x, None)


def _largest(c: Lowering, node: fx.Node, x: Operand, windows: Windows | None) -> tuple[Operand, Operand | None]:
    image, shape = _image(c.cast(x, torch.float32)), _first(node).shape
    y, indices = max_pool(c.b, image, windows, _size(node), indexed=_is_read(node, 1))
    return _shaped(c, y, shape), None if indices is None else _shaped(c, indices, shape)


@rule("avg_pool2d", why_not=_why_not_pool)
def _avg_pool(
    c: Lowering, node: fx.Node, x: Operand, kernel: Any, stride: Any = (), padding: Any = 0,
    _ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Operand:  # fmt: skip
    windows = Windows(_pair(kernel), _pair(stride, _pair(kernel)), _pair(padding))
    image, divisor = _image(c.cast(x, torch.float32)), divisor_override or 0
    y = mean_pool(c.b, image, windows, _size(node), padded=count_include_pad, divisor=divisor)
    return _shaped(c, y, node.meta["val"].shape)


@rule("_adaptive_avg_pool2d", why_not=_why_not_pool)
def _adaptive_avg_pool(c: Lowering, node: fx.Node, x: Operand, _output_size: Any) -> Operand:
    y = mean_pool(c.b, _image(c.cast(x, torch.float32)), None, _size(node))
    return _shaped(c, y, node.meta["val"].shape)
