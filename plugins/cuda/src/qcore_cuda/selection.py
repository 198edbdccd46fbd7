"""Which kernel serves a product, with which configuration: what was measured, else a rule.

In order: what ``qcore tune`` measured on this machine for this size and number of rows; a kernel whose rule goes before
the table; the nearest size in the table shipped for this architecture (``tables/sm_90.json``); the first rule. Nothing
is measured while a model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from . import measured
from .measured import Record
from .problem import GemmProblem
from .products.base import Choice, Product
from .products.catalog import FLOAT_PRODUCTS, INT8_PRODUCTS
from .runtime.device import Device


@lru_cache(maxsize=8192)
def choose(device: Device, problem: GemmProblem) -> Choice:
    """The kernel and its configuration for a problem."""
    return next(_choices(device, problem))


def candidates(device: Device, problem: GemmProblem) -> list[Choice]:
    """What ``qcore tune`` measures for a problem: a few dozen that have ever been fastest anywhere, and the rule's."""
    found = [next(_by_rule(device, problem, leads=False))]
    for product in _products(problem):
        if product.serves(device, problem):
            choices = (product.adapted(problem, config) for config in product.candidates(device, problem))
            found += [choice for choice in choices if choice]
    return list(dict.fromkeys(found))


def keep(device: Device, problem: GemmProblem, choice: Choice) -> bool:
    """Keep the choice that was measured to be fastest; whether that worked."""
    return measured.keep(device, problem, Record(choice.product.name, choice.config._asdict()))


def _products(problem: GemmProblem) -> Sequence[Product[Any]]:
    return INT8_PRODUCTS if problem.codes else FLOAT_PRODUCTS


def _choices(device: Device, problem: GemmProblem) -> Iterator[Choice]:
    """All that could serve, the best first."""
    record = measured.tuned(device, problem)
    if record:
        yield from _of_record(device, problem, record)
    yield from _by_rule(device, problem, leads=True)
    for record in measured.shipped(device, problem):
        yield from _of_record(device, problem, record)
    yield from _by_rule(device, problem, leads=False)


def _of_record(device: Device, problem: GemmProblem, record: Record) -> Iterator[Choice]:
    """What a record stands for: nothing if its kernel does not serve this problem."""
    for product in _products(problem):
        if product.name == record.kernel and product.serves(device, problem):
            try:
                config = product.config(**record.config)
            except TypeError:  # written by hand, or damaged
                continue
            choice = product.adapted(problem, config)
            if choice:
                yield choice


def _by_rule(device: Device, problem: GemmProblem, *, leads: bool) -> Iterator[Choice]:
    """What the rules say of the kernels that go before the table, or of the others."""
    for product in _products(problem):
        if product.leads is leads and product.serves(device, problem):
            config = product.rule(device, problem)
            choice = None if config is None else product.adapted(problem, config)
            if choice:
                yield choice
