"""Every example of the README and the documentation runs, and prints what the page says it prints.

Python blocks run in order, one namespace per page. A `text` block right behind one is its output; a `console` block
holds `$ qcore ...` commands with theirs. `...` stands for whatever changes from machine to machine,
and numbers do not count under a comment `figures vary`.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import re
import shlex

import pages
import pytest
import torch

import qcore
from qcore.cli import main

_MATCH = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_MOST_NOT_RUN = 3


def same_output(wanted: str, got: str, vary: bool = False) -> bool:
    if vary:
        wanted, got = (re.sub(r"[0-9][0-9.,]*(?!\.)", "#", text) for text in (wanted, got))
    checker = doctest.OutputChecker()
    lines = ["".join(f"{line.rstrip()}\n" for line in text.strip().splitlines()) for text in (wanted, got)]
    return checker.check_output(*lines, _MATCH)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty directory, a cache of its own, and tables of a fixed width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("QCORE_BACKENDS", "QCORE_DISABLE", "QCORE_STRICT", "QCORE_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    yield
    qcore.configure(backends="", disable="", strict=False, verify="once")


def run_python(block, namespace, name):
    source = "\n" * block.line + block.body
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return printed.getvalue()


def commands(body):
    """(command, wanted output) pairs of a console block."""
    for part in ("\n" + body).split("\n$ ")[1:]:
        line, _, wanted = part.partition("\n")
        yield shlex.split(line, comments=True), wanted


def run_command(words):
    assert words[0] == "qcore", f"only qcore commands are shown as console blocks, not {words}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        main(words[1:])
    return printed.getvalue()


def check_page(page):
    namespace, printed = {"__name__": "__main__"}, None
    for block in pages.blocks(page):
        where = f"{pages.name(page)}:{block.line}"
        if block.kind == "python" and not block.not_run:
            printed = run_python(block, namespace, str(page))
        elif block.kind == "text" and block.follows and printed is not None:
            assert same_output(block.body, printed), f"{where} is not what is printed:\n{printed}"
            printed = None
        elif block.kind == "console" and not block.not_run:
            for words, wanted in commands(block.body):
                found = run_command(words)
                assert same_output(wanted, found, block.vary), f"{where}: {shlex.join(words)} prints\n{found}"


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_examples_run(page, elsewhere, with_plugin):
    for module in pages.needs(page):
        pytest.importorskip(module)
    if page.stem != "cuda":  # whose examples show what is printed without a GPU
        with_plugin(page.stem)
    torch._dynamo.reset()  # a reader's process has compiled nothing before
    check_page(page)


def test_few_examples_are_not_run_and_each_says_why():
    blocks = [(pages.name(page), block) for page in pages.PAGES for block in pages.blocks(page)]
    skipped = [(f"{name}:{block.line}", block.not_run) for name, block in blocks if block.not_run]
    here = [(where, reason) for where, reason in skipped if "runs it" not in reason]
    assert len(here) <= _MOST_NOT_RUN, here
    for where, reason in skipped:
        for test in re.findall(r"tests/\S+\.py", reason):
            assert (pages.ROOT / test).is_file(), where


def test_blocks_have_a_kind_that_is_known():
    kinds = {b.kind: f"{pages.name(page)}:{b.line}" for page in pages.PAGES for b in pages.blocks(page)}
    assert set(kinds) <= {"python", "console", "text", "sh", "toml"}, kinds


def test_a_wrong_output_would_be_seen():
    assert same_output("a ... c\n", "a b c\n")
    assert not same_output("a 1\n", "a 2\n")
    assert same_output("a 1.5 ms\n", "a 22 ms\n", vary=True)
    assert not same_output("a 1\n", "b 1\n", vary=True)
