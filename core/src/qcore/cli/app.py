"""The argument parser of ``qcore``, and the handling of errors, warnings and exit codes around every command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from .. import _version
from ..errors import QcoreError
from . import bench, conformance, convert, doctor, explain, inspect, new_plugin, plugins, quantize, tune
from .arguments import Parser
from .output import (
    INTERRUPTED,
    UNREAD,
    WRONG_USAGE,
    CommandResult,
    any_text_printed,
    plain_warnings,
    show,
    stdout_kept_clean,
)

_COMMANDS: tuple[Any, ...] = (
    doctor,
    plugins,
    explain,
    quantize,
    convert,
    inspect,
    bench,
    tune,
    conformance,
    new_plugin,
)

_EXIT_CODES = """\
exit codes: 0 done; 1 a check failed; 2 wrong usage or bad input;
130 stopped with Ctrl-C; 141 the reader of the output has ended"""
_EXAMPLE = """\
examples:
  qcore doctor
  qcore quantize model.safetensors small.safetensors --scheme w4a16-g128
  qcore explain w4a16-g128 --device cpu
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks in descriptions and examples, and widens the column of option names."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **settings})

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:  # argparse ignores the extra indentation of commands
            self._action_max_length += 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``qcore`` with all of its commands."""
    parser = Parser(
        prog="qcore",
        description="Quantize once, run on any accelerator, and always know why it ran there.",
        epilog=f"{_EXAMPLE}\n{_EXIT_CODES}",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"qcore {_version.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        _add(commands, command)
    return parser


def _add(commands: Any, command: Any) -> None:
    examples = "\n".join(f"  {line}" for line in command.EXAMPLES)
    parser = commands.add_parser(
        command.NAME,
        help=command.HELP,
        description=command.__doc__,
        epilog=f"examples:\n{examples}\n\n{_EXIT_CODES}",
        formatter_class=_Help,
    )
    command.add(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=command.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``qcore`` command and return its exit code."""
    with any_text_printed():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    try:
        parsed = build_parser().parse_args(arguments)
    except SystemExit as ended:  # argparse has printed the help or an error
        return ended.code if isinstance(ended.code, int) else WRONG_USAGE
    except QcoreError as error:
        return _report(error, debug=False)
    return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    try:
        with plain_warnings():
            with stdout_kept_clean(parsed.json):
                result = parsed.run(parsed)
            _print(result, parsed.json)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe, as in `qcore plugins | head -1`; buffered output must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except (QcoreError, OSError) as error:
        return _report(error, parsed.debug)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _report(
            error, parsed.debug, "there is not enough memory.\nUse smaller sizes, or a machine with more memory."
        )
    return int(result.code)


def _print(result: CommandResult, as_json: bool) -> None:
    try:
        show(result, as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        what = f"standard output cannot be written: {error.strerror or error}."
        raise QcoreError(f"{what}\nThe command has done its work; only its output is lost.") from error


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch found no memory; for the CPU torch has no class of such errors."""
    named = {"MemoryError", "OutOfMemoryError"} & {kind.__name__ for kind in type(error).__mro__}
    return bool(named) or "DefaultCPUAllocator" in str(error)


def _report(error: BaseException, debug: bool, text: str = "") -> int:
    if debug:
        traceback.print_exception(error)
    else:
        print(f"qcore: {text or error}", file=sys.stderr)
    return WRONG_USAGE
