"""Write a complete plugin package: it installs, is found, and passes the conformance kit as it is.

Replace its kernel, written in plain torch ops (or with ``--native`` in plain C++), by your own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .output import CommandResult

NAME = "new-plugin"
HELP = "write a plugin package to start from"
EXAMPLES = (
    "qcore new-plugin fastchip",
    "qcore new-plugin otherchip --native",
    "qcore new-plugin fastchip --directory ~/src/qcore-fastchip --json",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore new-plugin``."""
    parser.add_argument("name", metavar="NAME", help="of the plugin, e.g. fastchip; the package is called qcore-NAME")
    native = "its kernel in C++, built by CMake and loaded with ctypes; installing it takes a compiler"
    parser.add_argument("--native", action="store_true", help=native)
    where = "where to write it; new or empty (default: qcore-NAME)"
    parser.add_argument("--directory", type=Path, metavar="DIR", help=where)


def run(args: argparse.Namespace) -> CommandResult:
    """Render the templates."""
    from .scaffold import check_name, render, write

    check_name(args.name)
    files = render(args.name, native=args.native)
    directory = args.directory or Path(f"qcore-{args.name.replace('_', '-')}")
    write(files, directory.expanduser())
    data = {"name": args.name, "directory": str(directory), "files": sorted(files)}
    return CommandResult(
        data, [f"wrote {directory}:", *(f"  {file}" for file in sorted(files)), "", _next(args.name, directory)]
    )


def _next(name: str, directory: Path) -> str:
    return f"next:\n  pip install -e '{directory}[test]'\n  qcore plugins\n  qcore conformance {name}"
