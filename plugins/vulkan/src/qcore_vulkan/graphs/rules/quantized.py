"""Rules of quantized layers: the plugin's own steps, over matrices whose rows are padded to 16 bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qcore import Conv2dRequest, EmbeddingRequest, LinearRequest, OutputInt8, StaticInt8
from qcore.plugin_api import GroupedLinearRequest, Scheme, base_name, scheme_of

from ... import eligibility, steps
from ...builder import Ref
from ...calls import geometry
from ...device import Buffer
from ...steps import Image, Rows
from ...steps.codes import decode, encode
from ...steps.gather import gather, take_along
from ...steps.operand import HALVES, Operand, over
from ...steps.pointwise import binary, convert
from ...steps.reductions import cumsum, reduce
from ..lowering import Lowering
from ..matrices import operand_of, rows_of
from ..residents import Weight
from .fusing import Prologue, in_one_step
from .registry import rule

_CPU = torch.device("cpu")
_ANY_TABLE = 1024
"""Rows of a table whose size a node does not tell: no limit depends on it."""


def _why_not(node: fx.Node) -> str:
    request = _request(node)
    if isinstance(request, EmbeddingRequest):
        return eligibility.why_not(request)
    given = (request.activation, request.output)
    if any(isinstance(one, (StaticInt8, OutputInt8)) and one.per_token for one in given):
        return "scales per token that are passed with the call have no kernel in compiled models"
    return eligibility.why_not(request)


def _request(node: fx.Node) -> Any:
    """The request that a node makes."""
    name = base_name(node.target)
    args: Any = node.args
    x = args[0].meta["val"]
    if name == "embedding":
        return EmbeddingRequest(_CPU, args[4], _ANY_TABLE, args[3], scheme_of(args[2]).weight)
    if name == "grouped_linear":
        scheme, sizes = scheme_of(args[4]), (args[1].meta["val"].shape[0], args[5], x.shape[-1])
        form: Any = (scheme.weight, scheme.activation, args[3] is not None, False)
        return GroupedLinearRequest(_CPU, x.dtype, args[6], *sizes, *form)
    scheme = scheme_of(args[3])
    whole = (scheme.weight, scheme.activation, scheme.output, args[2] is not None, False)
    if name == "linear":
        return LinearRequest(_CPU, x.dtype, args[5], args[4], x.shape[-1], None, *whole)
    kernel, stride, padding, dilation = (tuple(pair) for pair in args[5:9])
    window = (kernel, stride, padding, dilation, args[9])
    return Conv2dRequest(_CPU, x.dtype, args[10], x.shape[1], args[4], *window, *whole)


def _activations(c: Lowering, node: fx.Node, x: Operand) -> Rows:
    """What a product of ``node`` reads, made of its first argument: no more precise than the model computes."""
    value: torch.Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    return replace(rows_of(c, x), coarse=value.dtype in HALVES)


def _bias(bias: Operand | None) -> tuple[Buffer | None, Operand | None]:
    """A bias as the product takes it, and one that must be added afterwards: it is no buffer of its own."""
    if bias is None:
        return None, None
    own = bias.dtype == torch.float32 and bias.is_contiguous and bias.offset == 0 and bias.ref.offset == 0
    return (bias.ref.buffer, None) if own and isinstance(bias.ref.buffer, Buffer) else (None, bias)


@rule("qcore_graph.linear", why_not=_why_not)
def _linear(
    c: Lowering, node: fx.Node, x: Any, weight: Weight, bias: Operand | None, scheme: str, n: int, *_: Any
) -> Operand:
    of, (buffer, rest) = scheme_of(scheme), _bias(bias)
    fused = in_one_step(c, node, x, weight, buffer, ends=rest is None)
    if fused is not None:
        return _finished(c, fused, rest, of)
    assert not isinstance(x, Prologue)
    rows = _activations(c, node, _ordered(c, _decoded(c, x, of), weight))
    y = steps.linear(c.b, rows, weight.weight, buffer, *_quantization(of))
    return _finished(c, operand_of(y, node.meta["val"].shape), rest, of)


@rule("qcore_graph.grouped_linear", why_not=_why_not)
def _grouped_linear(
    c: Lowering, node: fx.Node, x: Operand, ends: Operand, weight: Weight, bias: Operand | None, scheme: str, *_: Any
) -> Operand:
    of, count = scheme_of(scheme), x.shape[0]
    ends = c.ends(node.args[1], count)
    rows = _activations(c, node, _ordered_by_expert(c, _decoded(c, x, of), ends, weight))
    joined = _with_biases(c, ends, bias)
    activation: Any = of.activation
    y = steps.grouped_linear(c.b, rows, weight.weight, joined, activation, torch.float32)
    return operand_of(y, node.meta["val"].shape)


def _with_biases(c: Lowering, ends: Operand, bias: Operand | None) -> steps.Ends:
    """The ends of experts' rows, followed by their biases."""
    count = ends.numel
    if bias is None:
        return steps.Ends(ends.ref, count, biased=False)
    ref = c.b.scratch(4 * (count + bias.numel))
    convert(c.b, ends, torch.int32, out=over(ref, ends.shape, torch.int32))
    convert(c.b, bias, torch.float32, out=replace(over(ref, bias.shape, torch.float32), offset=count))
    return steps.Ends(ref, count, biased=True)


