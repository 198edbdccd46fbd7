"""Check plugins, devices, settings and the cache for problems. Each plugin is probed in its own process."""

from __future__ import annotations

import argparse
import os
from typing import Any

from . import arguments
from .findings import Finding
from .output import FAILED, OK, CommandResult, Table, plugin_table

NAME = "doctor"
HELP = "check plugins, devices and settings for problems"
EXAMPLES = ("qcore doctor", "qcore doctor --timeout 60 --json", "qcore doctor --clear")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore doctor``."""
    text = "time limit per plugin (default: %(default)s)"
    parser.add_argument("--timeout", type=arguments.seconds, default=10.0, metavar="SECONDS", help=text)
    parser.add_argument("--clear", action="store_true", help="first clear recorded failures, crashes and hangs")
    jobs = min(4, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=arguments.count, default=jobs, help="parallel probes (default: %(default)s)")


def run(args: argparse.Namespace) -> CommandResult:
    """Run every check."""
    from . import health

    wanted, findings = health.settings_in_force()
    findings += health.clear() if args.clear else []
    statuses = health.examine(wanted.disable, args.timeout, args.jobs)
    findings += health.plugin_findings(statuses)
    findings += health.name_findings(wanted, statuses)
    findings += health.left_findings(statuses)
    findings += health.slow_findings(statuses)
    findings += health.cache_findings()
    findings += health.hardware_findings(statuses)
    return _result(health.machine(), health.settings_table(wanted), statuses, findings)


_Texts = dict[str, str]


def _result(machine: _Texts, settings: list[_Texts], statuses: list[Any], found: list[Finding]) -> CommandResult:
    from .probing import as_json

    problems, notes = ([f for f in found if f.problem is kind] for kind in (True, False))
    data = {
        "ok": not problems,
        **machine,
        "settings": settings,
        "plugins": [as_json(status) for status in statuses],
        "problems": [_finding_json(f) for f in problems],
        "notes": [_finding_json(f) for f in notes],
    }
    facts = "\n".join(f"{name:<9} {value}" for name, value in machine.items())
    blocks: list[str | Table] = [facts, "", _settings(settings), "", plugin_table(statuses, brief=True), ""]
    blocks += [*_listed("problem", problems), *_listed("note", notes), *([] if problems else ["No problems found."])]
    return CommandResult(data, blocks, FAILED if problems else OK)


def _finding_json(finding: Finding) -> dict[str, str]:
    return {"about": finding.about, "text": finding.text, "remedy": finding.remedy}


def _settings(settings: list[dict[str, str]]) -> Table:
    return Table(("setting", "value", "from"), [(s["name"], s["value"], s["source"]) for s in settings])


def _listed(kind: str, findings: list[Finding]) -> list[str]:
    if not findings:
        return []
    head = f"{len(findings)} {kind}{'s' if len(findings) > 1 else ''}:"
    return [head, *(f"  {finding}" for finding in findings), ""]
