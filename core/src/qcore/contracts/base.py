"""The parts shared by all contracts: requests, problems, verdicts, and the error bound of a quantized product."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..formats import Format, ZeroPoint
from ..weights.activations import (
    FP8_MAX,
    DynamicFP8,
    DynamicInt8,
    FP8Activation,
    OutputInt8,
    StaticFP8,
    StaticInt8,
    dynamic_parameters,
    fp8_scale,
    quantize_fp8,
)
from ..weights.qtensor import QTensor, dequantize_codes
from ..weights.schemes import Scheme

GIVEN_NAMES = ("x_scale", "x_zero_point", "out_scale", "out_zero_point")
"""Keyword arguments of a kernel call that carry per-token parameters, each of shape ``(tokens,)``; only for requests
whose activation or output is ``per_token``."""

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-23}
"""Half a unit in the last place, relative (a whole one for float32; float64 results need only float32's precision)."""
_FLOAT32_SUM, _FEW_TERMS = 2.0**-20, 256
"""Relative error allowed to a float32 accumulation, relative to the sum of absolute values."""
_FP8_SUM = 2.0**-9
"""Error allowed to a sum of products of e4m3 values, relative to the root of the sum of their squares.

The tensor cores of Hopper and Ada add groups of such products with 13 bits below the largest of them; sums of 128 are
added in float32 (two-level accumulation). On an H200 errors reach 0.7 of this in half a million results.
"""
_NEAR_TIE = 2.0**-12
"""Codes whose exact value is this close to a half may round either way: both division and reciprocal are correct."""


class Request(Protocol):
    """The interface of every request, whatever its contract."""

    contract: ClassVar[str]

    @property
    def device(self) -> torch.device: ...
    @property
    def out_dtype(self) -> torch.dtype: ...
    @property
    def weight(self) -> Format: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    def signature(self) -> tuple[Any, ...]: ...
    def small(self) -> Request: ...


@dataclass(frozen=True)
class Problem:
    """Inputs with a known answer. Tensors are on CPU.

    ``given``: keyword arguments of the kernel's call: per-token parameters by `GIVEN_NAMES`, and ``offsets`` of
    ``grouped_linear``.
    """

    request: Any
    x: Tensor
    weight: QTensor
    bias: Tensor | None = None
    given: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Problem:
        """A copy of the inputs on ``device``, with their strides."""
        return replace(
            self,
            x=_keep_strides(self.x, device),
            weight=self.weight.map(lambda t: _keep_strides(t, device)),
            bias=None if self.bias is None else _keep_strides(self.bias, device),
            given={name: _keep_strides(value, device) for name, value in self.given.items()},
        )


def _keep_strides(x: Tensor, device: torch.device) -> Tensor:
    # An expanded dimension is stored once, so nothing may be written to it more than once.
    once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
    moved = torch.empty_strided(once.shape, once.stride(), dtype=x.dtype, device=device)
    return moved.copy_(once).expand(x.shape)


@dataclass(frozen=True)
class Case:
    """One test case: ``build(seed, device)`` creates its `Problem`."""

    id: str
    contract: str
    scheme: str
    make: Callable[[torch.Generator, torch.device], Problem] = field(repr=False)

    def build(self, seed: int, device: torch.device | str = "cpu") -> Problem:
        """Fresh inputs (on CPU) for a request on ``device``; the same seed gives the same numbers."""
        # Hashed together, because torch's CPU generator uses only the low 32 bits of a seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {self.id}".encode()))
        return self.make(generator, torch.device(device))


@dataclass(frozen=True)
class Verdict:
    """Whether an output is within tolerance, and by how much: ``worst`` is error / allowed, wrong if above 1.

    ``where``: the position of the worst element, which ``message`` begins with; None if no elements were compared.
    """

    ok: bool
    worst: float
    message: str
    where: tuple[int, ...] | None = None


class Contract(ABC):
    """One op: its hook, its reference, its tolerance and its cases."""

    name: ClassVar[str]
    request: ClassVar[type]

    @property
    def hook(self) -> str:
        """The name of the hook that a plugin implements for this contract."""
        return f"qcore_{self.name}"

    @abstractmethod
    def reference(self, problem: Problem) -> Tensor:
        """The exact result: float64, or int8 codes if the request has int8 output."""

    @abstractmethod
    def allowed(self, problem: Problem) -> Tensor:
        """The largest error allowed, elementwise, float64; codes for int8 output."""

    @abstractmethod
    def cases(self, schemes: Iterable[Scheme], dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
        """Every case of the contract for these schemes and activation dtypes."""

    @abstractmethod
    def request_for(self, scheme: Scheme, device: torch.device, dtype: torch.dtype, n: int, k: int) -> Any:
        """A plain request of this contract, for ``explain`` and ``tune``."""

    @abstractmethod
    def probe(self, request: Any, seed: int = 0) -> list[Problem]:
        """Small problems for a request, which a kernel must solve correctly before it is used."""

    def is_probed_whole(self, request: Any) -> bool:
        """Whether the problems of `probe` are as large as the weight of ``request``."""
        small = request.small()
        return (small.n, small.k) == (request.n, request.k)

    @abstractmethod
    def around(self, request: Any, weight: QTensor, seed: int = 0) -> list[Problem]:
        """Problems with a layer's own ``weight``, as large as a call of the layer; judged by `sampling.sampled`.

        ``weight`` may be on any device; x and bias are on CPU.
        """

    def judge(self, problem: Problem, result: Any) -> Verdict:
        """Compare a kernel's result with the reference: type, shape, dtype, device, then every element."""
        expected = self.reference(problem)
        wrong = wrong_form(problem.request, tuple(expected.shape), result)
        if wrong:
            return Verdict(False, float("inf"), wrong)
        if not expected.numel():
            return Verdict(True, 0.0, "empty")
        return _compare(expected, self.allowed(problem), result.detach().cpu(), problem.request.out_dtype)


def wrong_form(request: Any, shape: tuple[int, ...], result: Any) -> str:
    """Describe a wrong type, shape, dtype or device of a result, before its values are read; empty if all are right."""
    if not isinstance(result, Tensor):
        return f"returned {type(result).__name__} instead of a tensor"
    if tuple(result.shape) != shape:
        return f"returned shape {tuple(result.shape)} instead of {shape}"
    if result.dtype != request.out_dtype:
        return f"returned dtype {result.dtype} instead of {request.out_dtype}"
    if result.device.type != request.device.type:
        return f"returned a tensor on {result.device} instead of {request.device}"
    return ""


def _compare(expected: Tensor, allowed: Tensor, result: Tensor, dtype: torch.dtype) -> Verdict:
    actual = result.double()
    rounded = expected if dtype == torch.int8 else expected.to(dtype).double()
    # If rounding to the result's dtype overflows, Inf is the correct result, and both sides must have it.
    same = (actual == rounded) | (actual.isnan() & rounded.isnan()) | _overflows(expected, allowed, actual, dtype)
    error = torch.where(same, 0.0, (actual - expected).abs())
    ratio = torch.where(same, 0.0, error / allowed).nan_to_num(nan=float("inf"), posinf=float("inf"))
    worst = float(ratio.max())
    where = position(int(ratio.argmax()), ratio.shape)
    text = (
        f"at {where}: got {float(actual[where]):.6g}, expected {float(expected[where]):.6g}, "
        f"allowed error {float(allowed[where]):.3g}; {int((ratio > 1).sum())} of {ratio.numel()} elements are off"
    )
    return Verdict(worst <= 1.0, worst, text, where)


def position(flat: int, shape: Iterable[int]) -> tuple[int, ...]:
    """The indices of element number ``flat``. `torch.unravel_index` imports sympy at its first call: 0.25 s."""
    position: tuple[int, ...] = ()
    for size in reversed(tuple(shape)):
        flat, place = divmod(flat, size)
        position = (place, *position)
    return position


def _overflows(expected: Tensor, allowed: Tensor, actual: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements that are Inf and for which a sum within the allowed error would have rounded to Inf, too."""
    if not dtype.is_floating_point:
        return torch.zeros_like(actual, dtype=torch.bool)
    furthest = (expected + allowed * expected.sign()).to(dtype).double()
    return actual.isinf() & (actual == furthest)


def exact_weight(weight: QTensor) -> Tensor:
    """The dense weight in float64, from codes, scales and zero points."""
    return weight.dequantize(torch.float64)


def weight_magnitude(weight: QTensor) -> Tensor:
    """``(|q| + |z|) * s`` (or ``|q| s + |z|``) in float64: a kernel's rounding errors are relative to this."""
    k = weight.shape[1]
    scale, zero = weight.scales(torch.float64).abs(), weight.integer_zero()
    added = weight.zero.double().abs() if weight.format.zero is ZeroPoint.FLOAT and weight.zero is not None else None
    minus = None if zero is None else -zero.double().abs()
    return dequantize_codes(weight.values().double().abs(), scale, minus, added, weight.format.group(k))


@dataclass(frozen=True)
class Quantized:
    """Exactly quantized activations of shape ``(rows, K)``: codes (or fp8 values) and zero point in float64.

    ``slack``: how far a code may be from ``codes``, in its own unit: near a tie the distance to the next code, else 0.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    slack: Tensor

    def values(self) -> Tensor:
        return (self.codes - self.zero) * self.scale


def quantize_rows(problem: Problem, rows: Tensor) -> Quantized | None:
    """Quantize ``rows`` (rows, K) as requested, in float32 as the contract specifies; None for float activations."""
    activation = problem.request.activation
    if activation is None:
        return None
    if isinstance(activation, (DynamicFP8, StaticFP8)):
        return _quantize_fp8_rows(activation, rows)
    if isinstance(activation, DynamicInt8):
        scale, zero = dynamic_parameters(rows, activation.symmetric)
    else:
        scale, zero = _given_parameters(activation, problem.given, "x", rows)
    z = torch.zeros_like(scale) if zero is None else zero
    if rows.dtype == torch.int8:
        return Quantized(rows.double(), scale.double(), z.double(), torch.zeros(rows.shape, dtype=torch.float64))
    steps = rows.float() / scale
    codes = (torch.round(steps) + z).clamp(-128, 127).double()
    near = _near_tie(steps)
    if activation == DynamicInt8(symmetric=False) and rows.shape[-1]:
        # A zero point that may round either way decides whether the outermost codes are clipped, by one step.
        near |= _near_tie(rows.float().amin(-1, keepdim=True).clamp_max(0) / scale) & (codes.abs() >= 127)
    return Quantized(codes, scale.double(), z.double(), near.double())


def _quantize_fp8_rows(activation: FP8Activation, rows: Tensor) -> Quantized:
    scale = fp8_scale(activation, rows).expand(rows.shape)
    codes, ratio = quantize_fp8(rows, scale).double(), (rows.float() / scale).double()
    # Neighbouring values differ by one unit in the last place: 3 bits of mantissa, and the smallest step is 2**-9.
    step = torch.exp2(torch.floor(torch.log2(ratio.abs().clamp_min(2.0**-6))) - 3)
    near = ((ratio.abs() / step - torch.floor(ratio.abs() / step)) - 0.5).abs() < _NEAR_TIE
    # The two sides of a tie differ by up to one step; beyond the largest value there is no tie.
    slack = torch.where(near & (ratio.abs() < FP8_MAX), step, 0.0)
    return Quantized(codes, scale.double(), torch.zeros_like(codes), slack)


def _near_tie(steps: Tensor) -> Tensor:
    return ((steps - torch.floor(steps)) - 0.5).abs() < _NEAR_TIE


def _given_parameters(
    part: StaticInt8 | OutputInt8, given: dict[str, Tensor], prefix: str, rows: Tensor
) -> tuple[Tensor, Tensor]:
    if part.per_token:
        return given[f"{prefix}_scale"].float().reshape(-1, 1), given[f"{prefix}_zero_point"].float().reshape(-1, 1)
    scale = torch.full((rows.shape[0], 1), float(part.scale or 1.0), dtype=torch.float32)
    return scale, torch.full_like(scale, float(part.zero_point))


def exact_product(problem: Problem, rows: Tensor, weight: Tensor) -> Tensor:
    """``A(rows) @ weight^T`` in float64; ``rows`` (rows, K), ``weight`` (N, K) dense."""
    quantized = quantize_rows(problem, rows)
    values = rows.double() if quantized is None else quantized.values()
    return values @ weight.t()


def product_error(problem: Problem, rows: Tensor, dense: Tensor, magnitude: Tensor) -> Tensor:
    """The error allowed to ``A(rows) @ W^T`` before the result is rounded, ``(rows, N)`` float64.

    A float32 sum may be off by 2**-20 of the sum of absolute values, times sqrt(K / 256) for more than 256 terms: the
    rounding errors of a sequential sum add up like a random walk. Float activations narrower than float32 may be
    multiplied by a weight rounded to their own dtype: such errors are independent, hence the root of the sum of
    squares. So are those of e4m3 activations in the accumulators of tensor cores, see `_FP8_SUM`.
    Quantized activations whose exact value lies next to a tie may take either code; the difference is one step
    times the weight.
    """
    quantized = quantize_rows(problem, rows)
    summing = float32_sum_error(rows.shape[-1])
    if quantized is None:
        values = rows.double()
        narrow = 4 * ROUNDING[rows.dtype] * ((values**2) @ (magnitude**2).t()).sqrt()
        return narrow + summing * (values.abs() @ magnitude.t())
    sums = ((quantized.codes.abs() + quantized.zero.abs()) * quantized.scale) @ magnitude.t()
    ties = (quantized.slack * quantized.scale) @ dense.abs().t()
    if isinstance(problem.request.activation, (DynamicFP8, StaticFP8)):
        sums = sums + (_FP8_SUM / summing) * ((quantized.values() ** 2) @ (magnitude**2).t()).sqrt()
    return summing * sums + ties


def float32_sum_error(terms: int) -> float:
    """The error allowed to a float32 sum, relative to the sum of absolute values."""
    return _FLOAT32_SUM * max(1.0, math.sqrt(terms / _FEW_TERMS))


def finish_reference(problem: Problem, y: Tensor) -> Tensor:
    """Requantize ``y`` (rows, N) if the request has int8 output."""
    output = problem.request.output
    if output is None:
        return y
    scale, zero = _given_parameters(output, problem.given, "out", y)
    return (torch.round(y / scale.double()) + zero.double()).clamp(-128, 127).to(torch.int8)


def finish_allowed(problem: Problem, y: Tensor, error: Tensor) -> Tensor:
    """The error allowed to the finished result: one more rounding, or one code plus the error in codes.

    The rounding error of a float depends on the computed value, which may differ from ``y`` by the error before it.
    """
    request = problem.request
    if request.output is None:
        rounded = 2 * ROUNDING[request.out_dtype] * (y.abs() + error)
        return error + rounded + torch.finfo(request.out_dtype).smallest_normal
    scale, _ = _given_parameters(request.output, problem.given, "out", y)
    return 1.0 + torch.floor(error / scale.double())