def _ordered_by_expert(c: Lowering, x: Operand, ends: Operand, weight: Weight) -> Operand:
    """The operand with the columns of each row in the order of its expert's weight."""
    if weight.order is None:
        return x
    count, k = x.shape
    behind = cumsum(c.b, c.filled(1, torch.int32, (count,)), 0)  # 1 for the first row
    passed = binary(c.b, "lt", ends.unsqueeze(1), behind.unsqueeze(0))
    expert = binary(c.b, "minimum", reduce(c.b, "sum", c.cast(passed, torch.int32), (0,)), ends.numel - 1)
    order = over(Ref(weight.order, 0, weight.order.nbytes), (ends.numel, k), torch.int32)
    return take_along(c.b, x, 1, gather(c.b, order, 0, expert))


def _decoded(c: Lowering, x: Operand, scheme: Scheme) -> Operand:
    """Floats of which the layer makes these codes again, if x holds codes of int8."""
    given = isinstance(scheme.activation, StaticInt8) and x.dtype == torch.int32
    return decode(c.b, x, scheme.activation) if given else x  # type: ignore[arg-type]


def _ordered(c: Lowering, x: Operand, weight: Weight) -> Operand:
    """The operand with its columns in the order of the weight's."""
    if weight.order is None:
        return x
    k = x.shape[-1]
    return gather(c.b, x, len(x.shape) - 1, over(Ref(weight.order, 0, 4 * k), (k,), torch.int32))


def _quantization(scheme: Scheme) -> tuple[Any, None, torch.dtype]:
    return scheme.activation, None, torch.float32


def _finished(c: Lowering, y: Operand, bias: Operand | None, scheme: Scheme) -> Operand:
    """A product with what is still to be added, as codes of int8 if the scheme's results are."""
    y = y if bias is None else binary(c.b, "add", y, c.cast(bias, torch.float32))
    return y if scheme.output is None else encode(c.b, y, scheme.output)


@rule("qcore_graph.embedding", why_not=_why_not)
def _embedding(c: Lowering, node: fx.Node, indices: Operand, weight: Weight, *_: Any) -> Operand:
    table = weight.weight
    checked = c.index(node.args[0], table.geometry.n)
    y = steps.embedding(c.b, checked.ref, indices.numel, table, torch.float32)
    return operand_of(y, node.meta["val"].shape)


@rule("qcore_graph.conv2d", why_not=_why_not)
def _conv2d(
    c: Lowering, node: fx.Node, x: Operand, weight: Weight, bias: Operand | None, scheme: str, n: int, *sizes: Any
) -> Operand:
    batch, channels, height, width = x.shape
    of, (buffer, rest) = scheme_of(scheme), _bias(bias)
    kernel, stride, padding, dilation, groups, _ = sizes
    pixels = _activations(c, node, _decoded(c, x, of).permute((0, 2, 3, 1)))
    image = Image(pixels, batch, channels, height, width)
    shape = geometry(kernel, stride, padding, dilation, groups)
    y = steps.conv2d(c.b, image, weight.weight, buffer, shape, *_quantization(of))
    result = operand_of(y.rows, (y.batch, y.height, y.width, n)).permute((0, 3, 1, 2))
    assert result.shape == tuple(node.meta["val"].shape)
    if rest is not None:
        rest = c.reshaped(rest, (n, 1, 1))
    return _finished(c, result, rest, of)
