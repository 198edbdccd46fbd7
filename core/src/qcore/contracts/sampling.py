"""Judges a result at a layer's real size by a sample of its rows and columns, whose reference is cheap.

A kernel may be correct on small problems and wrong on large ones: a tile that only a large weight has, an index that
overflows, a split along K. The float64 reference of a whole layer would take seconds and gigabytes, but every element
of a result depends on only one row of x and one row of the weight. So an `Excerpt` keeps some of both, and the
part of the result that belongs to them; the contract then judges a small problem, exactly as it judges any other.

One position is drawn from each of several equal intervals, plus the first and the last: a wrong tile is hit wherever it
is, unless it is narrower than an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..formats.bits import raw
from ..weights.qtensor import QTensor
from .base import Contract, Problem, Verdict, position, wrong_form
from .conv2d import CONV2D, Conv2dRequest, output_size
from .embedding import EMBEDDING, EmbeddingRequest
from .grouped import GROUPED_LINEAR, GroupedLinearRequest
from .linear import LINEAR, LinearRequest

_TOKENS, _OUTPUTS = 24, 96
"""Numbers of rows of x (indices) and rows of the weight that are judged; all of them if there are fewer."""
_GROUPS, _CHANNELS = 4, 8
"""Numbers of channel groups of a convolution, and of output channels of each."""
_PATCHES, _SIDE = 6, 8
"""Number of patches of a convolution's result, and their maximum height and width."""


@dataclass(frozen=True)
class Excerpt:
    """A part of a problem: ``problem``, on CPU, is a small problem itself; ``pick`` extracts its part of a result."""

    problem: Problem
    pick: Callable[[Tensor], Tensor]


def sampled(problem: Problem, result: Any, generator: torch.Generator) -> Verdict:
    """Compare some elements of a kernel's result with the reference: `Contract.judge` for problems of any size.

    **Arguments:** ``problem``: its tensors may be on any device; ``result``: what the kernel returned for it, checked
    as a whole for type, shape, dtype and device; ``generator``: on CPU, chooses the elements.
    """
    contract, request = _CONTRACTS[type(problem.request)], problem.request
    wrong = wrong_form(request, result_shape(problem), result)
    if wrong:
        return Verdict(False, float("inf"), wrong)
    if not result.numel():
        return Verdict(True, 0.0, "empty")
    part = excerpt(problem, generator)
    return _placed(contract.judge(part.problem, part.pick(result.detach())), part, result.shape)


def _placed(verdict: Verdict, part: Excerpt, shape: tuple[int, ...]) -> Verdict:
    """The verdict on an excerpt, with the place of its worst element in the whole result if that is wrong."""
    if verdict.ok or verdict.where is None:
        return verdict
    places = part.pick(torch.arange(math.prod(shape)).view(shape))
    where = position(int(places[verdict.where]), shape)
    message = verdict.message.replace(f"at {verdict.where}:", f"at {where}:", 1)
    return replace(verdict, message=message, where=where)


def excerpt(problem: Problem, generator: torch.Generator) -> Excerpt:
    """Choose the part of ``problem`` that is judged; its result must not be empty."""
    return _EXCERPTS[type(problem.request)](problem, generator)


def result_shape(problem: Problem) -> tuple[int, ...]:
    """The shape of the result of ``problem``."""
    request, shape = problem.request, tuple(problem.x.shape)
    if isinstance(request, Conv2dRequest):
        return (shape[0], request.n, *output_size(request, *shape[2:]))
    return (*(shape if isinstance(request, EmbeddingRequest) else shape[:-1]), _width(request))


def _width(request: Any) -> int:
    return request.k if isinstance(request, EmbeddingRequest) else request.n


def _linear(problem: Problem, generator: torch.Generator) -> Excerpt:
    request = problem.request
    rows = problem.x.reshape(problem.x.shape[:-1].numel(), request.k)
    tokens, outputs = positions(rows.shape[0], _TOKENS, generator), positions(request.n, _OUTPUTS, generator)
    part = Problem(
        replace(request, n=len(outputs)),
        _take(rows, 0, tokens).cpu(),
        some_rows(problem.weight, outputs),
        None if problem.bias is None else _take(problem.bias, 0, outputs).cpu(),
        {name: _take(value, 0, tokens).cpu() for name, value in problem.given.items()},
    )
    return Excerpt(part, lambda y: _take(_take(y.reshape(-1, request.n), 0, tokens), 1, outputs))


def _embedding(problem: Problem, generator: torch.Generator) -> Excerpt:
    request, indices = problem.request, problem.x.reshape(-1)
    tokens = positions(indices.shape[0], _TOKENS, generator)
    table, x = torch.unique(_take(indices, 0, tokens).cpu().long(), return_inverse=True)
    small = replace(request, num_embeddings=len(table))
    part = Problem(small, x.to(indices.dtype), some_rows(problem.weight, table))
    return Excerpt(part, lambda y: _take(y.reshape(-1, request.k), 0, tokens))


def _grouped(problem: Problem, generator: torch.Generator) -> Excerpt:
    """Some outputs of some rows; every expert stays, with fewer rows."""
    request, ends = problem.request, problem.given["offsets"].cpu().long()
    tokens, outputs = positions(problem.x.shape[0], _TOKENS, generator), positions(request.n, _OUTPUTS, generator)
    weight = QTensor.stack([some_rows(problem.weight[e], outputs) for e in range(request.experts)])
    part = Problem(
        replace(request, n=len(outputs)),
        _take(problem.x, 0, tokens).cpu(),
        weight,
        None if problem.bias is None else _take(problem.bias, 1, outputs).cpu(),
        {"offsets": torch.searchsorted(tokens, ends).to(torch.int32)},
    )
    return Excerpt(part, lambda y: _take(_take(y, 0, tokens), 1, outputs))


