"""Quantize a safetensors checkpoint, shard by shard; peak memory is about one shard."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from . import arguments
from .output import CommandResult, Table, size
from .progress import Progress

NAME = "quantize"
HELP = "quantize a checkpoint on disk"
EXAMPLES = (
    "qcore quantize model.safetensors small.safetensors --scheme w4a16-g128 --exclude lm_head",
    "qcore quantize folder-of-shards small --scheme w8a16 --max-shard-size 2GB --json",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore quantize``."""
    parser.add_argument("source", type=Path, metavar="IN", help="a safetensors file, or a directory of shards")
    parser.add_argument("target", type=Path, metavar="OUT", help="a file or a directory, like IN")
    parser.add_argument("--scheme", required=True, help="e.g. w8a16, w4a16-g128-asym, wfp8afp8, mxfp4")
    patterns = "names of layers, globs (model.*.mlp.*) or last parts of names (lm_head)"
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "PATTERN", "default": []}
    parser.add_argument("--exclude", help=f"layers to leave in float: {patterns}", **many)
    parser.add_argument("--include", help=f"layers to quantize (default: all): {patterns}", **many)
    shard = "split OUT into files of at most this size (default: %(default)s)"
    parser.add_argument("--max-shard-size", type=arguments.byte_count, default="4GB", metavar="SIZE", help=shard)
    parser.add_argument("--dtype", type=arguments.dtype, help="dtype of scales and kept tensors (default: unchanged)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--all", action="store_true", help=arguments.ALL)


def run(args: argparse.Namespace) -> CommandResult:
    """Quantize with a progress bar."""
    from .. import checkpoint

    with Progress("quantizing").shown() as progress:
        rows = checkpoint.quantize_checkpoint(
            args.source,
            args.target,
            args.scheme,
            include=args.include or None,
            exclude=args.exclude,
            progress=progress,
            max_shard_size=args.max_shard_size,
            overwrite=args.overwrite,
            dtype=args.dtype,
        )
    return _result(args, rows)


def _result(args: argparse.Namespace, rows: list[Any]) -> CommandResult:
    before, after = (sum(getattr(row, name) for row in rows) for name in ("bytes_before", "bytes_after"))
    actions = Counter(row.action for row in rows)
    data = {
        "source": str(args.source),
        "target": str(args.target),
        "scheme": args.scheme,
        "tensors": [{**vars(row), "shape": list(row.shape)} for row in rows],
        "actions": dict(actions),
        "bytes_before": before,
        "bytes_after": after,
    }
    share = f" ({after / before:.0%})" if before else ""
    counts = ", ".join(f"{number} {action}" for action, number in actions.most_common()) or "nothing to do"
    total = f"{len(rows)} tensors: {counts}; {size(before)} -> {size(after)}{share}, written to {args.target}"
    return CommandResult(data, [_table(rows, every=args.all), total])


def _table(rows: list[Any], *, every: bool) -> Table:
    from ..checkpoint.header import shown
    from ..model.grouping import grouped

    def looks(row: Any) -> tuple[str, str, str]:
        return "x".join(map(str, row.shape)), row.action, row.reason

    header = ("tensor", "shape", "result", "before", "after", "scheme or reason")
    lines = [(r.name, [r]) for r in rows] if every else grouped(rows, lambda r: str(r.name), looks)
    cells = []
    for label, together in lines:
        shape, action, reason = looks(together[0])
        before, after = (size(sum(getattr(r, key) for r in together)) for key in ("bytes_before", "bytes_after"))
        cells.append((shown(label), shape, action, before, after, reason))
    return Table(header, cells, state=2, right=frozenset({3, 4}))
