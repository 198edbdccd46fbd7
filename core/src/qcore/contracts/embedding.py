"""The contract ``embedding``: gather rows of a quantized table and dequantize only those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import Format
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme
from .base import ROUNDING, Case, Contract, Problem, exact_weight, weight_magnitude
from .inputs import Draw, Parts, laid_out, small_k, small_n, with_strides


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for a kernel for `embedding`.

    **Fields:** ``device``; ``out_dtype``; ``num_embeddings``: V, rows of the table; ``embedding_dim``: D;
    ``weight``: the `Format`, with one scale per row or per group of D.
    """

    contract: ClassVar[str] = "embedding"

    device: torch.device
    out_dtype: torch.dtype
    num_embeddings: int
    embedding_dim: int
    weight: Format

    @property
    def n(self) -> int:
        """V: the rows of the weight."""
        return self.num_embeddings

    @property
    def k(self) -> int:
        """D: the columns of the weight."""
        return self.embedding_dim

    def signature(self) -> tuple[Any, ...]:
        """The fields that a verdict on a kernel depends on: all but the device and the exact sizes."""
        form = (small_n(self.n), small_k(self.k, self.weight))
        return (self.contract, self.out_dtype, str(self.weight), form)

    def small(self) -> EmbeddingRequest:
        """The same request for a small table whose sizes have the same remainders."""
        return replace(self, num_embeddings=small_n(self.n), embedding_dim=small_k(self.k, self.weight))


INDEX_DTYPES = (torch.int64, torch.int32)
"""The dtypes of indices."""
_LOOKUPS = 256
"""Rows that are looked up in a layer's own table."""


@dataclass(frozen=True)
class _Shape:
    name: str
    indices: tuple[int, ...]
    v: int
    d: int
    weights: str = "skewed"
    dtype: torch.dtype = torch.int64
    parts: Parts = "dense"


_SHAPES: tuple[_Shape, ...] = (
    _Shape("one", (1,), 20, 64),
    _Shape("scalar", (), 20, 64),
    _Shape("empty", (0,), 20, 64),
    _Shape("batched", (3, 7), 33, 96),
    _Shape("odd-d", (5,), 12, 77),
    _Shape("d-5", (5,), 3, 5),
    _Shape("ragged", (6,), 16, 168),
    _Shape("many", (300,), 129, 64),
    _Shape("very-many", (2100,), 40, 32),
    _Shape("int32-indices", (9,), 20, 64, dtype=torch.int32),
    _Shape("extreme-codes", (9,), 20, 160, weights="codes"),
    _Shape("signed-scales", (9,), 20, 160, weights="signed"),
    _Shape("zero-groups", (9,), 20, 128, weights="zeros"),
    _Shape("narrow-scales", (9,), 20, 128, weights="narrow"),
    _Shape("half-scales", (9,), 20, 128, weights="half"),
    _Shape("strided-parts", (4, 3), 20, 160, parts="strided"),
    _Shape("expanded-parts", (4, 3), 20, 160, dtype=torch.int32, parts="expanded"),
)


_SIZES_DRAWN = _Shape("any", (), 0, 0, weights="codes")
"""A shape without sizes, see `_drawn`."""
_EVERY = (*_SHAPES[:1], _SIZES_DRAWN, *_SHAPES[1:])
"""All shapes, in the order of the cases."""
_MOST = (70, 160, 320)
"""The largest number of indices, V and D that are drawn."""


def _drawn(draw: Draw, shape: _Shape) -> _Shape:
    """The shape with sizes that nobody has chosen: other ones with each seed."""
    rows, v, d = draw.sizes(*_MOST)
    return replace(shape, indices=(rows,), v=v, d=d)


