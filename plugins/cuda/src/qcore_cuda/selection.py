"""The selection of a product's kernel and its configuration: by measurement, else by an estimate or a rule.

In this order: the measurement of ``qcore tune`` on this machine for this size and number of rows; the least time that
the table shipped for this architecture (``tables/sm_90.json``) estimates, see `costs`; the first rule. Nothing is
measured while a model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from . import measured
from .costs import copying
from .measured import Record
from .problem import GemmProblem
from .products.base import Choice, Product
from .products.catalog import FLOAT_PRODUCTS, INT8_PRODUCTS
from .runtime.device import Device

_DOUBT = 1.08
"""What estimates for more rows than a problem has, and of `small` kernels, are multiplied by: others have to be slower
by more than that. (With fewer rows than those for which a table was made, the latter are no faster, but others are.)"""


@lru_cache(maxsize=8192)
def choose(device: Device, problem: GemmProblem) -> Choice:
    """The kernel and its configuration for a problem."""
    return next(_choices(device, problem))


@lru_cache(maxsize=8192)
def choose_among(device: Device, problem: GemmProblem, names: tuple[str, ...]) -> Choice | None:
    """`choose` among kernels of some names; None if none of them supports the problem."""
    return next((choice for choice in _choices(device, problem) if choice.product.name in names), None)


def candidates(device: Device, problem: GemmProblem) -> list[Choice]:
    """The choices that ``qcore tune`` measures: the present one, and a few dozen that were fastest for some size."""
    found = [next(_choices(device, problem))]
    for product in _products(problem):
        if product.serves(device, problem):
            choices = (product.adapted(problem, config) for config in product.candidates(device, problem))
            found += [choice for choice in choices if choice]
    return list(dict.fromkeys(found))


def keep(device: Device, problem: GemmProblem, choice: Choice) -> bool:
    """Store the fastest choice on disk; returns whether that worked."""
    return measured.keep(device, problem, Record(choice.product.name, choice.config._asdict()))


def _products(problem: GemmProblem) -> Sequence[Product[Any]]:
    return INT8_PRODUCTS if problem.codes else FLOAT_PRODUCTS


def _choices(device: Device, problem: GemmProblem) -> Iterator[Choice]:
    """All possible choices, the best first."""
    record = measured.tuned(device, problem)
    if record:
        yield from _of_record(device, problem, record)
    yield from (choice for _, choice in estimated(device, problem))
    yield from _by_rule(device, problem)


def estimated(device: Device, problem: GemmProblem) -> list[tuple[float, Choice]]:
    """The choices of the shipped table with their estimated times in microseconds, the least first.

    They are those of the problem's own form, or of the nearest one that has kernels for it, and not only `small` ones:
    no estimate says from which size on a kernel that only has a rule is faster than these.
    """
    for estimates in measured.shipped(device, problem):
        found: dict[Choice, float] = {}
        more = {rows: replace(problem, rows=rows) for rows in {e.rows for e in estimates} - {estimates[0].rows}}
        for record, cost, rows in estimates:
            like = more.get(rows, problem)
            for choice in _of_record(device, problem, record):
                kernel, config = choice
                # What it was adapted to otherwise has not been measured, nor what is done as a simpler one does it.
                if kernel.name == record.kernel and kernel.apart(device, like, config):
                    us = cost.microseconds(kernel.work(device, like, config), problem, device.sms)
                    doubt = _DOUBT if kernel.small or like is not problem else 1.0
                    us = us * doubt + copying(kernel.copies(problem))
                    found[choice] = min(us, found.get(choice, us))
        if not all(choice.product.small for choice in found):
            return sorted(((us, choice) for choice, us in found.items()), key=lambda pair: pair[0])
    return []


def _of_record(device: Device, problem: GemmProblem, record: Record) -> Iterator[Choice]:
    """The choice of a record; none if its kernel does not support this problem."""
    for product in _products(problem):
        if product.name == record.kernel and product.serves(device, problem):
            try:
                config = product.config(**record.config)
            except TypeError:  # written by hand, or damaged
                continue
            choice = product.adapted(problem, config)
            if choice:
                yield choice


def _by_rule(device: Device, problem: GemmProblem) -> Iterator[Choice]:
    """The rules' choices."""
    for product in _products(problem):
        if product.serves(device, problem):
            config = product.rule(device, problem)
            choice = None if config is None else product.adapted(problem, config)
            if choice:
                yield choice