def _conv2d(problem: Problem, generator: torch.Generator) -> Excerpt:
    """Some groups, output channels and patches; the patches become images that are already padded."""
    request = problem.request
    groups, outputs, inputs = _channels(request, generator)
    patches, size = _patches(problem, generator)
    size_in = tuple(
        (o - 1) * s + d * (k - 1) + 1
        for o, s, d, k in zip(size, request.stride, request.dilation, request.kernel_size, strict=True)
    )
    small = replace(request, in_channels=len(inputs), out_channels=len(outputs), groups=groups, padding=(0, 0))
    corners = [(b, i * request.stride[0], j * request.stride[1]) for b, i, j in patches]
    part = Problem(
        small,
        torch.stack([_patch(_padded(problem, b, inputs), i, j, size_in) for b, i, j in corners]),
        some_rows(problem.weight, outputs),
        None if problem.bias is None else _take(problem.bias, 0, outputs).cpu(),
    )
    return Excerpt(part, lambda y: torch.stack([_patch(_take(y[b], 0, outputs), i, j, size) for b, i, j in patches]))


def _channels(request: Conv2dRequest, generator: torch.Generator) -> tuple[int, Tensor, Tensor]:
    """The number of groups, their output channels (equally many of each), and their input channels."""
    n, c = request.out_channels // request.groups, request.in_channels // request.groups
    groups = positions(request.groups, _GROUPS, generator)
    outputs = torch.cat([g * n + positions(n, _CHANNELS, generator) for g in groups])
    return len(groups), outputs, torch.cat([g * c + torch.arange(c) for g in groups])


def _patches(problem: Problem, generator: torch.Generator) -> tuple[list[tuple[int, int, int]], tuple[int, int]]:
    """Image, row and column of the first element of each patch of the result, and the common size of the patches."""
    height, width = output_size(problem.request, *problem.x.shape[2:])
    size = min(height, _SIDE), min(width, _SIDE)
    places = (problem.x.shape[0], height - size[0] + 1, width - size[1] + 1)
    drawn = [positions(place, _PATCHES, generator) for place in places]
    # Columns in a different order than rows, or all patches would lie on the diagonal of an image.
    drawn[2] = drawn[2][torch.randperm(len(drawn[2]), generator=generator)]
    count = max(map(len, drawn))  # a shorter list is repeated: with one image all patches are from it
    image, row, column = ([int(place[i % len(place)]) for i in range(count)] for place in drawn)
    return list(zip(image, row, column, strict=True)), size


def _padded(problem: Problem, image: int, channels: Tensor) -> Tensor:
    """Some channels of an image, padded: with the value 0, whose code is the zero point."""
    request = problem.request
    (ph, pw), x = request.padding, _take(problem.x[image], 0, channels).cpu()
    zero = float(getattr(request.activation, "zero_point", 0)) if x.dtype == torch.int8 else 0.0
    return torch.nn.functional.pad(x, (pw, pw, ph, ph), value=zero)


def _patch(image: Tensor, row: int, column: int, size: tuple[int, ...]) -> Tensor:
    return image[:, row : row + size[0], column : column + size[1]]


def some_rows(weight: QTensor, rows: Tensor) -> QTensor:
    """The weight that consists of ``rows`` (int64 positions) of another one, on CPU."""
    zero = None if weight.zero is None else _take(weight.zero, 1, rows).cpu()
    data, scale = _take(weight.data, 0, rows).cpu(), _take(weight.scale, 1, rows).cpu()
    order, factor = (None if t is None else t.cpu() for t in (weight.order, weight.global_scale))
    shape = (len(rows), weight.shape[1])
    return QTensor(data, scale, zero, shape, weight.format, weight.quantizer, order, factor)


def _take(tensor: Tensor, dim: int, at: Tensor) -> Tensor:
    return raw(tensor).index_select(dim, at.to(tensor.device)).view(tensor.dtype)


def positions(size: int, most: int, generator: torch.Generator) -> Tensor:
    """At most ``most`` positions in ``0..size-1``, ascending, with the first and the last; int64.

    One from each of ``most`` equal intervals, or all if there are no more than that.
    """
    if size <= most:
        return torch.arange(size)
    borders = torch.arange(most + 1) * size // most
    drawn = torch.rand(most, generator=generator, dtype=torch.float64)
    chosen = borders[:-1] + (drawn * (borders[1:] - borders[:-1])).long()
    chosen[0], chosen[-1] = 0, size - 1
    return chosen


_CONTRACTS: dict[type, Contract] = {
    LinearRequest: LINEAR,
    Conv2dRequest: CONV2D,
    EmbeddingRequest: EMBEDDING,
    GroupedLinearRequest: GROUPED_LINEAR,
}
_EXCERPTS: dict[type, Callable[[Problem, torch.Generator], Excerpt]] = {
    LinearRequest: _linear,
    Conv2dRequest: _conv2d,
    EmbeddingRequest: _embedding,
    GroupedLinearRequest: _grouped,
}