class EmbeddingContract(Contract):
    """``y = W[indices]`` with W the dequantized table ``(V, D)``.

    - ``indices``: int64 or int32 of any shape and strides; ``y``: ``(*indices.shape, D)`` of ``out_dtype``.
    - Only the requested rows are dequantized; each value is computed in float32 and rounded once.
    - Errors: an index outside 0..V-1 raises `IndexError` (on accelerators, a device-side assertion); indices of another
      dtype raise `FormatError`.
    """

    name: ClassVar[str] = "embedding"
    request: ClassVar[type] = EmbeddingRequest

    def reference(self, problem: Problem) -> Tensor:
        return exact_weight(problem.weight)[problem.x.long()]

    def allowed(self, problem: Problem) -> Tensor:
        out = problem.request.out_dtype
        rounding = 2 * ROUNDING[out] * self.reference(problem).abs()
        computing = 2.0**-20 * weight_magnitude(problem.weight)[problem.x.long()]
        return rounding + computing + torch.finfo(out).smallest_normal

    def request_for(self, scheme: Scheme, device: torch.device, dtype: torch.dtype, n: int, k: int) -> EmbeddingRequest:
        return EmbeddingRequest(device, dtype, n, k, scheme.weight)

    def cases(self, schemes: Iterable[Scheme], dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
        dtypes = tuple(dtypes)
        for scheme in (s for s in schemes if s.activation is None):
            for dtype in dtypes:
                for shape in _EVERY:
                    yield self._case(scheme, dtype, shape)

    def _case(self, scheme: Scheme, dtype: torch.dtype, shape: _Shape) -> Case:
        def make(generator: torch.Generator, device: torch.device) -> Problem:
            draw = Draw(generator)
            sized = shape if shape.v else _drawn(draw, shape)
            weight = draw.weight(sized.v, sized.d, scheme.weight, shape.weights, scheme.quantizer)
            request = self.request_for(scheme, device, dtype, sized.v, sized.d)
            problem = _problem(draw, request, weight, sized.indices, shape.dtype)
            strides = {"dense": "dense", "strided": "rows", "expanded": "expanded"}[shape.parts]
            return laid_out(replace(problem, x=with_strides(problem.x, strides)), shape.parts)

        name = f"embedding[{scheme}-{str(dtype).removeprefix('torch.')}-{shape.name}]"
        return Case(name, self.name, str(scheme), make)

    def probe(self, request: Any, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        weight = draw.weight(request.n, request.k, request.weight)
        return [_problem(draw, request, weight, (2, 3) if request.n else (0,), torch.int64)]

    def around(self, request: Any, weight: QTensor, seed: int = 0) -> list[Problem]:
        draw = Draw(torch.Generator().manual_seed(seed))
        problem = _problem(draw, request, weight, (_LOOKUPS,), torch.int64)
        problem.x[:2] = torch.tensor([0, request.n - 1])
        return [problem]


def _problem(
    draw: Draw, request: EmbeddingRequest, weight: QTensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Problem:
    return Problem(request, draw.whole(0, max(request.n, 1) - 1, *shape).to(dtype), weight)


def check_index_dtype(indices: Tensor) -> None:
    """Raise `FormatError` for indices that are not int64 or int32; some kernels would misread their bytes."""
    if indices.dtype not in INDEX_DTYPES:
        raise FormatError(f"embedding: indices have dtype {indices.dtype}; they must be int64 or int32.")


def check_indices(indices: Tensor, size: int) -> None:
    """Raise `IndexError` for an index outside ``0..size-1``: a kernel would read out of bounds.

    On an accelerator this is a device-side assertion, so that nothing waits for the device. Raises `FormatError` for
    indices of a dtype other than int64 or int32.
    """
    check_index_dtype(indices)
    if indices.device.type != "cpu":
        torch._assert_async(((indices >= 0) & (indices < size)).all())  # noqa: SLF001 - torch's own way for devices
    elif indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= size:
            raise IndexError(
                f"embedding: indices span {low}..{high}, but the table has {size} rows.\nThey must be in 0..{size - 1}."
            )


EMBEDDING = EmbeddingContract()
