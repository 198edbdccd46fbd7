"""The contract ``linear``: ``y = A(x) @ W^T + bias`` with a quantized W."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..formats import Format
from ..weights.activations import Activation, DynamicInt8, OutputInt8, StaticInt8, without_parameters
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .base import (
    Case,
    Contract,
    Problem,
    exact_product,
    exact_weight,
    finish_allowed,
    finish_reference,
    product_error,
    weight_magnitude,
)
from .inputs import Draw, Shape, small_k, small_n


@dataclass(frozen=True)
class LinearRequest:
    """A request for a kernel for `linear`.

    **Fields:** ``device`` and ``x_dtype`` of the input (int8 if x arrives as codes); ``out_dtype``; ``n``, ``k``:
    output and input features; ``rows``: M if it is known, None = any; ``weight``: the `Format`; ``activation``:
    None for float activations; ``output``: None for a float result; ``bias``: whether one is added; ``training``:
    gradients with respect to x are needed (qcore computes them, by multiplying by the dequantized weight).
    """

    contract: ClassVar[str] = "linear"

    device: torch.device
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    n: int
    k: int
    rows: int | None
    weight: Format
    activation: Activation | None
    output: OutputInt8 | None
    bias: bool
    training: bool

    def signature(self) -> tuple[Any, ...]:
        """The fields that a verdict on a kernel depends on: all but the device, exact sizes and parameter values."""
        activation = without_parameters(self.activation)
        output = self.output and self.output.blank()
        form = (small_n(self.n), small_k(self.k, self.weight))
        return (self.contract, self.x_dtype, self.out_dtype, str(self.weight), activation, output, self.bias, form)

    def small(self) -> LinearRequest:
        """The same request for a small weight whose sizes have the same remainders."""
        return replace(self, n=small_n(self.n), k=small_k(self.k, self.weight), rows=None, training=False)


_ROWS = (0, 1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 128, 200, 256)
_SHAPES: tuple[Shape, ...] = (
    *(Shape(f"rows-{m}", (m,), 32, 256) for m in _ROWS),
    Shape("rows-2100", (2100,), 16, 32),
    Shape("m-above-k", (40,), 16, 8),
    Shape("m-above-k-wide", (300,), 32, 256),
    Shape("k-odd", (3,), 20, 77),
    Shape("k-5", (3,), 8, 5),
    Shape("k-ragged", (4,), 32, 168),
    Shape("k-aligned-16", (4,), 16, 48),
    *(Shape(f"n-{n}", (5,), n, 128) for n in (1, 3, 12, 20, 129)),
    Shape("vector", (), 16, 64),
    Shape("batched", (2, 5), 20, 64),
    Shape("batched-4d", (2, 1, 3), 20, 64),
    Shape("batched-bias", (1, 7), 20, 64, bias="same"),
    Shape("rows-1-bias", (1,), 32, 256, bias="same"),
    Shape("bias", (3,), 20, 64, bias="same"),
    Shape("bias-float32", (3,), 20, 64, bias="float32"),
    Shape("bias-bfloat16", (3,), 20, 64, bias="bfloat16"),
    Shape("bias-float16", (3,), 20, 64, bias="float16"),
    Shape("rows-17-bias", (17,), 32, 256, bias="same"),
    Shape("bias-ragged", (17,), 12, 77, bias="same"),
    Shape("strided-columns", (6,), 16, 64, strides="columns"),
    Shape("strided-rows", (6,), 16, 64, strides="rows"),
    Shape("strided-odd", (6,), 16, 77, strides="columns"),
    Shape("extreme-codes", (5,), 20, 160, weights="codes"),
    Shape("signed-scales", (5,), 20, 160, weights="signed"),
    Shape("signed-scales-rows", (65,), 32, 256, weights="signed"),
    Shape("zero-groups", (4,), 16, 256, weights="zeros"),
    Shape("tiny-scales", (4,), 16, 128, weights="tiny"),
    Shape("narrow-scales", (4,), 16, 128, weights="narrow"),
    Shape("half-scales", (4,), 16, 128, weights="half"),
    Shape("large-x", (4,), 16, 256, inputs="large"),
    Shape("zero-rows", (4,), 16, 64, inputs="zero-rows"),
    Shape("outliers", (4,), 16, 256, inputs="outliers"),
    Shape("spikes", (5,), 16, 256, inputs="spikes"),
    Shape("spike-row", (1,), 16, 160, inputs="spikes"),
    Shape("strided-parts", (5,), 48, 160, bias="same", strides="rows", parts="strided"),
    Shape("expanded-parts", (5,), 48, 160, bias="float32", strides="expanded", parts="expanded"),
    Shape("deep", (2,), 48, 2048),
)
_CODES = Shape("codes", (5,), 20, 64, bias="same", inputs="codes")
"""x arrives as int8 codes of a per-tensor scale."""

_SIZES_DRAWN = (
    Shape("any-1", (), 0, 0, bias="same"),
    Shape("any-2", (), 0, 0, weights="codes"),
    Shape("any-3", (), 0, 0, bias="float32", strides="columns"),
)
"""Shapes without sizes, see `_drawn`."""
_EVERY = (*_SHAPES[:1], *_SIZES_DRAWN, *_SHAPES[1:])
"""All shapes but `_CODES`, in the order of the cases."""
_MOST = (70, 160, 320)
"""The largest M, N and K that are drawn."""

_TOKEN_SCHEMES = ("w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t")


_FEW_ROWS, _MANY_ROWS, _WORK = 16, 256, 1 << 32
"""A layer's own weight is tested with one row and with many, limited so that the number of products stays below the
last value."""
_LARGEST_PROBE = 1024
"""More rows than columns are tested up to this K; beyond it the problem would no longer be small."""


class LinearContract(Contract):
    """``y = A(x) @ W^T + bias``.

    - ``x``: ``(..., K)``, ``W`` = the dequantized weight ``(N, K)``, ``bias``: ``(N,)`` of any float dtype,
      ``y``: ``(..., N)`` of ``out_dtype``. x, bias and per-token parameters may have any strides (a weight's tensors
      are contiguous); an x without rows gives an empty result.
    - Float activations: products accumulated in float32 or better. The error from an element of x is bounded by its own
      products: a value far above the others changes nothing if its weight is 0.
    - Int8 activations: ``A(x) = s_x (q_x - z_x)`` per token. Exact int32 accumulation of the codes per group;
      scales and zero-point corrections in float32.
    - Fp8 activations: ``A(x) = s_x q_x`` with ``q_x = e4m3(x / s_x)``, saturating at 448. Products of e4m3 values are
      exact in float32; they are accumulated in float32 or better.
    - The bias is added before the single rounding to ``out_dtype``.
    - Int8 output: ``clamp(round(y / s) + z, -128, 127)``, half to even, one code of tolerance.
    - Errors: a last dimension of x other than K, a bias of another shape.
    """

    name: ClassVar[str] = "linear"
    request: ClassVar[type] = LinearRequest

    def reference(self, problem: Problem) -> Tensor:
        rows = _rows(problem)
        y = _exact(problem, rows)
        return finish_reference(problem, y).reshape(*problem.x.shape[:-1], problem.request.n)

    def allowed(self, problem: Problem) -> Tensor:
        rows = _rows(problem)
        error = product_error(problem, rows, exact_weight(problem.weight), weight_magnitude(problem.weight))
        allowed = finish_allowed(problem, _exact(problem, rows), error)
        return allowed.reshape(*problem.x.shape[:-1], problem.request.n)

    def request_for(self, scheme: Scheme, device: torch.device, dtype: torch.dtype, n: int, k: int) -> LinearRequest:
        x_dtype = torch.int8 if getattr(scheme.activation, "per_token", False) else dtype
        out = torch.int8 if scheme.output else dtype
        return LinearRequest(
            device, x_dtype, out, n, k, None, scheme.weight, scheme.activation, scheme.output, False, False
        )

    def cases(self, schemes: Iterable[Scheme], dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
        schemes, dtypes = tuple(schemes), tuple(dtypes)
        int8 = any(isinstance(scheme.activation, (DynamicInt8, StaticInt8)) for scheme in schemes)
        given = _TOKEN_SCHEMES if int8 else ()
        for scheme in dict.fromkeys((*schemes, *map(Scheme.parse, given))):
            for dtype in dtypes:
                for shape in (*_EVERY, _CODES) if may_be_codes(scheme.activation) else _EVERY:
                    yield self._case(scheme, dtype, shape)

    def _case(self, scheme: Scheme, dtype: torch.dtype, shape: Shape) -> Case:
        def make(generator: torch.Generator, device: torch.device) -> Problem:
            draw = Draw(generator)
            filled, sized = draw.fill(scheme), shape if shape.n else _drawn(draw, shape)
            request = self.request_for(filled, device, dtype, sized.n, sized.k)
            if shape.inputs == "codes":
                request = replace(request, x_dtype=torch.int8)
            return draw.linear(replace(request, bias=shape.bias != "none"), sized, filled.quantizer, dtype)

        name = f"linear[{scheme.blank()}-{str(dtype).removeprefix('torch.')}-{shape.name}]"
        return Case(name, self.name, str(scheme.blank()), make)

    def probe(self, request: Any, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        # One row, a few, and more rows than columns: the three row counts at which dispatch inside kernels changes.
        rows = (1, 5, max(_MANY_ROWS + 1, request.k + 3 if request.k <= _LARGEST_PROBE else 0))
        return [
            draw.linear(request, Shape("probe", (m,), request.n, request.k, "same" if request.bias else "none"))
            for m in rows
        ]

    def around(self, request: Any, weight: QTensor, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        many = min(_MANY_ROWS, max(_FEW_ROWS, _WORK // max(1, request.n * request.k)))
        return [
            self._around(draw, request, weight, m) for m in ((1, many) if request.rows is None else (request.rows,))
        ]

    def _around(self, draw: Draw, request: LinearRequest, weight: QTensor, rows: int) -> Problem:
        x = draw.activations((rows, request.k), request.x_dtype, "normal", "dense")
        bias = draw.bias(request.n, "same" if request.bias else "none", torch.float32)
        return Problem(request, x, weight, bias, draw.given(request, x))


def _drawn(draw: Draw, shape: Shape) -> Shape:
    """The shape with sizes that nobody has chosen: other ones with each seed."""
    m, n, k = draw.sizes(*_MOST)
    leads = ((m,), (1, m), (m, 1))
    return replace(shape, lead=leads[draw.sizes(len(leads))[0] - 1], n=n, k=k)


def may_be_codes(activation: Activation | None) -> bool:
    """Whether x may arrive as codes of one scale that is part of the request."""
    return isinstance(activation, StaticInt8) and not activation.per_token


def _rows(problem: Problem) -> Tensor:
    return problem.x.reshape(problem.x.shape[:-1].numel(), problem.request.k)


def _exact(problem: Problem, rows: Tensor) -> Tensor:
    y = exact_product(problem, rows, exact_weight(problem.weight))
    return y if problem.bias is None else y + problem.bias.double()


LINEAR = LinearContract()
