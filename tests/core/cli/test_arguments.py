"""Options that are given twice: each command either gathers the values or refuses, none drops the first."""

from __future__ import annotations

import argparse

import pytest

from qcore.cli import app
from qcore.cli.output import WRONG_USAGE

REPEATABLE = (argparse._AppendAction, argparse._ExtendAction)


def options():
    """Every option of every command that takes a value, with the names that it goes by."""
    (commands,) = (a for a in app.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                yield pytest.param(name, parser, action, id=f"{name} {action.option_strings[0]}")


VALUES = {"--device": "cpu", "--dtype": "bf16", "--contract": "linear", "--to": "gptq"}


@pytest.mark.parametrize(("command", "parser", "action"), list(options()))
def test_no_value_of_an_option_is_dropped(command, parser, action, capsys):
    flag = action.option_strings[0]
    value = VALUES.get(flag, "4")
    words = [command, *("x" for a in parser._actions if not a.option_strings), flag, value, f"{flag}={value}"]
    words += ["--scheme", "w8a16"] if command == "quantize" and flag != "--scheme" else []
    if isinstance(action, REPEATABLE):
        assert getattr(app.build_parser().parse_args(words), action.dest) == [value, value]
        assert "repeated" in action.help or action.nargs == "+"
    else:
        assert app.main(words) == WRONG_USAGE
        assert f"argument {flag}: may be given only once" in capsys.readouterr().err


def test_an_abbreviation_is_the_same_option(capsys):
    assert app.main(["bench", "--row", "1", "--rows", "32"]) == WRONG_USAGE
    assert "argument --rows: may be given only once; separate its values with commas" in capsys.readouterr().err


def test_what_is_given_once_is_all_that_a_command_sees():
    first, second = (app.build_parser().parse_args(["bench", "--rows", rows]) for rows in ("1", "2,3"))
    assert (first.rows, second.rows) == ((1,), (2, 3))
    assert all(name.isidentifier() for name in vars(first))
