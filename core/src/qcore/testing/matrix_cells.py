"""What the tables show: one cell per contract, scheme and backend, and one per law and backend."""

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
"""A sign for each state, so that it is not told by colour alone."""


@dataclass(frozen=True)
class Cell:
    """The outcome of some cases or laws for one backend.

    **Fields:** ``state``: a key of `SYMBOLS`; ``text``: the kernels that served, or why none did; ``count``: how many
    passed of those that ran; ``lines``: kernels and reasons, each with how often.
    """

    state: str
    text: str
    count: str = ""
    lines: tuple[str, ...] = ()


_WITH_REASON = (Outcome.REFUSED, Outcome.INAPPLICABLE, Outcome.SKIPPED)
"""Neither passed nor failed; the later ones tell more."""


def families(certificates: Iterable[Certificate]) -> list[tuple[str, str]]:
    """Every (contract, scheme) that any backend was asked for, in order."""
    return list(dict.fromkeys((r.contract, r.scheme) for certificate in certificates for r in certificate.cases))


def scheme_cell(certificate: Certificate, contract: str, scheme: str) -> Cell:
    """How a backend serves one contract and scheme."""
    if not certificate.available:
        return _absent(certificate)
    return _cell([r for r in certificate.cases if (r.contract, r.scheme) == (contract, scheme)], certificate.backend)


def laws(certificates: Iterable[Certificate]) -> list[str]:
    """Every law that was checked, in order."""
    return list(dict.fromkeys(result.law for certificate in certificates for result in certificate.laws))


def law_cell(certificate: Certificate, law: str) -> Cell:
    """How a backend keeps one law."""
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
