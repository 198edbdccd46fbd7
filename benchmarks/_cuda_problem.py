"""One weight in all the forms that the CUDA benchmark compares, and who takes part in the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import qcore
from qcore.nn import QuantizedLinear

Run = Callable[[Tensor], Tensor]

BF16 = torch.bfloat16
DEVICE = "cuda"
OURS = "cuda."
"""What the names of the kernels under test start with."""
GROUP = 128
SCHEMES = ("w4a16-g128", "w4a16-g128-asym", "w8a16", "w4a8-g128", "w8a8")
CACHES = 4
"""Copies of a weight take this many times the second-level cache together."""
MOST_COPIES = 64
SHARE = 16
"""A contender's copies take at most one part in so many of the free memory."""


@dataclass
class Contender:
    """Somebody who computes the product, ready to be called.

    **Fields:** ``name``; ``scheme``: the one it competes with, empty for bfloat16; ``runs``: one call per copy of the
    weight; ``nbytes``: of one copy; ``dense``: its weight as float32 ``(N, K)``, to judge its results by; ``rows``: the
    row counts it can serve (None: all).
    """

    name: str
    scheme: str
    runs: list[Run]
    nbytes: int
    dense: Callable[[], Tensor]
    rows: Callable[[int], bool]


class UnservedError(Exception):
    """No kernel of the plugin serves this."""


class Problem:
    """A weight ``(N, K)`` of normally distributed numbers, quantized once for everybody."""

    def __init__(self, k: int, n: int) -> None:
        self.k, self.n = k, n
        generator = torch.Generator(DEVICE).manual_seed(31 * k + n)
        self.weight = torch.randn(n, k, device=DEVICE, dtype=BF16, generator=generator).mul_(0.02)
        self._quantized: dict[str, qcore.QTensor] = {}

    def quantized(self, scheme: str) -> qcore.QTensor:
        """The weight in the format of ``scheme``: absmax, or min and max where it has a zero point."""
        wanted = str(qcore.Scheme.parse(scheme).weight)
        if wanted not in self._quantized:
            rule = "minmax" if "asym" in wanted else "absmax"
            self._quantized[wanted] = qcore.quantize(self.weight, wanted, rule)
        return self._quantized[wanted]

    def x(self, rows: int) -> Tensor:
        """Activations ``(rows, K)``."""
        generator = torch.Generator(DEVICE).manual_seed(rows)
        return torch.randn(rows, self.k, device=DEVICE, dtype=BF16, generator=generator)

    def contender(
        self,
        name: str,
        scheme: str,
        tensors: Sequence[Tensor],
        bind: Callable[..., Run],
        dense: Callable[[], Tensor] | None = None,
        rows: Callable[[int], bool] = lambda _: True,
    ) -> Contender:
        """Whoever computes ``bind(*tensors)(x)``; judged by our weight of ``scheme`` where no other is given."""
        size = nbytes(tensors)
        copies = [tensors, *([t.clone() for t in tensors] for _ in range(copies_of(size) - 1))]
        judge = dense or (lambda: self.quantized(scheme).dequantize(torch.float32))
        return Contender(name, scheme, [bind(*own) for own in copies], size, judge, rows)

    def bfloat16(self) -> Contender:
        """What everybody is compared with."""
        return self.contender("bf16 F.linear", "", [self.weight], lambda w: lambda x: F.linear(x, w), self.weight.float)

    def ours(self, scheme: str) -> Contender:
        """The kernel that serves ``scheme`` here; raises `UnservedError` where it is not one of the plugin cuda."""
        weight = self.quantized(scheme)
        kernel = QuantizedLinear.from_qtensor(weight, scheme=scheme, dtype=BF16).decision.kernel
        if not kernel.name.startswith(OURS):
            raise UnservedError(
                f"{scheme} is served by {kernel.name}: python -m qcore explain {scheme} --device cuda says why"
            )
        packed = kernel.pack(weight)

        def bind(*tensors: Tensor) -> Run:
            own = dict(zip(packed, tensors, strict=True))
            return lambda x: kernel(x, own, None)

        return self.contender(scheme, scheme, list(packed.values()), bind)

    def error(self, who: Contender, x: Tensor, y: Tensor) -> float:
        """Relative error of three rows of ``y`` against a product in float64 with that contender's own weight."""
        rows = sorted({0, len(x) // 2, len(x) - 1})
        wide, dense = x[rows].double(), who.dense()
        expected = torch.cat([wide @ part.double().t() for part in dense.split(4096)], dim=1)
        return float((y[rows].double() - expected).norm() / expected.norm())


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def copies_of(size: int) -> int:
    """How many copies of a weight exceed the cache by far, as far as there is memory for them."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    room = torch.cuda.mem_get_info()[0] // (SHARE * size)
    return max(2, min(math.ceil(CACHES * cache / size), room, MOST_COPIES))
