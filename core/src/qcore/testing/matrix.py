"""``python -m qcore.testing.matrix``: run the kit for every installed plugin and print one table.

Fails if any case or law fails, if a plugin is broken, or if a required plugin is not available.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ..discovery.registry import registry
from ..resolving.decision import format_table
from . import html_report
from .case_selection import PreparedCase, cases
from .certificate import Certificate
from .kit import Kit, fresh_seed
from .matrix_cells import SYMBOLS, Cell, families, law_cell, laws, scheme_cell
from .results import Outcome, summary_line

_CASES, _LAWS = 8, 4
"""With --quick, every eighth case and every fourth law runs, always the same ones."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kit, print the table and write the files; returns the exit status."""
    options = _parser().parse_args(arguments)
    seed = fresh_seed() if options.seed is None else options.seed
    print(f"qcore conformance matrix, seed {seed} (repeat it with --seed {seed})", flush=True)
    names = options.plugin or _installed()
    certificates = certify(names, seed, quick=names if options.quick else options.sample)
    _write(certificates, seed, options)
    print("\n".join(_report(certificates)))
    missing = [name for name in options.require if not _is_here(name, certificates)]
    for name in missing:
        print(f"REQUIRED {name} is missing: {_why_missing(name, certificates)}")
    unshown = [(c.backend, *found) for c in certificates if c.complete for found in c.unshown.items()]
    for name, law, reason in unshown:
        print(f"NOT SHOWN {name} law {law}: {reason}")
    passed, failed, skipped = _totals(certificates)
    print(summary_line(passed, failed + len(missing) + len(unshown), skipped))
    return 1 if failed or missing or unshown else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qcore.testing.matrix", description=__doc__)
    parser.add_argument("plugin", nargs="*", help="only these plugins (default: every one installed)")
    parser.add_argument("--require", action="append", default=[], metavar="NAME", help="fail if NAME is not available")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the matrix as a page")
    parser.add_argument("--seed", type=int, help="seed of the random inputs (default: a fresh one)")
    parser.add_argument("--quick", action="store_true", help="run a sample of cases and laws, without compilation")
    parser.add_argument("--sample", action="append", default=[], metavar="NAME", help="use --quick for NAME only")
    return parser


def _installed() -> list[str]:
    return list(registry.entries())


def certify(names: Iterable[str], seed: int, *, quick: Collection[str] = ()) -> list[Certificate]:
    """Return one certificate per plugin. The inputs and reference of each case are computed once for all plugins.

    ``quick``: plugins that run only a sample, always the same one and without laws that compile.
    """
    kits = [Kit(name, seed=seed) for name in names]
    here = [kit for kit in kits if kit.target.available]
    whole = [kit for kit in here if kit.target.name not in quick]
    for case in cases() if here else ():
        selected = here if _in_sample(case.id, _CASES) else whole
        prepared = PreparedCase(case, seed)
        for kit in selected:
            kit.run_case(prepared)
    for kit in here:
        kit.complete = kit in whole
        for item in kit.laws:
            if kit.complete or (not item.law.sparse and (item.law.plugin or _in_sample(item.id, _LAWS))):
                kit.run_law(item)
        print(f"  {kit.target.name}: {kit.certificate().closing()}", flush=True)
    return [kit.certificate() for kit in kits]


def _in_sample(name: str, one_in: int) -> bool:
    return zlib.crc32(name.encode()) % one_in == 0


def _write(certificates: Sequence[Certificate], seed: int, options: argparse.Namespace) -> None:
    if options.json:
        content = {"seed": seed, "certificates": [certificate.to_json() for certificate in certificates]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.html:
        html_report.write(certificates, options.html)


def _report(certificates: Sequence[Certificate]) -> list[str]:
    """Return the lines of the report: plugins, the table with the laws, and the failures."""
    header = ("contract", "scheme", *(certificate.backend for certificate in certificates))
    rows = [
        (contract, scheme, *(_text(scheme_cell(certificate, contract, scheme)) for certificate in certificates))
        for contract, scheme in families(certificates)
    ]
    kept = [("law", law, *(_text(law_cell(c, law), law=True) for c in certificates)) for law in laws(certificates)]
    failures = [f"FAILED {c.backend} {result.id}: {result.reason}" for c in certificates for result in c.failures[:20]]
    about = [line for certificate in certificates for line in _about(certificate)]
    return ["", *about, "", *format_table(header, [*rows, *kept]), "", *failures]


def _about(certificate: Certificate) -> list[str]:
    lines = [certificate.header()[0]]
    return lines if certificate.available else [*lines, f"  {certificate.state}: {certificate.reason}"]


def _text(cell: Cell, *, law: bool = False) -> str:
    shown = f"{SYMBOLS[cell.state]} {cell.state if law else cell.text}"
    why = cell.lines[0] if cell.lines and cell.state in ("refused", "skipped", "inapplicable") else ""
    why = why.removeprefix(f"{cell.state}: ")
    return f"{shown} {cell.count}".rstrip() + (f": {_short(why)}" if why else "")


def _short(text: str, most: int = 60) -> str:
    line = text.split("\n", maxsplit=1)[0]
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _totals(certificates: Sequence[Certificate]) -> tuple[int, int, int]:
    """Cases and laws passed, failed, and neither; a plugin that is not available counts as one skipped."""
    passed = sum(c.counts[Outcome.PASSED] for c in certificates)
    failed = sum(c.counts[Outcome.FAILED] for c in certificates)
    total = sum(c.counts.total() if c.available or c.broken else 1 for c in certificates)
    return passed, failed, total - passed - failed


def _is_here(name: str, certificates: Sequence[Certificate]) -> bool:
    return any(c.backend == name and c.available for c in certificates)


def _why_missing(name: str, certificates: Sequence[Certificate]) -> str:
    found = next((c for c in certificates if c.backend == name), None)
    return f"{found.state}: {found.reason}" if found else f"it is not installed; pip install qcore-{name}"


if __name__ == "__main__":
    sys.exit(main())
