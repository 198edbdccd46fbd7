"""Rules of float convolutions, norms and pooling over images; sequences are images of one row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ...steps.batch_norm import Norm, batch_norm
from ...steps.convolution import Geometry2d
from ...steps.float_convolution import convolution
from ...steps.norms import layer_norm
from ...steps.operand import Operand
from ...steps.pointwise import binary, convert
from ...steps.pooling import Windows, max_pool, mean_pool
from ..lowering import Lowering
from .ordering import flipped
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
    _, weight, _, stride, padding, dilation, *_ = node.args
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
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, more: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    sequence = len(weight.shape) == 3
    if sequence:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    kernel = (weight.shape[2], weight.shape[3])
    geometry = Geometry2d(kernel, _flat(stride, 1), _flat(padding, 0), _flat(dilation, 1), groups)
    x, weight = c.cast(x, torch.float32), c.cast(weight, torch.float32)
    bias = None if bias is None else c.cast(bias, torch.float32)
    if not sequence and not transposed and _is_normed(node):
        return Pending(x, weight, bias, geometry)
    y = (
        _transposed(c, x, weight, bias, geometry, _flat(more, 0))
        if transposed
        else convolution(c.b, x, weight, bias, geometry)
    )
    return y.select(2, 0) if sequence else y


def _transposed(
    c: Lowering, x: Operand, weight: Operand, bias: Operand | None, geometry: Geometry2d, more: Pair
) -> Operand:
    """A transposed convolution, ``weight`` ``(IC, OC/groups, KH, KW)``: one of the image with zeros between its pixels.

    ``more``: rows and columns of the result beyond the last that a pixel takes part in.
    """
    groups, (kernel_height, kernel_width) = geometry.groups, geometry.kernel
    reach = [dilation * (size - 1) for dilation, size in zip(geometry.dilation, geometry.kernel, strict=True)]
    sizes = [(x.shape[2 + i] - 1) * geometry.stride[i] + 1 for i in range(2)]
    spread = c.filled(0.0, torch.float32, (*x.shape[:2], *(sizes[i] + 2 * reach[i] + more[i] for i in range(2))))
    inside = spread
    for i in range(2):
        inside = inside.slice(2 + i, reach[i], x.shape[2 + i], geometry.stride[i])
    convert(c.b, x, torch.float32, out=inside)
    channels, columns = weight.shape[0] // groups, weight.shape[1]
    kernel = c.reshaped(weight, (groups, channels, columns, kernel_height, kernel_width)).permute((0, 2, 1, 3, 4))
    kernel = c.reshaped(flipped(c, kernel, (3, 4)), (groups * columns, channels, kernel_height, kernel_width))
    plain = replace(geometry, stride=(1, 1), padding=(0, 0))
    y = convolution(c.b, spread, kernel, bias, plain)
    for i in range(2):
        y = y.slice(2 + i, geometry.padding[i], y.shape[2 + i] - 2 * geometry.padding[i])
    return y


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
    kept = _trains(node) and node.args[3] is not None
    return "a batch norm that keeps statistics has no kernel in qcore_vulkan" if kept else why_not_statistics(node)


def _trains(node: fx.Node) -> bool:
    """Whether a batch norm takes the statistics of x."""
    return bool(rule_name(node.target) == "native_batch_norm" and node.args[5])


@rule(*_NORMS, why_not=_why_not_batch_norm)
def _batch_norm(
    c: Lowering, node: fx.Node, x: Any, weight: Operand | None, bias: Operand | None, mean: Any, variance: Any,
    *rest: Any,
) -> tuple[Operand, None, None]:  # fmt: skip
    if _trains(node):
        x = convolution(c.b, *x) if isinstance(x, Pending) else x
        return _own_statistics(c, x, weight, bias, float(rest[-1])), None, None
    weight, bias = (None if one is None else c.cast(one, torch.float32) for one in (weight, bias))
    norm = Norm(c.cast(mean, torch.float32), c.cast(variance, torch.float32), weight, bias, float(rest[-1]))
    y = convolution(c.b, *x, norm) if isinstance(x, Pending) else batch_norm(c.b, c.cast(x, torch.float32), norm)
    return y, None, None


@rule("native_group_norm", why_not=why_not_statistics)
def _group_norm(
    c: Lowering, node: fx.Node, x: Operand, weight: Operand | None, bias: Operand | None, batch: int, _channels: int,
    _pixels: int, groups: int, eps: float,
) -> tuple[Operand, None, None]:  # fmt: skip
    rows = c.reshaped(c.cast(x, torch.float32), (batch, groups, x.numel // (batch * groups)))
    y = c.reshaped(layer_norm(c.b, rows, None, None, eps), x.shape)
    return _scaled(c, y, weight, bias), None, None


def _scaled(c: Lowering, y: Operand, weight: Operand | None, bias: Operand | None) -> Operand:
    """``y * weight + bias``, by channel."""
    for name, parameter in (("mul", weight), ("add", bias)):
        if parameter is not None:
            column = c.reshaped(c.cast(parameter, torch.float32), (y.shape[1], *[1] * (len(y.shape) - 2)))
            y = binary(c.b, name, y, column)
    return y


def _why_not_own_statistics(node: fx.Node) -> str:
    if len(node.args) != 6 or not node.args[3]:
        return "a batch norm that keeps statistics has no kernel in qcore_vulkan"
    return why_not_statistics(node)


@rule("_native_batch_norm_legit", why_not=_why_not_own_statistics)
def _norm_of_itself(
    c: Lowering, node: fx.Node, x: Operand, weight: Operand | None, bias: Operand | None, _training: bool,
    _momentum: float, eps: float,
) -> tuple[Operand, None, None]:  # fmt: skip
    return _own_statistics(c, x, weight, bias, eps), None, None


def _own_statistics(c: Lowering, x: Operand, weight: Operand | None, bias: Operand | None, eps: float) -> Operand:
    moved = c.cast(x, torch.float32).transpose(0, 1)  # an instance norm is one over a batch of 1
    rows = c.reshaped(moved, (x.shape[1], x.numel // x.shape[1]))
    y = c.reshaped(layer_norm(c.b, rows, None, None, eps), moved.shape).transpose(0, 1)
    return _scaled(c, y, weight, bias)


# Pooling. Dimensions before the last two, or the last of sequences, are images and channels.


def _image(x: Operand) -> Operand:
    return x if len(x.shape) == 4 else x.unsqueeze(0)


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
    return c.reshaped(y, shape), None if indices is None else c.reshaped(indices, shape)


@rule("avg_pool2d", why_not=_why_not_pool)
def _avg_pool(
    c: Lowering, node: fx.Node, x: Operand, kernel: Any, stride: Any = (), padding: Any = 0,
    _ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Operand:  # fmt: skip
    windows = Windows(_pair(kernel), _pair(stride, _pair(kernel)), _pair(padding))
    image, divisor = _image(c.cast(x, torch.float32)), divisor_override or 0
    y = mean_pool(c.b, image, windows, _size(node), padded=count_include_pad, divisor=divisor)
    return c.reshaped(y, node.meta["val"].shape)


@rule("_adaptive_avg_pool2d", why_not=_why_not_pool)
def _adaptive_avg_pool(c: Lowering, node: fx.Node, x: Operand, _output_size: Any) -> Operand:
    y = mean_pool(c.b, _image(c.cast(x, torch.float32)), None, _size(node))
    return c.reshaped(y, node.meta["val"].shape)
