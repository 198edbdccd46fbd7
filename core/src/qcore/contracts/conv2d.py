"""The contract ``conv2d``: a quantized 2-D convolution, defined as `linear` over im2col columns."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import Format
from ..weights.activations import Activation, OutputInt8, without_parameters
from ..weights.qtensor import QTensor, contiguous
from ..weights.schemes import Scheme
from .base import (
    Case,
    Contract,
    Problem,
    exact_product,
    exact_weight,
    finish_allowed,
    finish_reference,
    float32_sum_error,
    product_error,
    weight_magnitude,
)
from .inputs import Draw, Parts, laid_out
from .linear import may_be_codes

Pair = tuple[int, int]


_LEAST = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}


def as_pair(name: str, value: Any) -> Pair:
    """(height, width) from one integer or two; raises `FormatError` for anything else and for a size too small."""
    try:
        found = tuple(map(operator.index, value if isinstance(value, Sequence) else (value, value)))
    except TypeError:
        found = ()
    if len(found) != 2 or min(found) < _LEAST[name]:
        raise FormatError(f"conv2d: {name} is {value!r}; it must be one or two integers, at least {_LEAST[name]}.")
    return found


def _is_pair(value: Any) -> bool:
    # Types are checked, too: 1.0 equals 1, so a cached decision for one request would be reused for the other.
    return type(value) is tuple and list(map(type, value)) == [int, int]


@dataclass(frozen=True)
class Conv2dRequest:
    """A request for a kernel for `conv2d`.

    **Fields:** as in `LinearRequest`, with ``in_channels``, ``out_channels``, ``kernel_size``, ``stride``, ``padding``,
    ``dilation`` as (height, width), and ``groups``. Raises `FormatError` if the sizes are inconsistent.
    """

    contract: ClassVar[str] = "conv2d"

    device: torch.device
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    in_channels: int
    out_channels: int
    kernel_size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    weight: Format
    activation: Activation | None
    output: OutputInt8 | None
    bias: bool
    training: bool

    def __post_init__(self) -> None:
        sides = (self.kernel_size, self.stride, self.dilation, self.padding)
        if not all(map(_is_pair, sides)) or min(map(min, sides[:3])) < 1 or min(self.padding) < 0:
            for name in _LEAST:
                as_pair(name, getattr(self, name))
            raise FormatError(f"conv2d: kernel_size, stride, dilation and padding are {sides}; pass pairs of ints.")
        if operator.index(self.groups) < 1 or any(c % self.groups for c in self._channels()):
            raise FormatError(
                f"conv2d: groups={self.groups} must divide in_channels={self.in_channels} "
                f"and out_channels={self.out_channels}."
            )
        if _per_token(self):
            raise FormatError("conv2d: per-token parameters are supported for linear only; use per-tensor ones.")

    def _channels(self) -> Pair:
        return self.in_channels, self.out_channels

    @property
    def n(self) -> int:
        """Output channels: the rows of the weight."""
        return self.out_channels

    @property
    def k(self) -> int:
        """Columns of the weight: kernel height * kernel width * input channels of one group."""
        return self.kernel_size[0] * self.kernel_size[1] * (self.in_channels // self.groups)

    def signature(self) -> tuple[Any, ...]:
        """The fields that a verdict on a kernel depends on, including sizes: convolution kernels specialise on them."""
        activation = without_parameters(self.activation)
        geometry = (self.kernel_size, self.stride, self.padding, self.dilation, self.groups)
        channels = (self.in_channels, self.out_channels)
        form = (str(self.weight), activation, self.output and self.output.blank(), self.bias)
        return (self.contract, self.x_dtype, self.out_dtype, geometry, channels, *form)

    def small(self) -> Conv2dRequest:
        """The same request without training: a few pixels of input are enough to make the problem small."""
        return replace(self, training=False)


def _per_token(asked: Conv2dRequest | Scheme) -> bool:
    return any(getattr(part, "per_token", False) for part in (asked.activation, asked.output))


@dataclass(frozen=True)
class _Shape:
    name: str
    x: tuple[int, int, int, int]
    out: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    bias: bool = False
    channels_last: bool = False
    parts: Parts = "dense"
    weights: str = "skewed"
    other_bias: bool = False
    codes: bool = False


_OUTPUTS = 20
"""Height and width of the result with which a layer's own weight is tested."""

