"""Random inputs for the test cases: skewed weights, awkward shapes, extreme values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..formats import Element, Format, ScaleType, ZeroPoint
from ..formats.bits import raw
from ..weights.activations import OutputInt8, StaticFP8, StaticInt8
from ..weights.qtensor import QTensor
from ..weights.quantizers import NEEDS_MOMENTS, quantize
from ..weights.schemes import Scheme
from .base import Problem

Parts = Literal["dense", "strided", "expanded"]
"""The memory layout of bias, per-token parameters and the tensors of the weight."""

BiasDtype = Literal["none", "same", "float32", "bfloat16", "float16", "other"]
"""The dtype of a bias: "same" as x, or as the result if x holds codes; "other": narrower than x, or of another kind."""

_BIASES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OTHER_DTYPES = {torch.float32: torch.float16, torch.bfloat16: torch.float32, torch.float16: torch.bfloat16}
_SMALL = 256
_SPIKES = {torch.float16: (3e4, -6e4, 1e3)}
_WIDE_SPIKES = (1e6, -1e30, 300.0)
"""Values far above the others in their row; smaller for float16, whose range ends earlier."""


def small_n(n: int) -> int:
    """A small N with the same remainder modulo 64 as ``n``: a kernel's tail handling depends on it."""
    return n if n <= 64 else 64 + n % 64


def small_k(k: int, weight: Format) -> int:
    """A small K with the same remainders modulo 256 and the group size as ``k``, and two groups if k has more."""
    period = _SMALL if weight.group_size is None else math.lcm(_SMALL, 2 * weight.group_size)
    return k if k <= period else period + k % period


@dataclass(frozen=True)
class Shape:
    """One shape class: leading dimensions of x, N, K, and what is unusual about the inputs.

    Without sizes (N is 0) they are drawn.
    """

    name: str
    lead: tuple[int, ...]
    n: int
    k: int
    bias: BiasDtype = "none"
    strides: Literal["dense", "columns", "rows", "expanded"] = "dense"
    weights: Literal["skewed", "codes", "zeros", "tiny", "narrow", "half", "signed"] = "skewed"
    inputs: Literal["normal", "large", "zero-rows", "outliers", "spikes", "codes"] = "normal"
    parts: Parts = "dense"


