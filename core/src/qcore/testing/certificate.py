"""The certificate: the results of a run of the kit for one plugin."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..resolving.decision import format_table
from .results import Outcome, Result, count, summary_line

SCHEMA = 1
"""The version of the JSON format, which ``certificate.schema.json`` describes."""
_OPEN = (Outcome.SKIPPED, Outcome.REFUSED)


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the files that `Certificate.write_json` writes."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("certificate.schema.json").read_text("utf-8"))
    return found


@dataclass(frozen=True)
class Certificate:
    """The outcome of every case and law for one plugin on one device.

    **Fields:** ``backend``: the plugin's name; ``dist``, ``version``: its distribution; ``state``, ``reason``: outcome
    of loading and probing it; ``device``: the torch device tested; ``hardware``, ``driver``: from its probe; ``qcore``,
    ``torch``: versions; ``seed``: of the random inputs (pass it again to repeat them); ``date``: UTC; ``cases``,
    ``laws``: see `Result`; ``seconds``; ``broken``: whether the plugin is defective, as opposed to unavailable;
    ``complete``: whether no case and no law was deselected, so that the certificate covers the whole plugin.

    ``str(certificate)`` is a summary table.
    """

    backend: str
    dist: str
    version: str
    state: str
    reason: str
    device: str
    hardware: str
    driver: str
    qcore: str
    torch: str
    seed: int
    date: str
    cases: tuple[Result, ...] = ()
    laws: tuple[Result, ...] = ()
    seconds: float = 0.0
    broken: bool = field(default=False)
    complete: bool = False

    @property
    def results(self) -> tuple[Result, ...]:
        """Cases, then laws."""
        return (*self.cases, *self.laws)

    @property
    def available(self) -> bool:
        """Whether the plugin was loaded and its device found, so that it could be tested."""
        return self.state == "available"

    @property
    def failures(self) -> list[Result]:
        """Every case and law that failed."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    @property
    def unshown(self) -> dict[str, str]:
        """Laws that apply but ran nowhere, each with a reason: whether they hold is unknown.

        A law is shown if it passed, failed, or is a known gap in at least one place. A law that is inapplicable
        somewhere and refused everywhere else need not be shown.
        """
        groups = _by_law(self.laws)
        return {law: next(r.reason for r in found if r.outcome in _OPEN) for law, found in groups if _is_unshown(found)}

    @property
    def ok(self) -> bool:
        """Whether the plugin is available, nothing failed, and every law that applies was shown."""
        return self.available and not self.failures and not self.unshown

    @property
    def counts(self) -> Counter[Outcome]:
        """Cases and laws by outcome."""
        return count(self.results)

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as plain values for JSON."""
        lists = {name: [result.to_json() for result in getattr(self, name)] for name in ("cases", "laws")}
        counts = {outcome.value: self.counts[outcome] for outcome in Outcome}
        return {"schema": SCHEMA, **vars(self), **lists, "ok": self.ok, "unshown": self.unshown, "counts": counts}

    def write_json(self, path: str | Path) -> None:
        """Write one JSON object, with one line per case and per law."""
        data = self.to_json()
        lists = {name: data.pop(name) for name in ("cases", "laws")}
        parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items()]
        for name, results in lists.items():
            lines = ",\n  ".join(map(json.dumps, results))
            parts.append(f"{json.dumps(name)}: [\n  {lines}\n ]")
        Path(path).write_text("{" + ",\n ".join(parts) + "}\n", encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join([*self.header(), *self._body(), self.closing()])

    def header(self) -> list[str]:
        """Return two lines with plugin, device, versions and seed."""
        hardware = f" ({self.hardware})" if self.hardware else ""
        return [
            f"{self.backend} ({self.dist} {self.version}) on {self.device}{hardware}",
            f"qcore {self.qcore}, torch {self.torch}, seed {self.seed}, {self.date}",
        ]

    def closing(self) -> str:
        """Return the summary line for scripts; everything that neither passed nor failed counts as skipped."""
        n = self.counts
        passed, failed = n[Outcome.PASSED], n[Outcome.FAILED]
        return summary_line(passed, failed, n.total() - passed - failed)

    def _body(self) -> Iterator[str]:
        if not self.available:
            yield f"{self.state}: {self.reason}"
            return
        columns = ("passed", "failed", "refused", "gap", "skipped", "inapplicable")
        groups = [*_by_contract(self.cases), *_by_contract(self.laws, laws=True)]
        rows = [(name, *(str(found[Outcome(c)]) for c in columns), _worst(results)) for name, results, found in groups]
        yield from format_table(("", *columns, "worst error / allowed"), rows)
        yield from (f"FAILED {result.id}: {result.reason}" for result in self.failures[:20])
        if len(self.failures) > 20:
            yield f"... and {len(self.failures) - 20} more failures"
        yield from (f"NOT SHOWN law {law}: {reason}" for law, reason in self.unshown.items())


def _by_law(results: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.law, []).append(result)
    return list(groups.items())


def _is_unshown(results: Iterable[Result]) -> bool:
    outcomes = {result.outcome for result in results}
    if outcomes & {Outcome.PASSED, Outcome.FAILED, Outcome.GAP}:
        return False
    return Outcome.SKIPPED in outcomes or Outcome.INAPPLICABLE not in outcomes


def _by_contract(
    results: Iterable[Result], *, laws: bool = False
) -> Iterator[tuple[str, list[Result], Counter[Outcome]]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(f"law {result.law}" if laws else result.contract, []).append(result)
    for name, members in groups.items():
        yield name, members, count(members)


def _worst(results: Iterable[Result]) -> str:
    worst = max((result.worst for result in results if result.outcome is Outcome.PASSED), default=0.0)
    return f"{worst:.3f}" if worst else ""
