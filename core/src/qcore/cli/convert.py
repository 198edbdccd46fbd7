"""Write a quantized checkpoint in another tool's format, or another tool's in qcore's; no weight is changed."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import arguments
from .output import CommandResult, size
from .progress import Progress

NAME = "convert"
HELP = "convert a quantized checkpoint between formats"
EXAMPLES = (
    "qcore convert quantized for-vllm --to gptq --dtype fp16",
    "qcore convert for-vllm copy.safetensors --json",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``qcore convert``."""
    parser.add_argument("source", type=Path, metavar="SRC", help="a safetensors file, or a directory of any tool")
    parser.add_argument(
        "target", type=Path, metavar="DST", help="a directory; a .safetensors file for qcore, a .gguf or .onnx file"
    )
    choices = ("qcore", "gptq", "awq", "compressed-tensors", "gguf", "onnx", "onnx-qdq")
    parser.add_argument("--to", choices=choices, default="qcore", help="the format of DST (default: %(default)s)")
    parser.add_argument("--dtype", type=arguments.dtype, help="round scales and float tensors to it (default: keep)")
    shard = "split DST into files of at most this size (default: %(default)s)"
    parser.add_argument("--max-shard-size", type=arguments.byte_count, default="4GB", metavar="SIZE", help=shard)
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")


def run(args: argparse.Namespace) -> CommandResult:
    """Convert with a progress bar."""
    from .. import checkpoint

    with Progress("converting").shown() as progress:
        done = checkpoint.convert(
            args.source,
            args.target,
            args.to,
            dtype=args.dtype,
            progress=progress,
            max_shard_size=args.max_shard_size,
            overwrite=args.overwrite,
        )
    data = {
        "source": str(args.source),
        "target": str(args.target),
        "method": done.method,
        "to": done.to,
        "weights": list(done.weights),
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
    }
    sizes = f"{size(done.bytes_before)} -> {size(done.bytes_after)}"
    read = f"read by importer {done.method}" if done.method else "read as qcore's"
    count = f"{len(done.weights)} weight{'s' if len(done.weights) != 1 else ''}"
    return CommandResult(data, [f"{count}, {read}; {sizes}, written as {done.to} to {args.target}"])
