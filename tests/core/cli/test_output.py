"""Tables, terminals, sizes, warnings and progress."""

import argparse
import io
import os
import subprocess
import sys
import warnings

import pytest
import torch

import qcore
from qcore import QcoreWarning
from qcore.cli import arguments, output, progress
from qcore.cli.output import CommandResult, Table, show, size

TABLE = Table(("name", "state", "ms"), [("a", "available", "1.5"), ("longer", "broken", "10.25")], 1, frozenset({2}))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Make standard output and error a terminal of 80 columns; gives what is written there."""

    def make():
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "80"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("NO_COLOR", raising=False)
        return stream

    return make


def test_plain_table():
    assert TABLE.plain().splitlines() == [
        "name    state         ms",
        "a       available    1.5",
        "longer  broken     10.25",
    ]


def test_plain_text_where_there_is_no_terminal(capsys):
    show(CommandResult(None, ["head", TABLE]), as_json=False)
    assert capsys.readouterr().out == f"head\n{TABLE.plain()}\n"


def test_colours_on_a_terminal(on_terminal):
    terminal = on_terminal()
    show(CommandResult(None, ["[not markup]", TABLE]), as_json=False)
    text = terminal.getvalue()
    assert "[not markup]" in text
    assert "\x1b[32mavailable" in text
    assert "\x1b[31mbroken" in text


def test_a_narrow_terminal_cuts_no_cell(on_terminal):
    reason = "plain torch ops, " * 10
    wide = Table(("tensor", "scheme", "why"), [("model.layers.0.self_attn.q_proj.weight" * 2, "w4a16-g32", reason)])
    narrow = Table(("plugin", "why"), [("torch", reason)])
    terminal = on_terminal()
    show(CommandResult(None, [wide, narrow]), as_json=False)
    printed = terminal.getvalue()
    assert wide.plain() in printed
    assert "\u2026" not in printed
    assert narrow.plain() not in printed  # its last column wraps


def test_a_dumb_terminal_is_none(on_terminal, monkeypatch):
    terminal = on_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not output.is_terminal(terminal)


class Writer:
    """What programs put in place of a stream, to write to a log."""

    write = flush = None


@pytest.mark.parametrize("stream", [None, Writer()])
def test_a_process_without_a_console(stream, tmp_path, monkeypatch):
    """A service, a program with windows alone: progress is shown if there is a terminal, which is asked first."""
    monkeypatch.setattr(sys, "stderr", stream)
    model = torch.nn.Sequential(torch.nn.Linear(32, 8))
    qcore.quantize_(model, "w8a16")
    qcore.save(model, tmp_path / "m.safetensors")
    qcore.load_(model, tmp_path / "m.safetensors")
    qcore.convert(tmp_path / "m.safetensors", tmp_path / "copy")
    assert qcore.report(model)


def test_a_closed_stream_is_no_terminal():
    stream = io.StringIO()
    stream.close()
    assert not output.is_terminal(stream)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("option", ["", "--json"])
@pytest.mark.skipif(os.name != "posix", reason="closes descriptors in a shell")
def test_commands_with_closed_streams(closed, option, model):
    command = f"{sys.executable} -m qcore quantize model.safetensors small.safetensors --scheme w8a16 {option} {closed}"
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True, cwd=model)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("3 quantized" in done.stdout or '"quantized": 3' in done.stdout) is (closed == "2>&-")
    assert (model / "small.safetensors").is_file()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8:strict"])
def test_names_that_the_output_cannot_encode(encoding, model, spawn):
    names = ["\u6a21.safetensors", os.fsdecode(b"\xff.safetensors")] if os.name == "posix" else ["\u6a21.safetensors"]
    commands = [("quantize", "model.safetensors", name, "--scheme", "w8a16") for name in names]
    for name, done in zip(names, spawn(*commands, PYTHONIOENCODING=encoding), strict=True):
        assert (done.returncode, done.stderr) == (0, "")
        assert "3 quantized" in done.stdout
        assert (model / name).is_file()


@pytest.mark.skipif(os.name != "posix", reason="other systems have a fixed encoding")
def test_names_that_the_system_cannot_encode(model, spawn):
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (done,) = spawn(("quantize", "model.safetensors", "\u6a21.safetensors", "--scheme", "w8a16"), **settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert (model / "\u6a21.safetensors").is_file()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.00 GiB")]
)
def test_sizes(count, text):
    assert size(count) == text


def test_what_others_print_goes_to_stderr(capfd):
    with output.stdout_kept_clean(True):
        print("python")
        os.system("echo native")
    print("result")
    out, err = capfd.readouterr()
    assert out == "result\n"
    assert {"python", "native"} <= set(err.split())


def test_warnings_are_their_text(capsys):
    with warnings.catch_warnings(), output.plain_warnings():
        warnings.simplefilter("always")
        warnings.warn("something is slow", QcoreWarning, stacklevel=1)
        warnings.warn("from elsewhere", UserWarning, stacklevel=1)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "warning: something is slow"
    assert second.startswith("warning: from elsewhere (UserWarning, ")


@pytest.mark.parametrize("unit", ["bytes", "steps"])
def test_progress_on_a_terminal(on_terminal, unit):
    terminal = on_terminal()
    with progress.Progress("working", unit).shown() as bar:
        bar(1, 2, "[layer]")
        bar(2, 2, "last")
    assert "working" in terminal.getvalue()


def test_progress_is_silent_elsewhere(capsys):
    with progress.Progress("working").shown() as bar:
        bar(1, 2, "x")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "count"), [("4GB", 4 * 10**9), ("512MiB", 512 << 20), ("1000", 1000), ("1.5k", 1500), ("2 TB", 2 * 10**12)]
)
def test_byte_counts(text, count):
    assert arguments.byte_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1GB", "GB", "4XB", "nan", "9" * 400, f"1.{'1' * 400}"])
def test_wrong_byte_counts(text):
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.byte_count(text)


@pytest.mark.parametrize("text", ["", "0", "x", "nan", "inf", "-2"])
def test_wrong_seconds(text):
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.seconds(text)


def test_counts():
    assert arguments.counts("1, 16,256") == (1, 16, 256)


def stopped(*steps):
    with progress.Progress("checking", unit="steps").shown() as told:
        for step in steps:
            told(*step)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("steps", "said"),
    [([(3, 9, "linear[w8a16]")], "checking: stopped after 3 of 9 steps, at linear[w8a16]\n"), ([], "")],
)
def test_who_stops_something_is_told_how_far_it_had_come(steps, said, capsys):
    with pytest.raises(KeyboardInterrupt):
        stopped(*steps)
    assert capsys.readouterr().err == said
