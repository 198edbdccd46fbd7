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
from ..errors import ConformanceError, did_you_mean
from ..weights.schemes import SCHEMES, Scheme
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
    """Return all cases, or those of some contracts and schemes. Raises `ConformanceError` for an unknown contract."""
    wanted = None if schemes is None else {str(Scheme.parse(text).blank()) for text in schemes}
    parsed = [Scheme.parse(text) for text in sorted(wanted or ())] or [Scheme.parse(text) for text in SCHEMES]
    found = [case for contract in _chosen(contracts) for case in contract.cases(parsed, FLOAT_DTYPES)]
    return [case for case in found if wanted is None or case.scheme in wanted]


def _chosen(names: Iterable[str] | None) -> Iterator[Contract]:
    for name in CONTRACTS if names is None else names:
        if name not in CONTRACTS:
            raise ConformanceError(
                f"no contract is called {name!r}; there are {', '.join(CONTRACTS)}.{did_you_mean(name, CONTRACTS)}"
            )
        yield CONTRACTS[name]


def selects(patterns: Iterable[str] | None, name: str) -> bool:
    """Whether any pattern matches: a glob for the whole id, or, without ``*`` and ``?``, a substring."""
    if patterns is None:
        return True
    return any(matches(p, name) if set("*?") & set(p) else p in name for p in patterns)
