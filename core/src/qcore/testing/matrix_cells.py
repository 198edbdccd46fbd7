"""The cells of the tables: one per contract, scheme and backend, and one per law and backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .certificate import Certificate
from .results import Outcome, Result, count

SYMBOLS = {
    "passed": "✓", "partly": "◐", "failed": "✗", "gap": "△", "refused": "⊘", "skipped": "○", "inapplicable": "—",
    "unavailable": "·",
}  # fmt: skip
"""A symbol for each state, so that colour is not the only sign."""


@dataclass(frozen=True)
class Cell:
    """The outcome of some cases or laws for one backend.

    **Fields:** ``state``: a key of `SYMBOLS`; ``text``: the kernels that ran, or the state; ``count``: passed / ran;
    ``lines``: kernels and reasons, each with its number of occurrences.
    """

    state: str
    text: str
    count: str = ""
    lines: tuple[str, ...] = ()


_WITH_REASON = (Outcome.REFUSED, Outcome.INAPPLICABLE, Outcome.SKIPPED)
"""Outcomes that are neither passed nor failed; later ones take precedence."""


def families(certificates: Iterable[Certificate]) -> list[tuple[str, str]]:
    """Return every (contract, scheme) that was requested from any backend, in order."""
    return list(dict.fromkeys((r.contract, r.scheme) for certificate in certificates for r in certificate.cases))


def scheme_cell(certificate: Certificate, contract: str, scheme: str) -> Cell:
    """Return the cell of a backend for one contract and scheme."""
    if not certificate.available:
        return _absent(certificate)
    return _cell([r for r in certificate.cases if (r.contract, r.scheme) == (contract, scheme)], certificate.backend)


def laws(certificates: Iterable[Certificate]) -> list[str]:
    """Return every law that was checked, in order."""
    return list(dict.fromkeys(result.law for certificate in certificates for result in certificate.laws))


def law_cell(certificate: Certificate, law: str) -> Cell:
    """Return the cell of a backend for one law."""
    found = [result for result in certificate.laws if result.law == law]
    if not certificate.available and not found:
        return _absent(certificate)
    return _cell(found)


def _absent(certificate: Certificate) -> Cell:
    state = "failed" if certificate.broken else "unavailable"
    return Cell(state, certificate.state, "", (f"{certificate.state}: {certificate.reason}",))


def _cell(results: Sequence[Result], backend: str = "") -> Cell:
    if not results:
        return Cell("inapplicable", "does not apply")
    counts = count(results)
    state: str = _state(counts)
    kernels: list[str] = list(dict.fromkeys(name for result in results for name in result.kernels))
    ran = counts[Outcome.PASSED] + counts[Outcome.FAILED] + counts[Outcome.GAP]
    lines = [f"{_names(r)}: {r.reason}" for r in results if r.outcome in (Outcome.FAILED, Outcome.GAP)]
    why = Counter(f"{r.outcome}: {r.reason}" for r in results if r.outcome in _WITH_REASON)
    lines += [text if times == 1 else f"{text} ({times} times)" for text, times in why.most_common()]
    text = ", ".join(name.removeprefix(f"{backend}.") for name in kernels) or state
    shown = f"{counts[Outcome.PASSED]}/{ran}" if ran else ""
    return Cell(state, text, shown, (*(f"kernel {name}" for name in kernels), *lines))


def _names(result: Result) -> str:
    return f"{result.outcome} {result.id}"


def _state(counts: Counter[Outcome]) -> str:
    for outcome in (Outcome.FAILED, Outcome.GAP):
        if counts[outcome]:
            return str(outcome)
    if counts[Outcome.PASSED]:
        return "partly" if counts[Outcome.REFUSED] else "passed"
    return next((str(outcome) for outcome in reversed(_WITH_REASON) if counts[outcome]), "skipped")
