"""Show which kernel is selected for a quantized layer, and why the others are not. Exits with 1 if none is."""

from __future__ import annotations

import argparse
from typing import Any

from ..runtime.settings import CONTRACT_NAMES
from . import arguments
from .output import FAILED, OK, CommandResult, Table, no_warnings

NAME = "explain"
HELP = "show which kernel is selected, and why the others are not"
EXAMPLES = (
    "qcore explain w4a16-g128",
    "qcore explain w8a8 --device cpu --n 11008 --k 4096 --rows 1 --dtype float32",
    "qcore explain w8a16 --contract embedding --json",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore explain``."""
    parser.add_argument("scheme", metavar="SCHEME", help="the scheme of the layer, e.g. w4a16-g128")
    arguments.add_sizes(parser)
    arguments.add_device_and_dtype(parser)
    parser.add_argument("--contract", choices=CONTRACT_NAMES, default="linear", help="the op (default: %(default)s)")
    parser.add_argument("--rows", type=arguments.count, help="rows of x, M (default: any number)")
    parser.add_argument("--backends", metavar="NAMES", help="plugins in order of preference, e.g. cuda,torch")
    parser.add_argument("--disable", metavar="NAMES", help="plugins to leave out, e.g. vulkan,xla")


def run(args: argparse.Namespace) -> CommandResult:
    """Resolve the request and show the decision."""
    from .. import explain

    overrides = {"backends": args.backends, "disable": args.disable}
    with no_warnings():
        decision = explain(
            args.scheme,
            device=args.device,
            n=args.n,
            k=args.k,
            contract=args.contract,
            dtype=args.dtype,
            rows=args.rows,
            **{name: value for name, value in overrides.items() if value is not None},
        )
    return CommandResult(decision.to_json(), blocks(decision), OK if decision.kernel else FAILED)


def blocks(decision: Any) -> list[str | Table]:
    """A decision as a headline, a table and hints."""
    from ..resolving.decision import describe

    chosen = decision.selected
    head = f"{chosen.kernel} ({chosen.dist} {chosen.version})" if chosen else "no kernel supports this request"
    rows = [(c.plugin, c.kernel, c.stage, c.rank_text, _why(c)) for c in decision.candidates]
    table = Table(("plugin", "kernel", "stage", "rank", "why"), rows, state=2)
    return [f"{describe(decision.request)}: {head}", table, *(f"hint: {hint}" for hint in decision.hints)]


def _why(candidate: Any) -> str:
    if candidate.milliseconds is None:
        return str(candidate.reason)
    return f"{candidate.reason} [{candidate.milliseconds:.3g} ms measured]".lstrip()