_SHAPES: tuple[_Shape, ...] = (
    _Shape("1x1", (2, 8, 5, 5), 12, (1, 1)),
    _Shape("1x1-strided", (1, 8, 6, 7), 5, (1, 1), stride=(2, 2), bias=True),
    _Shape("3x3", (2, 4, 7, 6), 8, (3, 3), padding=(1, 1), bias=True),
    _Shape("3x3-odd", (1, 3, 9, 9), 5, (3, 3), stride=(2, 1), padding=(1, 0)),
    _Shape("5x5-dilated", (1, 2, 12, 11), 4, (5, 5), padding=(4, 4), dilation=(2, 2)),
    _Shape("1x7", (1, 4, 5, 12), 3, (1, 7), padding=(0, 3)),
    _Shape("grouped", (2, 6, 6, 6), 4, (3, 3), padding=(1, 1), groups=2, bias=True),
    _Shape("depthwise", (1, 6, 8, 8), 6, (3, 3), padding=(1, 1), groups=6),
    _Shape("depthwise-strided", (1, 6, 9, 8), 6, (3, 3), stride=(2, 2), padding=(1, 1), groups=6),
    _Shape("depthwise-multiplied", (2, 5, 6, 6), 10, (3, 3), padding=(1, 1), groups=5, bias=True),
    _Shape("grouped-dilated", (1, 6, 9, 8), 4, (3, 3), padding=(2, 2), dilation=(2, 2), groups=2),
    _Shape("dilated-strided", (1, 4, 11, 10), 6, (3, 3), stride=(2, 1), padding=(1, 2), dilation=(2, 3)),
    _Shape("bias-other", (2, 4, 5, 6), 8, (3, 3), padding=(1, 1), bias=True, other_bias=True),
    _Shape("narrow-scales", (1, 8, 5, 5), 8, (3, 3), padding=(1, 1), weights="narrow"),
    _Shape("half-scales", (1, 8, 5, 5), 8, (3, 3), padding=(1, 1), weights="half"),
    _Shape("wide", (1, 16, 4, 4), 20, (3, 3), padding=(1, 1)),
    _Shape("channels-last", (2, 8, 6, 5), 8, (3, 3), padding=(1, 1), channels_last=True),
    _Shape("batch-0", (0, 4, 6, 6), 8, (3, 3)),
    _Shape("one-pixel", (1, 6, 1, 1), 4, (3, 3), padding=(1, 1), bias=True),
    _Shape("narrow", (2, 1, 8, 1), 4, (5, 4), stride=(1, 2), padding=(2, 2), bias=True),
    _Shape("padding-only", (2, 1, 5, 2), 6, (2, 2), padding=(1, 2), dilation=(1, 3), bias=True),
    _Shape("strided-parts", (2, 4, 6, 7), 12, (3, 3), padding=(1, 1), bias=True, parts="strided"),
    _Shape("expanded-parts", (2, 4, 6, 7), 12, (3, 3), padding=(1, 1), bias=True, parts="expanded"),
)
_CODES = _Shape("codes", (2, 4, 6, 7), 8, (3, 3), padding=(1, 1), bias=True, codes=True)
"""x arrives as int8 codes of a per-tensor scale; padding is their zero point."""

_STRIDES = {"dense": "dense", "strided": "columns", "expanded": "expanded"}
"""The memory layout of x for each memory layout of bias and weight."""


_SIZES_DRAWN = (
    _Shape("any-1", (0, 0, 0, 0), 0, (1, 1), bias=True),
    _Shape("any-2", (0, 0, 0, 0), 0, (1, 1), weights="codes"),
)
"""Shapes without sizes and geometry, see `_drawn`."""
_EVERY = (*_SHAPES[:1], *_SIZES_DRAWN, *_SHAPES[1:])
"""All shapes but `_CODES`, in the order of the cases."""


