"""List the installed plugins and whether each is available on this machine."""

from __future__ import annotations

import argparse

from .output import CommandResult, no_warnings

NAME = "plugins"
HELP = "list the installed plugins"
EXAMPLES = ("qcore plugins", "qcore plugins --json")


def add(parser: argparse.ArgumentParser) -> None:
    """``qcore plugins`` has no arguments of its own."""


def run(_args: argparse.Namespace) -> CommandResult:
    """Load and probe every plugin in this process, as a program would."""
    from .. import plugins
    from .output import plugin_table
    from .probing import as_json

    with no_warnings():
        statuses = plugins()
    return CommandResult([as_json(status) for status in statuses], [plugin_table(statuses)])
