"""Test a plugin against the contracts: every scheme, dtype and shape, and the laws. Exits with 1 if a test fails."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import QcoreError
from ..runtime.settings import CONTRACT_NAMES
from . import arguments
from .output import FAILED, OK, CommandResult
from .progress import Progress

NAME = "conformance"
HELP = "test a plugin against the contracts"
EXAMPLES = (
    "qcore conformance torch --scheme w8a16 --contract linear",
    "qcore conformance vulkan --output conformance.json --html conformance.html",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore conformance``."""
    parser.add_argument("backend", metavar="NAME", help="the plugin's name, as in 'qcore plugins'")
    parser.add_argument("--device", type=arguments.device, help="torch device (default: the plugin's own)")
    parser.add_argument("--seed", type=int, help="seed of the random inputs (default: a fresh one, which is printed)")
    arguments.add_repeatable(parser, "--contract", f"one of {', '.join(CONTRACT_NAMES)} (default: all)")
    arguments.add_repeatable(parser, "--scheme", "e.g. w4a16-g128 (default: all)")
    arguments.add_repeatable(
        parser, "--select", "only cases and laws whose id matches a glob or contains a word", "PATTERN"
    )
    gaps = "known gaps, with their reasons (default: qcore_gaps.toml next to the plugin's module)"
    parser.add_argument("--gaps", type=Path, metavar="FILE", help=gaps)
    jobs = "processes that share the steps (default: 1); 0: none, so that a debugger works"
    parser.add_argument("--jobs", type=arguments.count_or_none, default=1, metavar="N", help=jobs)
    step = "end a process whose step takes longer, and fail the step (default: 600)"
    parser.add_argument("--step-seconds", type=arguments.seconds, default=600.0, metavar="N", help=step)
    limit = "begin no step after so many seconds; what was found is kept, and the exit code is 1"
    parser.add_argument("--seconds", type=float, metavar="N", help=limit)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the certificate as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the certificate as an HTML page with a matrix")


def _check_writable(path: Path) -> None:
    """Raise `QcoreError` if a file cannot be written, before the run, which takes minutes, instead of after it."""
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a directory" if path.is_dir() else f"cannot be written: {path.parent} is not a directory"
        raise QcoreError(f"{path} {problem}.\nName a file in an existing directory.")


def run(args: argparse.Namespace) -> CommandResult:
    """Run the conformance kit."""
    from .. import testing
    from ..testing import html_report

    for path in filter(None, (args.output, args.html)):
        _check_writable(path)
    with Progress("checking", unit="steps").shown() as progress:
        certificate = testing.run(
            args.backend,
            device=str(args.device) if args.device else None,
            seed=args.seed,
            schemes=args.scheme or None,
            contracts=args.contract or None,
            select=args.select or None,
            gaps=args.gaps,
            jobs=args.jobs,
            seconds=args.seconds,
            step_seconds=args.step_seconds,
            progress=progress,
        )
    if args.output:
        certificate.write_json(args.output)
    if args.html:
        html_report.write([certificate], args.html)
    written = [f"written: {path}" for path in (args.output, args.html) if path]
    return CommandResult(certificate.to_json(), [str(certificate), *written], OK if certificate.ok else FAILED)
