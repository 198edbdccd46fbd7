"""Commands of `sh` blocks are not run, but they exist: options of `qcore`, sessions of nox."""

from __future__ import annotations

import re
import shlex

import pages
import pytest

from qcore.cli import app


def lines(page, program):
    """The words of each line of the `sh` blocks that starts with a program."""
    shown = "".join(block.body for block in pages.blocks(page) if block.kind == "sh")
    return [words for line in shown.splitlines() if (words := shlex.split(line, comments=True))[:1] == [program]]


def sessions(words):
    """The sessions that a call of nox names: those behind -s, up to the next option."""
    named = re.search(r" -s ((?:[a-z_]+ ?)+)", " ".join(words).partition(" -- ")[0] + " ")
    return set(named[1].split()) if named else set()


def is_accepted(words):
    try:
        app.build_parser().parse_args(words)
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize("page", pages.LINKED, ids=pages.name)
def test_options_of_qcore_exist(page):
    assert not [shlex.join(words) for words in lines(page, "qcore") if not is_accepted(words[1:])]


@pytest.mark.parametrize("page", pages.LINKED, ids=pages.name)
def test_nox_sessions_exist(page):
    known = set(re.findall(r"^def ([a-z]\w*)\(session", (pages.ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE))
    for words in lines(page, "nox"):
        assert sessions(words) <= known, shlex.join(words)


def test_a_wrong_command_would_be_seen():
    assert sessions(["nox", "-R", "-s", "docs", "site", "--", "x"]) == {"docs", "site"}
    assert is_accepted(["bench", "--rows", "1,16"])
    assert not is_accepted(["bench", "--no-such-option"])
