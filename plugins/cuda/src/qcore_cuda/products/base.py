"""The interface of a product's kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from qcore_triton.codes import Codes
from qcore_triton.weights import ROWS, Weight

from ..costs import Work
from ..problem import GemmProblem
from ..runtime.device import Device

C = TypeVar("C", bound=tuple[Any, ...])
"""A kernel's configuration: a named tuple of plain values, so that a table can hold it."""


class Product(ABC, Generic[C]):
    """A kernel that multiplies."""

    name: ClassVar[str]
    """Its name in records of measurements."""
    config: ClassVar[type[Any]]
    """The class of its configurations."""
    small: ClassVar[bool] = False
    """Whether it is the fastest for small weights only: its estimates count only next to those of other kernels."""

    @abstractmethod
    def serves(self, device: Device, problem: GemmProblem) -> bool:
        """Whether the kernel supports a problem."""

    @abstractmethod
    def rule(self, device: Device, problem: GemmProblem) -> C | None:
        """A good configuration for a problem that it supports, by analysis; None if another kernel is better."""

    @abstractmethod
    def candidates(self, device: Device, problem: GemmProblem) -> Iterable[C]:
        """Configurations that ``qcore tune`` measures for a supported problem, if this may be the fastest kernel."""

    @abstractmethod
    def work(self, device: Device, problem: GemmProblem, config: C) -> Work:
        """The work of a launch, for `Cost.microseconds`."""

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        """Values that each further launch copies, because rows of x or of the result do not begin on 16 bytes."""
        del problem
        return ()

    def apart(self, device: Device, problem: GemmProblem, config: C) -> bool:
        """Whether a configuration is computed in another way than a simpler one, for this problem."""
        del device, problem, config
        return True

    def adapted(self, problem: GemmProblem, config: C) -> Choice | None:
        """The choice for a configuration, which may have been measured for another size; None if it cannot run."""
        del problem
        return Choice(self, config)


def decoding(weight: Weight) -> dict[str, Any]:
    """Constexprs of kernels for float activations: what codes stand for, and whether there is a factor."""
    return {"ELEMENT": weight.element, "FACTOR": weight.factor is not None}


class FloatProduct(Product[C]):
    """A product with float activations."""

    @abstractmethod
    def launch(
        self, x: Tensor, weight: Weight, bias: Tensor | None, device: Device, problem: GemmProblem, config: C
    ) -> Tensor:
        """``x @ W^T + bias``: x ``(M, K)`` of any strides, M >= 1, to ``(M, N)`` of ``problem.out_dtype``."""


class Operands(NamedTuple):
    """The weight of an int8 product, and the inputs of its epilogue.

    **Fields:** ``weight``; ``sums``: of its codes, int32 ``(G, pitch_of(N))``, needed if x has a zero point; ``bias``;
    ``out``: scale and zero point of int8 results, numbers or tensors ``(M,)``.
    """

    weight: Weight
    sums: Tensor | None
    bias: Tensor | None
    out: Any


class Int8Product(Product[C]):
    """A product of int8 codes, int32 sums of which are scaled."""

    wants_totals: ClassVar[bool] = True
    """Whether quantizing has to sum the codes of each row, if the weight has a zero point per channel."""
    unaligned: ClassVar[int | None] = None
    """The most rows of a result that it stores if they do not begin on 16 bytes; None: any number."""
    codes: ClassVar[torch.dtype] = torch.int8
    """The dtype that holds the codes of x which it takes."""

    def order(self, weight: Weight) -> int:
        """The order of columns in which it takes codes of x, see `Codes.order`."""
        return weight.order

    def pads(self, problem: GemmProblem) -> bool:
        """Whether it has to get a weight of `pitch_of` N rows: storing rows that begin anywhere takes as long again."""
        return self.unaligned is not None and problem.rows > self.unaligned and problem.n % ROWS > 0

    def copies(self, problem: GemmProblem) -> tuple[int, ...]:
        return (problem.rows * problem.n,) if self.pads(problem) else ()

    def fuses(self, x: Tensor, device: Device, problem: GemmProblem) -> bool:
        """Whether `launch_floats` quantizes x by itself."""
        del x, device, problem
        return False

    @abstractmethod
    def launch(self, codes: Codes, operands: Operands, device: Device, problem: GemmProblem, config: C) -> Tensor:
        """``(M, N)`` of ``problem.out_dtype``: codes times the weight, scaled, plus bias, rounded once; M >= 1."""

    def launch_floats(
        self, x: Tensor, mode: Any, operands: Operands, device: Device, problem: GemmProblem, config: C
    ) -> Tensor:
        """`launch`, for x that it `fuses`, quantized as ``mode`` (`qcore_triton.codes.Mode`) says."""
        raise NotImplementedError


class Choice(NamedTuple):
    """A kernel and a configuration for it."""

    product: Product[Any]
    config: Any
