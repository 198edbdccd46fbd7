"""The contract ``grouped_linear``: E linear layers of one shape, each for its own rows of x (mixture of experts)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import Format
from ..formats.bits import has_values
from ..formats.tracing import is_transformed, outside_transforms, unwrapped
from ..weights.activations import Activation, without_parameters
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .base import (
    ROUNDING,
    Case,
    Contract,
    Problem,
    exact_product,
    exact_weight,
    product_error,
    weight_magnitude,
)
from .inputs import BiasDtype, Draw, small_k, small_n


@dataclass(frozen=True)
class GroupedLinearRequest:
    """A request for a kernel for `grouped_linear`.

    **Fields:** ``device`` and ``x_dtype`` of the input; ``out_dtype``; ``experts``: E; ``n``, ``k``: output and input
    features of each weight; ``weight``: the `Format`; ``activation``: None for float activations, or one without
    per-token parameters; ``bias``: whether one is added; ``training``: gradients with respect to x are needed (qcore
    computes them).
    """

    contract: ClassVar[str] = "grouped_linear"

    device: torch.device
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    experts: int
    n: int
    k: int
    weight: Format
    activation: Activation | None
    bias: bool
    training: bool

    @property
    def output(self) -> None:
        """None: results are floats."""
        return

    def signature(self) -> tuple[Any, ...]:
        """The fields that a verdict on a kernel depends on: all but the device and the exact sizes."""
        activation = without_parameters(self.activation)
        form = (min(self.experts, _SMALL_EXPERTS), small_n(self.n), small_k(self.k, self.weight))
        return (self.contract, self.x_dtype, self.out_dtype, str(self.weight), activation, self.bias, form)

    def small(self) -> GroupedLinearRequest:
        """The same request for a few small weights whose sizes have the same remainders."""
        experts = min(self.experts, _SMALL_EXPERTS)
        return replace(self, experts=experts, n=small_n(self.n), k=small_k(self.k, self.weight), training=False)


_SMALL_EXPERTS = 4
_AROUND_ROWS = 64
"""Number of rows with which a layer's own weights are tested."""


@dataclass(frozen=True)
class _Shape:
    """``rows``: of each expert; ``behind``: number of last rows of x that belong to no expert."""

    name: str
    rows: tuple[int, ...]
    n: int
    k: int
    bias: BiasDtype = "none"
    behind: int = 0
    strides: Literal["dense", "columns", "rows"] = "dense"
    weights: str = "skewed"


_SHAPES = (
    _Shape("even", (4, 4, 4, 4), 32, 128),
    _Shape("uneven", (1, 0, 17, 3, 0, 5), 20, 96),
    _Shape("one-expert", (7,), 32, 64),
    _Shape("one-of-many", (0, 0, 9, 0), 16, 64),
    _Shape("no-rows", (0, 0, 0), 16, 64),
    _Shape("one-row-each", (1,) * 8, 48, 256),
    _Shape("many-rows", (70, 3, 65), 48, 160, bias="same"),
    _Shape("many-experts", (1, 0, 2, 1) * 10, 16, 32),
    _Shape("hundreds-of-rows", (200, 3), 16, 64),
    _Shape("bias", (3, 0, 2), 20, 64, bias="same"),
    _Shape("bias-other", (3, 2), 20, 64, bias="other"),
    _Shape("rows-behind", (2, 3), 16, 64, bias="same", behind=3),
    _Shape("k-odd", (3, 1), 8, 77),
    _Shape("n-odd", (2, 5), 13, 64),
    _Shape("strided-columns", (3, 4), 16, 64, strides="columns"),
    _Shape("strided-rows", (3, 4), 16, 64, strides="rows"),
    _Shape("extreme-codes", (3, 4, 1), 20, 160, weights="codes"),
    _Shape("signed-scales", (3, 4, 1), 20, 160, weights="signed"),
    _Shape("zero-groups", (2, 2), 16, 256, weights="zeros"),
    _Shape("narrow-scales", (2, 2), 16, 128, weights="narrow"),
    _Shape("half-scales", (2, 2), 16, 128, weights="half"),
)


