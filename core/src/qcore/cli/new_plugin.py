"""Create a complete plugin package that installs, is discovered and passes the conformance kit.

Replace its kernel, which uses plain torch ops (plain C++ with ``--native``), with your own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .output import CommandResult

NAME = "new-plugin"
HELP = "create a plugin package from a template"
EXAMPLES = (
    "qcore new-plugin fastchip",
    "qcore new-plugin otherchip --native",
    "qcore new-plugin fastchip --directory ~/src/qcore-fastchip --json",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore new-plugin``."""
    parser.add_argument(
        "name", metavar="NAME", help="the plugin's name, e.g. fastchip; the package is called qcore-NAME"
    )
    native = "write the kernel in C++, built by CMake and loaded with ctypes; installation needs a compiler"
    parser.add_argument("--native", action="store_true", help=native)
    directory = "target directory, new or empty (default: qcore-NAME)"
    parser.add_argument("--directory", type=Path, metavar="DIR", help=directory)


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