def _drawn(draw: Draw, shape: _Shape) -> _Shape:
    """The shape with sizes and a geometry that nobody has chosen: other ones with each seed."""
    batch, groups, channels, out = draw.sizes(3, 3, 9, 9)
    groups = channels if groups == 3 else groups  # depthwise, every third time
    kernel, stride, dilation, border, more = (_pair(draw, most) for most in (4, 2, 3, 3, 6))
    padding = border[0] - 1, border[1] - 1
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    height, width = (max(1, r - 2 * p) + m for r, p, m in zip(reach, padding, more, strict=True))
    inner = 1 if groups == channels else channels
    return replace(
        shape, x=(batch, groups * inner, height, width), out=groups * out, kernel=kernel, stride=stride,
        padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip


def _pair(draw: Draw, most: int) -> Pair:
    high, wide = draw.sizes(most, most)
    return high, wide


class Conv2dContract(Contract):
    """``y = conv2d(A(x), W) + bias``.

    - ``x``: ``(B, IC, H, W)``, ``y``: ``(B, OC, OH, OW)`` of ``out_dtype``; the weight is ``(OC, KH*KW*IC/groups)``
      with columns in (KH, KW, IC) order, quantized like any `(N, K)` weight. x and bias may have any strides.
    - The semantics are those of `linear` over im2col columns. A token is one column: the receptive field of one
      output position in one channel group.
    - Padding is the value 0, which is the zero point in the int8 domain.
    - Errors: a channel count of x other than IC, an image smaller than the (dilated) kernel.
    """

    name: ClassVar[str] = "conv2d"
    request: ClassVar[type] = Conv2dRequest

    def reference(self, problem: Problem) -> Tensor:
        return finish_reference(problem, _exact(problem)).reshape(_output_shape(problem)).movedim(-1, 1)

    def allowed(self, problem: Problem) -> Tensor:
        dense, size = exact_weight(problem.weight), weight_magnitude(problem.weight)
        error = torch.cat([product_error(problem, c, w, m) for c, w, m in _per_group(problem, dense, size)], dim=1)
        if problem.bias is not None:  # torch's convolutions begin their sums with it
            error = error + float32_sum_error(problem.weight.shape[-1]) * problem.bias.double().abs()
        return finish_allowed(problem, _exact(problem), error).reshape(_output_shape(problem)).movedim(-1, 1)

    def request_for(self, scheme: Scheme, device: torch.device, dtype: torch.dtype, n: int, k: int) -> Conv2dRequest:
        return _request(scheme, device, dtype, _Shape("plain", (1, k, 1, 1), n, (1, 1)))

    def cases(self, schemes: Iterable[Scheme], dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
        dtypes = tuple(dtypes)
        for scheme in (s for s in schemes if not _per_token(s)):
            for dtype in dtypes:
                for shape in (*_EVERY, _CODES) if may_be_codes(scheme.activation) else _EVERY:
                    yield self._case(scheme, dtype, shape)

    def _case(self, scheme: Scheme, dtype: torch.dtype, shape: _Shape) -> Case:
        def make(generator: torch.Generator, device: torch.device) -> Problem:
            draw = Draw(generator)
            sized = shape if shape.out else _drawn(draw, shape)
            request = _request(draw.fill(scheme), device, dtype, sized)
            if shape.codes:
                request = replace(request, x_dtype=torch.int8)
            return _problem(draw, request, sized)

        name = f"conv2d[{scheme.blank()}-{str(dtype).removeprefix('torch.')}-{shape.name}]"
        return Case(name, self.name, str(scheme.blank()), make)

    def probe(self, request: Any, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        reach = [d * (k - 1) + 1 for d, k in zip(request.dilation, request.kernel_size, strict=True)]
        sides = [max(r - 2 * p, 1) + 3 for r, p in zip(reach, request.padding, strict=True)]
        shape = _Shape("probe", (2, request.in_channels, sides[0], sides[1]), request.out_channels, (1, 1))
        return [_problem(draw, request, shape)]

    def is_probed_whole(self, request: Any) -> bool:
        """Never: the weight is complete, but the images are only a few pixels large."""
        del request
        return False

    def around(self, request: Any, weight: QTensor, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        x = draw.activations((2, request.in_channels, *_sides(request, _OUTPUTS)), request.x_dtype, "normal", "dense")
        return [Problem(request, x, weight, draw.bias(request.n, "same" if request.bias else "none", torch.float32))]


def _sides(request: Conv2dRequest, outputs: int) -> Pair:
    """Height and width of an image that gives ``outputs`` results along each, or a few more if the padding is wide."""
    axes = zip(request.kernel_size, request.stride, request.padding, request.dilation, strict=True)
    height, width = (max(1, (outputs - 1) * s + d * (k - 1) + 1 - 2 * p) for k, s, p, d in axes)
    return height, width


def _request(scheme: Scheme, device: torch.device, dtype: torch.dtype, shape: _Shape) -> Conv2dRequest:
    geometry = (shape.kernel, shape.stride, shape.padding, shape.dilation, shape.groups)
    out = torch.int8 if scheme.output else dtype
    quantization = (scheme.weight, scheme.activation, scheme.output)
    return Conv2dRequest(device, dtype, out, shape.x[1], shape.out, *geometry, *quantization, shape.bias, False)


def _problem(draw: Draw, request: Conv2dRequest, shape: _Shape) -> Problem:
    weight = draw.weight(request.n, request.k, request.weight, shape.weights)
    x = draw.activations(shape.x, request.x_dtype, "normal", _STRIDES[shape.parts])
    if shape.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    kind = "other" if shape.other_bias else "same"
    dtype = next((d for d in (request.x_dtype, request.out_dtype) if d.is_floating_point), torch.float32)
    bias = draw.bias(request.n, kind if request.bias else "none", dtype)
    return laid_out(Problem(request, x, weight, bias), shape.parts)


def im2col(x: Tensor, request: Conv2dRequest) -> Tensor:
    """``(B, IC, H, W)`` to columns ``(B * OH * OW, groups, KH*KW*IC/groups)`` in (KH, KW, IC) order; padding is 0."""
    kh, kw = request.kernel_size
    batch, channels = x.shape[:2]
    if batch * channels == 0:
        pixels = math.prod(output_size(request, *x.shape[2:]))
        return x.new_zeros(batch * pixels, request.groups, request.k)
    columns = torch.nn.functional.unfold(
        x, request.kernel_size, dilation=request.dilation, padding=request.padding, stride=request.stride
    )
    parts = columns.view(batch, request.groups, channels // request.groups, kh * kw, -1)
    return parts.permute(0, 4, 1, 3, 2).reshape(-1, request.groups, request.k)


def convolved_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Pair:
    """(OH, OW) for an image of ``size``, by the formula of `torch.nn.Conv2d`; each argument is (height, width).

    Sizes may be symbolic, as in a fake. If the kernel does not fit, the result is below 1.
    """
    (h, w), (kh, kw), (sh, sw), (ph, pw), (dh, dw) = size, kernel, stride, padding, dilation
    return (h + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (w + 2 * pw - dw * (kw - 1) - 1) // sw + 1


def output_size(request: Conv2dRequest, height: int, width: int) -> Pair:
    """(OH, OW) of a request for an image of (height, width): see `convolved_size`."""
    return convolved_size((height, width), request.kernel_size, request.stride, request.padding, request.dilation)


def check_image(name: str, x: Tensor, request: Conv2dRequest) -> None:
    """Raise `FormatError`, naming the kernel, unless x is ``(B, IC, H, W)`` and at least as large as the kernel window.

    A trace does not check sizes, since that would add guards on dynamic ones: torch raises when the graph runs.
    """
    if x.dim() != 4 or x.shape[1] != request.in_channels:
        raise FormatError(
            f"{name}: x has shape {tuple(x.shape)}; it must be (B, IC, H, W) with IC={request.in_channels} channels."
        )
    if not torch.compiler.is_compiling() and min(output_size(request, *x.shape[2:])) < 1:
        raise FormatError(
            f"{name}: an image of {x.shape[2]} x {x.shape[3]} with padding {request.padding} is smaller\n"
            f"than the kernel {request.kernel_size} with dilation {request.dilation}."
        )


def laid_out_like(y: Tensor, x: Tensor) -> Tensor:
    """Images y in the memory format of images x, as after `torch.nn.Conv2d`: later code may need a view.

    Kernels may return either format; most return channels_last.
    """
    # Decided by the strides, as in torch: with one channel an image is contiguous in both formats. One pixel decides
    # nothing.
    last = x.stride(1) == 1 and x.stride(3) >= x.shape[1] and x.stride(2) * x.shape[2] > 1
    return y.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def kernel_shape(request: Conv2dRequest) -> tuple[int, int, int, int]:
    """(OC, KH, KW, IC/groups): the shape of the stored weight."""
    return (request.n, *request.kernel_size, request.in_channels // request.groups)


def dense_kernel(weight: QTensor, request: Conv2dRequest, dtype: torch.dtype) -> Tensor:
    """The dequantized weight in the layout of torch's convolutions: ``(OC, IC/groups, KH, KW)``."""
    # Contiguous in every stride: torch's convolutions read out of bounds if a dimension of size 1 has another stride.
    return contiguous(weight.dequantize(dtype).view(kernel_shape(request)).permute(0, 3, 1, 2))


def _per_group(problem: Problem, *weights: Tensor) -> Iterator[tuple[Tensor, ...]]:
    request = problem.request
    # Codes are shifted before and after the unfolding, so that padding with 0 gives the zero point.
    zero = float(getattr(request.activation, "zero_point", 0)) if problem.x.dtype == torch.int8 else 0.0
    columns = (im2col(problem.x.float() - zero, request) + zero).to(problem.x.dtype)
    size = request.out_channels // request.groups
    for group in range(request.groups):
        yield (columns[:, group], *(w[group * size : (group + 1) * size] for w in weights))


def _exact(problem: Problem) -> Tensor:
    dense = exact_weight(problem.weight)
    y = torch.cat([exact_product(problem, columns, w) for columns, w in _per_group(problem, dense)], dim=1)
    return y if problem.bias is None else y + problem.bias.double()


def _output_shape(problem: Problem) -> tuple[int, ...]:
    batch, _, height, width = problem.x.shape
    return (batch, *output_size(problem.request, height, width), problem.request.out_channels)


CONV2D = Conv2dContract()
