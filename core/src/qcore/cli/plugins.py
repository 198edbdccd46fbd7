"""List the plugins that are installed and whether each can be used here."""

from __future__ import annotations

import argparse

from .output import CommandResult, no_warnings

NAME = "plugins"
HELP = "list of installed plugins"
EXAMPLES = ("qcore plugins", "qcore plugins --json")


def add(parser: argparse.ArgumentParser) -> None:
    """``qcore plugins`` has no arguments of its own."""


def run(_args: argparse.Namespace) -> CommandResult:
    """Bring every plugin up in this process, as a program would."""
    from .. import plugins
    from .output import plugin_table
    from .probing import as_json

    with no_warnings():
        statuses = plugins()
    return CommandResult([as_json(status) for status in statuses], [plugin_table(statuses)])
