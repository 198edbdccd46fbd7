"""List the tensors of a checkpoint with format, shape and size in bytes. Reads only the headers."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import arguments
from .output import CommandResult

NAME = "inspect"
HELP = "list the tensors of a checkpoint"
EXAMPLES = ("qcore inspect model.safetensors", "qcore inspect folder-of-shards --json")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore inspect``."""
    parser.add_argument("path", type=Path, metavar="FILE_OR_DIR", help="a safetensors file, or a directory of shards")
    parser.add_argument("--all", action="store_true", help=arguments.ALL)


def run(args: argparse.Namespace) -> CommandResult:
    """Read the headers."""
    from .. import checkpoint

    inventory = checkpoint.inspect(args.path)
    return CommandResult(inventory.to_json(), [inventory.details() if args.all else str(inventory)])
