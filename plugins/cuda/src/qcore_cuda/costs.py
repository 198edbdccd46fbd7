"""The time of a configuration, estimated for sizes that nobody measured.

A kernel's programs run in rounds, as many at a time as multiprocessors hold. An estimate is a sum, the coefficients of
which ``benchmarks/cuda_tables.py`` fits to measurements of a dozen sizes, none negative: a constant, a time per round,
a time per step along K of a round, a time per weight, which is the memory's share, and of kernels that share tiles a
time per part of a tile that has to be added up::

    microseconds = c0 + c1 * rounds + c2 * rounds * steps + c3 * N * K / 10**6 + c4 * parts

Everything here is a pure function of sizes, so that tests can check choices for a dense grid of sizes without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from qcore_triton.weights import INTEGER

from .problem import GemmProblem

_LAUNCH = 2.0
_COPIED = 4 / 3e6
"""Microseconds of a launch, and for each value that it reads and writes, at 3 TB/s."""


class Work(NamedTuple):
    """The work of a launch.

    **Fields:** ``programs``; ``steps``: along K, of one program, in units that a kernel chooses; ``parts``: of a tile
    that programs share, each of which computes one; 0 if there is no such tile.
    """

    programs: float
    steps: float
    parts: float = 0.0


class Cost(NamedTuple):
    """How the time of a configuration grows with its work.

    **Fields:** ``occupancy``: programs that a multiprocessor runs at a time; 0 if rounds need not be whole, because
    multiprocessors take up programs as others end; ``coefficients``: c0 to c3 of the formula, and c4 if the kernel
    shares tiles, in microseconds.
    """

    occupancy: int
    coefficients: tuple[float, ...]

    def microseconds(self, work: Work, problem: GemmProblem, sms: int) -> float:
        """The estimate for a problem on a GPU with ``sms`` multiprocessors."""
        found = zip(self.coefficients, terms(work, problem.n, problem.k, self.occupancy, sms), strict=False)
        return sum(coefficient * term for coefficient, term in found)


def copying(values: Iterable[int]) -> float:
    """Microseconds of launches that copy so many 16-bit values each, before or after a product."""
    return sum(_LAUNCH + _COPIED * count for count in values)


def terms(work: Work, n: int, k: int, occupancy: int, sms: int) -> tuple[float, float, float, float, float]:
    """The factors of the coefficients."""
    rounds = work.programs / (sms * max(1, occupancy))
    rounds = max(1.0, float(math.ceil(rounds)) if occupancy else rounds)
    return 1.0, rounds, rounds * work.steps, n * k / 1e6, work.parts


def forms(problem: GemmProblem) -> Iterator[str]:
    """The names of tables that apply to a problem: its own, then those of weights that cost about as much.

    Such as ``w4-g32-int``: bits, columns of a group (at most 128; per channel without), zero points of the weight; for
    int8 activations ``-xz`` if they have zero points. Tables have their element for bits, and numbers with an exponent
    as scales are added, ``we2m1-g32-e8m0``; what was not measured costs about as much as integers do.
    """
    yield from _forms_of_tables(problem)
    zeros = {0: ("", "-int"), 1: ("-int", ""), 2: ("-int", "")}[problem.zero]
    moved = ("-xz", "") if problem.x_zero else ("", "-xz")
    for size in _sizes(problem):
        for zero in zeros:
            for x_zero in moved:
                yield f"w{problem.bits}{size}{zero}{x_zero}"


def _forms_of_tables(problem: GemmProblem) -> Iterator[str]:
    """The names of an element's own tables: with its own kind of scales, then with any."""
    if problem.element == INTEGER:
        return
    element = "t4" if problem.rounded else problem.element
    sizes = ("-g16", "-g32") if problem.halves else _sizes(problem)
    kinds = {torch.uint8: "-e8m0", torch.int8: "-e4m3"}
    for kind in dict.fromkeys((kinds.get(problem.scale, ""), "", "-e8m0", "-e4m3")):
        yield from (f"w{element}{size}{kind}" for size in sizes)


def _sizes(problem: GemmProblem) -> tuple[str, ...]:
    """Groups of a multiple of 128 columns are as fast as groups of 128; smaller ones are more like each other."""
    if problem.one_group:
        return "", "-g128", "-g64", "-g32"
    if problem.group % 128 == 0:
        return "-g128", "-g64", "-g32", ""
    return ("-g64", "-g32", "-g128", "") if problem.group % 64 == 0 else ("-g32", "-g64", "-g128", "")
