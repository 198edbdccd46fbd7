"""Select cases of the contracts, and build their inputs and references on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ..contracts import CONTRACTS, Case, Contract, Problem, Verdict
from ..contracts.base import FLOAT_DTYPES
from ..discovery.registry import registry
from ..errors import ConformanceError, did_you_mean
from ..formats import Element, Format, ZeroPoint, registered_elements, registered_layouts
from ..weights.schemes import SCHEMES, TABLE_SCHEMES, Scheme
from .gaps import matches


class PreparedCase:
    """One case whose inputs, reference and tolerance are computed once for all kernels and plugins."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed = case, seed
        self.contract = CONTRACTS[case.contract]

    @cached_property
    def problem(self) -> Problem:
        """The inputs on CPU, for a request on CPU."""
        return self.case.build(self.seed)

    def on(self, device: torch.device) -> Problem:
        """Return the same inputs (on CPU) for a request on ``device``."""
        return replace(self.problem, request=replace(self.problem.request, device=device))

    @cached_property
    def _expected(self) -> Tensor:
        return self.contract.reference(self.problem)

    @cached_property
    def _tolerance(self) -> Tensor:
        return self.contract.allowed(self.problem)

    # Contract.judge calls these methods of the contract; here they return the cached tensors.

    def reference(self, _problem: Problem) -> Tensor:
        return self._expected

    def allowed(self, _problem: Problem) -> Tensor:
        return self._tolerance

    def judge(self, problem: Problem, result: Any) -> Verdict:
        """Apply `Contract.judge` with the cached reference, for a problem on any device."""
        return Contract.judge(cast("Contract", self), problem, result)


def cases(schemes: Iterable[str] | None = None, contracts: Iterable[str] | None = None) -> list[Case]:
    """Return all cases, or those of some contracts and schemes. Raises `ConformanceError` for an unknown contract.

    Without ``schemes``: every shape in every dtype for `SCHEMES`, and every shape in one dtype for `TABLE_SCHEMES` and
    `element_schemes`, whose kernels differ from the others in decoding. Schemes that are named run in every dtype.
    """
    chosen = list(_chosen(contracts))
    if schemes is None:
        parsed = [Scheme.parse(text) for text in SCHEMES]
        return [
            case
            for contract in chosen
            for case in (*contract.cases(parsed, FLOAT_DTYPES), *_one_dtype_each(contract, sampled_schemes()))
        ]
    wanted = {str(Scheme.parse(text).blank()) for text in schemes}
    parsed = [Scheme.parse(text) for text in sorted(wanted or SCHEMES)]
    found = [case for contract in chosen for case in contract.cases(parsed, FLOAT_DTYPES)]
    return [case for case in found if case.scheme in wanted]


def sampled_schemes() -> list[str]:
    """Return `TABLE_SCHEMES` and the schemes of plugins' elements."""
    return [*TABLE_SCHEMES, *element_schemes()]


_GROUP = 64


def element_schemes() -> list[str]:
    """Return schemes for each element of the loaded plugins, in the order of names.

    Weight-only, per channel and in groups, with a float zero point, and in each layout that its plugin adds for it.
    """
    here = registry.entries()
    own = {name: element for name, (element, owner) in sorted(registered_elements().items()) if owner in here}
    return [str(Scheme(weight)) for element in own.values() for weight in _formats_of(element)]


def _formats_of(element: Element) -> Iterator[Format]:
    for group, zero in ((None, ZeroPoint.NONE), (_GROUP, ZeroPoint.NONE), (_GROUP, ZeroPoint.FLOAT)):
        yield Format(element.name, group, zero)
    if element.is_integer:
        yield Format(element.name, _GROUP, ZeroPoint.INT)
    for _, (layout, owner) in sorted(registered_layouts().items()):
        if owner and element.name in layout.dtypes:
            yield Format(element.name, _GROUP, layout=layout)


def _one_dtype_each(contract: Contract, texts: Iterable[str]) -> Iterator[Case]:
    """Yield every shape of a contract's cases once per scheme; the dtypes rotate, starting with another per scheme."""
    for turn, text in enumerate(texts):
        scheme = Scheme.parse(text)
        every = [case for case in contract.cases([scheme], FLOAT_DTYPES) if case.scheme == str(scheme.blank())]
        shapes = max(1, len(every) // len(FLOAT_DTYPES))
        for index, case in enumerate(every):  # by dtype, then by shape
            if (index // shapes + index % shapes + turn) % len(FLOAT_DTYPES) == 0:
                yield case


def _chosen(names: Iterable[str] | None) -> Iterator[Contract]:
    for name in CONTRACTS if names is None else names:
        if name not in CONTRACTS:
            raise ConformanceError(
                f"no contract is called {name!r}; known: {', '.join(CONTRACTS)}.{did_you_mean(name, CONTRACTS)}"
            )
        yield CONTRACTS[name]


def selects(patterns: Iterable[str] | None, name: str) -> bool:
    """Whether any pattern matches: a glob for the whole id, or, without ``*`` and ``?``, a substring."""
    if patterns is None:
        return True
    return any(matches(p, name) if set("*?") & set(p) else p in name for p in patterns)