_SIZES_DRAWN = _Shape("any", (), 0, 0, bias="same", weights="codes")
"""A shape without sizes, see `_drawn`."""
_EVERY = (*_SHAPES[:1], _SIZES_DRAWN, *_SHAPES[1:])
"""All shapes, in the order of the cases."""
_MOST = (9, 96, 192)
"""The most experts, N and K that are drawn."""
_MOST_ROWS = 20


def _drawn(draw: Draw, shape: _Shape) -> _Shape:
    """The shape with sizes that nobody has chosen: other ones with each seed."""
    experts, n, k = draw.sizes(*_MOST)
    return replace(shape, rows=tuple(size - 1 for size in draw.sizes(*[_MOST_ROWS] * experts)), n=n, k=k)


class GroupedLinearContract(Contract):
    """``y[i] = A(x[i]) @ W[e]^T + bias[e]`` for every row i of expert e.

    - ``x``: ``(T, K)``, rows sorted by expert; ``W``: ``(E, N, K)``; ``bias``: ``(E, N)`` of any float dtype;
      ``offsets``: int32 ``(E,)``, the end of each expert's rows, as in `torch.nn.functional.grouped_mm`: expert e has
      the rows ``offsets[e - 1] .. offsets[e]``. ``y``: ``(T, N)`` of ``out_dtype``. x and bias may have any strides.
    - Experts without rows and T = 0 are valid. Rows after the last end belong to no expert: their result is 0.
    - Each row is computed as by `linear`: dynamic activations per row, accumulation in float32 or better, the bias
      added before the single rounding to ``out_dtype``.
    - Errors: ends that descend or are outside 0..T, checked on the CPU; elsewhere the kernel asserts
      them on the device.
    """

    name: ClassVar[str] = "grouped_linear"
    request: ClassVar[type] = GroupedLinearRequest

    def reference(self, problem: Problem) -> Tensor:
        result = torch.zeros(problem.x.shape[0], problem.request.n, dtype=torch.float64)
        for rows, part in _parts(problem):
            y = exact_product(part, part.x, exact_weight(part.weight))
            result[rows] = y if part.bias is None else y + part.bias.double()
        return result

    def allowed(self, problem: Problem) -> Tensor:
        out = problem.request.out_dtype
        allowed = torch.full(
            (problem.x.shape[0], problem.request.n), torch.finfo(out).smallest_normal, dtype=torch.float64
        )
        exact = self.reference(problem).abs()
        for rows, part in _parts(problem):
            error = product_error(part, part.x, exact_weight(part.weight), weight_magnitude(part.weight))
            allowed[rows] += error + 2 * ROUNDING[out] * (exact[rows] + error)
        return allowed

    def request_for(
        self, scheme: Scheme, device: torch.device, dtype: torch.dtype, n: int, k: int
    ) -> GroupedLinearRequest:
        return GroupedLinearRequest(
            device, dtype, dtype, _SMALL_EXPERTS, n, k, scheme.weight, scheme.activation, False, False
        )

    def cases(self, schemes: Iterable[Scheme], dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
        dtypes = tuple(dtypes)
        for scheme in filter(is_for_experts, schemes):
            for dtype in dtypes:
                for shape in _EVERY:
                    yield self._case(scheme, dtype, shape)

    def _case(self, scheme: Scheme, dtype: torch.dtype, shape: _Shape) -> Case:
        def make(generator: torch.Generator, device: torch.device) -> Problem:
            draw = Draw(generator)
            sized = shape if shape.n else _drawn(draw, shape)
            request = self.request_for(draw.fill(scheme), device, dtype, sized.n, sized.k)
            request = replace(request, experts=len(sized.rows), bias=shape.bias != "none")
            return _problem(draw, request, sized, scheme.quantizer)

        name = f"grouped_linear[{scheme.blank()}-{str(dtype).removeprefix('torch.')}-{shape.name}]"
        return Case(name, self.name, str(scheme.blank()), make)

    def probe(self, request: Any, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        e = request.experts
        counts = ((1,) * e, tuple(3 * (i % 3) for i in range(e)), tuple(40 * (i == e // 2) for i in range(e)))
        bias: BiasDtype = "same" if request.bias else "none"
        return [_problem(draw, request, _Shape("probe", rows, request.n, request.k, bias)) for rows in counts]

    def around(self, request: Any, weight: QTensor, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        rows = tuple(_AROUND_ROWS * (i == 0) + (i % 2) for i in range(request.experts))
        x = draw.activations((sum(rows), request.k), request.x_dtype, "normal", "dense")
        bias = draw.normal(request.experts, request.n) if request.bias else None
        return [Problem(request, x, weight, bias, {"offsets": _ends(rows)})]


def is_for_experts(scheme: Scheme) -> bool:
    """Whether `grouped_linear` supports a scheme: no per-token parameters, a float result."""
    return not getattr(scheme.activation, "per_token", False) and scheme.output is None


def _ends(rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).cumsum(0).to(torch.int32)


def _problem(draw: Draw, request: GroupedLinearRequest, shape: _Shape, quantizer: str = "") -> Problem:
    weights = [draw.weight(shape.n, shape.k, request.weight, shape.weights, quantizer) for _ in shape.rows]
    total = sum(shape.rows) + shape.behind
    x = draw.activations((total, shape.k), request.x_dtype, "normal", shape.strides)
    bias = draw.bias((len(shape.rows), shape.n), shape.bias, request.x_dtype)
    return Problem(request, x, QTensor.stack(weights), bias, {"offsets": _ends(shape.rows)})


def _parts(problem: Problem) -> Iterator[tuple[slice, Problem]]:
    """The rows of each expert that has any, and the equivalent problem of `linear`."""
    for expert, rows in expert_rows(problem.given["offsets"].tolist()):
        bias = None if problem.bias is None else problem.bias[expert]
        yield rows, Problem(problem.request, problem.x[rows], problem.weight[expert], bias)


def expert_rows(ends: Iterable[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, in order, and their rows of x; ``ends``: the offsets as integers."""
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            yield expert, slice(start, end)
        start = max(start, end)


def read_ends(offsets: Tensor) -> list[int]:
    """The values of offsets ``(E,)``, also within a transform of torch.func, where torch 2.9 does not read them."""
    with outside_transforms() if is_transformed() else nullcontext():
        found: list[int] = unwrapped(offsets).tolist()
    return found


def check_offsets(offsets: Tensor, experts: int, rows: int) -> None:
    """Raise `FormatError` unless ``offsets`` are int32 ``(E,)`` ends that ascend within 0..T.

    Their values are read on the CPU only. On an accelerator that would take longer than a small product; there, the
    kernel that reads them has to assert that they ascend, see `GroupedLinearContract`.
    """
    given: Any = offsets
    if not isinstance(given, Tensor) or given.dtype != torch.int32 or tuple(given.shape) != (experts,):
        have = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise FormatError(f"offsets are {have}; they must be int32 ({experts},): the end of each expert's rows.")
    if offsets.device.type == "cpu" and has_values(offsets):
        check_ends(read_ends(offsets), rows)


def check_ends(ends: Sequence[int], rows: int) -> None:
    """Raise `FormatError` unless ``ends``, the values of offsets, ascend within 0..T."""
    if any(end < start for start, end in pairwise((0, *ends, rows))):
        raise FormatError(
            f"offsets {list(ends[:8])} must ascend within 0..{rows}: they are the ends of each expert's rows.\n"
            f"Sort the rows of x by expert first."
        )


GROUPED_LINEAR = GroupedLinearContract()
