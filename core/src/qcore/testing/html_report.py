"""Render the matrix as a self-contained HTML page from the template ``page.html``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from .certificate import Certificate
from .laws import EVERYWHERE, LAWS
from .matrix_cells import SYMBOLS, Cell, families, law_cell, laws, scheme_cell
from .results import Outcome

_MEANINGS = {
    "passed": "passed",
    "partly": "passed, some cases refused",
    "failed": "failed",
    "gap": "known gap",
    "refused": "refused with a reason",
    "skipped": "could not be tested here",
    "inapplicable": "does not apply",
    "unavailable": "device not present",
}
_MAX_LINES = 60
_WIDE = 4
"""From this many backends on, the tables scroll horizontally."""


def render(certificates: Sequence[Certificate]) -> str:
    """Render the page for these certificates."""
    page = _Page(certificates)
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(_title(certificates)),
        subtitle=escape(_subtitle(certificates)),
        cards="".join(map(_card, certificates)),
        legend="".join(f'<li class="{s}">{SYMBOLS[s]} {escape(text)}</li>' for s, text in _MEANINGS.items()),
        columns="".join(f'<th scope="col">{_breakable(c.backend)}</th>' for c in certificates),
        width="wide" if len(certificates) >= _WIDE else "narrow",
        rows=page.scheme_rows(),
        laws=page.law_rows(),
        details=json.dumps(page.details).replace("</", "<\\/"),
    )


def write(certificates: Sequence[Certificate], path: str | Path) -> None:
    """Write the self-contained page to a file."""
    # A plugin's own texts may contain lone surrogates, which UTF-8 cannot encode.
    Path(path).write_text(render(certificates), encoding="utf-8", errors="backslashreplace")


def _title(certificates: Sequence[Certificate]) -> str:
    return f"Conformance of {certificates[0].backend}" if len(certificates) == 1 else "qcore conformance matrix"


def _subtitle(certificates: Sequence[Certificate]) -> str:
    first = certificates[0]
    date = first.date.replace("T", " ").removesuffix("+00:00")
    return f"qcore {first.qcore}, torch {first.torch}, {date} UTC, seed {first.seed}"


def _card(certificate: Certificate) -> str:
    counts, total = certificate.counts, max(1, certificate.counts.total())
    bar = "".join(f'<i class="{o.value}" style="flex:{counts[o] / total:.4f}"></i>' for o in Outcome if counts[o])
    shown = [o for o in Outcome if counts[o] or o in (Outcome.PASSED, Outcome.FAILED)]
    totals = "".join(f'<span class="{o.value}">{SYMBOLS[o.value]} {counts[o]} {o.value}</span>' for o in shown)
    facts = {"Device": certificate.device, "Hardware": certificate.hardware, "Driver": certificate.driver}
    known = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items() if text)
    state, words = _standing(certificate)
    body = f'<div class="bar">{bar}</div><div class="totals">{totals}</div><dl>{known}</dl>' if counts else ""
    why = f"<p>{escape(certificate.reason)}</p>" if certificate.reason else ""
    pill = f'<span class="pill {state}">{SYMBOLS[state]} {words}</span>'
    return (
        f'<article class="card"><h3>{escape(certificate.backend)}{pill}</h3>'
        f"<p>{escape(certificate.dist)} {escape(certificate.version)}</p>{why}{body}</article>"
    )


def _breakable(text: str) -> str:
    """Allow line breaks after dots and underscores in names, but not within a state of two words."""
    kept = text if "," in text else text.replace(" ", "\N{NO-BREAK SPACE}")
    return escape(kept).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _standing(certificate: Certificate) -> tuple[str, str]:
    if certificate.failures or certificate.broken:
        return "failed", certificate.state if certificate.broken else f"{len(certificate.failures)} failed"
    if not certificate.available:
        return "unavailable", "not available"
    return ("gap", "known gaps") if certificate.counts[Outcome.GAP] else ("passed", "conforms")


class _Page:
    """Builds the rows of the tables and collects the details that a click on a cell opens."""

    def __init__(self, certificates: Sequence[Certificate]) -> None:
        self._certificates = certificates
        self.details: list[dict[str, object]] = []

    def scheme_rows(self) -> str:
        rows, last = [], ""
        for contract, scheme in families(self._certificates):
            if contract != last:
                span = len(self._certificates) + 1
                rows.append(f'<tr class="section"><th colspan="{span}" scope="colgroup">{escape(contract)}</th></tr>')
                last = contract
            cells = [scheme_cell(certificate, contract, scheme) for certificate in self._certificates]
            rows.append(self._row(f"{contract} {scheme}", f"<code>{escape(scheme)}</code>", cells))
        return "".join(rows)

    def law_rows(self) -> str:
        statements = {**EVERYWHERE, **{law.name: law.statement for law in LAWS}}
        rows = []
        for law in laws(self._certificates):
            said = f'{escape(law)}<span class="statement">{escape(statements.get(law, ""))}</span>'
            rows.append(self._row(law, said, [law_cell(certificate, law) for certificate in self._certificates]))
        return "".join(rows)

    def _row(self, title: str, head: str, cells: Sequence[Cell]) -> str:
        shown = "".join(self._cell(title, c.backend, cell) for c, cell in zip(self._certificates, cells, strict=True))
        words = " ".join([title, *(f"{cell.state} {cell.text} {' '.join(cell.lines[:5])}" for cell in cells)]).lower()
        return f'<tr data-text="{escape(words)}"><th scope="row">{head}</th>{shown}</tr>'

    def _cell(self, title: str, backend: str, cell: Cell) -> str:
        lines = list(cell.lines[:_MAX_LINES])
        if len(cell.lines) > _MAX_LINES:
            lines.append(f"and {len(cell.lines) - _MAX_LINES} more, see the JSON")
        summary = f"{SYMBOLS[cell.state]} {_MEANINGS[cell.state]}" + (f", {cell.count} passed" if cell.count else "")
        self.details.append({"title": f"{title} on {backend}", "summary": summary, "lines": lines})
        hover = escape("\n".join([summary, *lines[:6]]))
        counted = f"<small>{cell.count}</small>" if cell.count else ""
        return (
            f'<td><button type="button" class="{cell.state}" data-cell="{len(self.details) - 1}" title="{hover}">'
            f"<b>{SYMBOLS[cell.state]}</b><span>{_breakable(cell.text)}</span>{counted}</button></td>"
        )