class Draw:
    """Draws problems from one random generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def normal(self, *shape: int) -> Tensor:
        # The dtype is explicit because a user may have changed torch's default.
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers in ``low..high``, inclusive."""
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def sizes(self, *most: int) -> list[int]:
        """A size of at least 1 for each of the largest ones."""
        return [int(self.whole(1, limit)) for limit in most]

    def fill(self, scheme: Scheme) -> Scheme:
        """Give values to the parameters of a static activation or output that has none."""
        activation, output = scheme.activation, scheme.output
        if isinstance(activation, StaticInt8) and not activation.is_given:
            activation = StaticInt8(self._about(0.021), int(self.whole(-40, 40)))
        if isinstance(activation, StaticFP8) and not activation.is_given:
            activation = StaticFP8(self._about(0.0071))
        if output is not None and not output.is_given:
            output = OutputInt8(self._about(0.05), int(self.whole(-20, 20)))
        return replace(scheme, activation=activation, output=output)

    def _about(self, value: float) -> float:
        """Draw a number near ``value``: with a constant, a kernel would pass that keeps the first scale it gets."""
        return value * (0.75 + 0.5 * float(torch.rand((), generator=self.generator, dtype=torch.float64)))

    def weight(self, n: int, k: int, fmt: Format, kind: str = "skewed", quantizer: str = "") -> QTensor:
        """A quantized weight whose values are skewed to one side by group, so that a wrong zero point is obvious."""
        if kind in ("codes", "signed"):
            return self._codes(n, k, fmt, signed=kind == "signed")
        lean = self.normal(n, 1) * 0.03 + 0.04
        dense = self.normal(n, k) * 0.05 + lean
        if kind == "zeros":
            dense[:, : fmt.group_size or 0] = 0
            dense[::2] = 0
        if kind == "tiny":
            dense *= 1e-4
        fast = "absmax" if fmt.zero is ZeroPoint.NONE else "minmax"
        narrow = torch.bfloat16 if kind == "narrow" else torch.float32
        chosen = fast if quantizer in ("", "mse", *NEEDS_MOMENTS) else quantizer
        weight = quantize(dense, fmt, chosen, scale_dtype=narrow)
        return _in_halves(weight) if kind == "half" else weight

    def _codes(self, n: int, k: int, fmt: Format, *, signed: bool = False) -> QTensor:
        """All valid codes, drawn uniformly; ``signed``: with scales of either sign, as in GGUF files."""
        element, groups = fmt.element, (fmt.groups(k), n)
        codes = self._some_codes(element, n, k)
        scale = torch.rand(*groups, generator=self.generator, dtype=torch.float32) * 0.01 + 0.001
        if signed:
            scale *= self.whole(0, 1, *groups) * 2 - 1
        if not element.is_integer:
            # As large as an int4 weight: a bias far above the sums would dominate the rounding errors.
            scale *= 8 / element.value_range[1]
        zero = None
        if fmt.zero is ZeroPoint.INT:
            zero = self.whole(*fmt.code_range, *groups).to(torch.int8)
        elif fmt.zero is ZeroPoint.FLOAT:
            zero = self.normal(*groups) * 0.05
        if fmt.scale is ScaleType.E8M0:
            return QTensor.from_codes(codes, self.whole(110, 122, *groups).to(torch.uint8), zero, fmt)
        if not fmt.scale.has_global:
            return QTensor.from_codes(codes, scale, zero, fmt)
        fraction = (scale * 1e4).to(torch.float8_e4m3fn)
        factor = torch.tensor(1e-4 if fmt.scale is ScaleType.E4M3 else 1e4)
        return QTensor.from_codes(codes, fraction, zero, fmt, global_scale=factor)

    def _some_codes(self, element: Element, *shape: int) -> Tensor:
        """Codes whose values are finite."""
        low, high = element.code_range
        if not element.has_invalid_codes:
            return self.whole(low, high, *shape).to(element.code_dtype)
        every = torch.arange(low, high + 1).to(element.code_dtype)
        usable = every[torch.isfinite(element.decode(every))]
        return usable[self.whole(0, len(usable) - 1, *shape)]

    def activations(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str, strides: str) -> Tensor:
        """Draw x of ``shape``; its last dimension is K. Skewed to one side, too, so that a missing correction shows."""
        if dtype == torch.int8:
            return with_strides(self.whole(-128, 127, *shape).to(torch.int8), strides)
        x = self.normal(*shape) + 0.3
        if kind == "large":
            x *= 100.0 if dtype == torch.float16 else 1e4
        if kind == "zero-rows":
            x[::2] = 0
        if kind == "outliers":
            x[..., ::61] *= 50
        if kind == "spikes":
            spikes = torch.tensor(_SPIKES.get(dtype, _WIDE_SPIKES), dtype=torch.float32)
            rows = x.view(-1, shape[-1])[: len(spikes)]
            rows[:, _spiked(shape[-1])] = spikes[: len(rows)]
        return with_strides(x.to(dtype), strides)

    def linear(self, request: Any, shape: Shape, quantizer: str = "", dtype: torch.dtype = torch.float32) -> Problem:
        """A problem for a linear request."""
        weight = self.weight(shape.n, shape.k, request.weight, shape.weights, quantizer)
        x = self.activations((*shape.lead, shape.k), request.x_dtype, shape.inputs, shape.strides)
        if shape.inputs == "spikes":
            weight = _without_column(weight, _spiked(shape.k))
        problem = Problem(request, x, weight, self.bias(shape.n, shape.bias, dtype), self.given(request, x))
        return laid_out(problem, shape.parts)

    def bias(self, n: int | tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor | None:
        """A bias for x of ``dtype``, see `BiasDtype`."""
        if kind == "none":
            return None
        other = _OTHER_DTYPES[dtype] if kind == "other" else dtype
        return self.normal(*(n if isinstance(n, tuple) else (n,))).to(_BIASES.get(kind, other))

    def given(self, request: Any, x: Tensor) -> dict[str, Tensor]:
        """Per-token parameters, if the request has any."""
        tokens, given = x.shape[:-1].numel(), {}
        for prefix, part in (("x", request.activation), ("out", request.output)):
            if getattr(part, "per_token", False):
                given[f"{prefix}_scale"] = (
                    torch.rand(tokens, generator=self.generator, dtype=torch.float32) * 0.02 + 0.005
                )
                given[f"{prefix}_zero_point"] = self.whole(-30, 30, tokens).to(torch.int32)
        return given


def _in_halves(weight: QTensor) -> QTensor:
    """``weight`` with scales (and float zero points) in float16, subnormal ones for every other output.

    Scale types that are not plain floats stay as they are.
    """
    if weight.format.scale is not ScaleType.FLOAT:
        return weight
    size = torch.where(torch.arange(weight.shape[0]) % 2 == 1, _SUBNORMAL_HALF / weight.scale.abs().amax(0), 1.0)
    zero = weight.zero
    if weight.format.zero is ZeroPoint.FLOAT and zero is not None:
        zero = (zero * size).half()
    return weight.derived(scale=(weight.scale * size).half(), zero=zero, quantizer=None)


_SUBNORMAL_HALF = 3e-5
"""Below 2**-14, the least normal number of float16."""


def _spiked(k: int) -> int:
    """The column that holds the spikes."""
    return k // 3


def _without_column(weight: QTensor, column: int) -> QTensor:
    """``weight`` with the value 0 in one column, stored as zeros only: the value of x there must not affect y.

    This reveals an error that scales with the largest value of a row, because that value adds nothing to the tolerance.
    """
    codes = weight.codes().clone()
    codes[:, column] = weight.format.element.zero_code or 0
    zero = weight.integer_zero() if weight.format.zero is ZeroPoint.INT else weight.zero
    if zero is not None:
        zero = zero.clone()
        zero[column // weight.format.group(weight.shape[1])] = 0
    return QTensor.from_codes(codes, weight.scale, zero, weight.format, global_scale=weight.global_scale)


def laid_out(problem: Problem, parts: Parts) -> Problem:
    """``problem`` with bias, per-token parameters and the tensors of the weight strided or expanded."""
    if parts == "dense":
        return problem
    place = _strided if parts == "strided" else _expanded
    weight, bias = problem.weight, problem.bias
    # If all codes were equal, a mix-up of rows would go unnoticed.
    tensors = {name: place(t) if name != "data" else _strided(t) for name, t in weight.tensors().items()}
    return replace(
        problem,
        weight=weight.derived(**tensors, quantizer=None),
        bias=None if bias is None else place(bias),
        given={name: place(value) for name, value in problem.given.items()},
    )


def _strided(t: Tensor) -> Tensor:
    """The same values transposed in memory, with their complements between them."""
    across = raw(t.t() if t.dim() == 2 else t)
    between = -across if across.is_floating_point() else ~across
    apart = torch.stack((across, between), dim=-1)[..., 0]
    return (apart.t() if t.dim() == 2 else apart).view(t.dtype)


def _expanded(t: Tensor) -> Tensor:
    """The first value everywhere, stored once."""
    return t[(slice(1),) * t.dim()].expand(t.shape)


def with_strides(x: Tensor, strides: str) -> Tensor:
    """The same values ``(..., K)`` in another order in memory; "expanded": the first row everywhere, stored once."""
    if strides == "columns":
        return torch.stack((x, x), dim=-1)[..., 0]
    if strides == "rows":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if strides == "expanded":
        return x[:1].expand(x.shape)
    return x
