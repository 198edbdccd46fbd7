"""Every command in a process of its own, with and without --json, and every example that --help shows."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import importlib_metadata
import pytest
from grids import sampled

from qcore.cli import app
from qcore.cli.output import FAILED, INTERRUPTED, OK, UNREAD, WRONG_USAGE
from qcore.resolving import offers, resolver

SMALL = ("--n", "64", "--k", "128", "--rows", "1,3", "--seconds", "0.001")

# name: (arguments, exit code, something that the text for people says)
COMMANDS = {
    "doctor": ((), OK, "No problems found."),
    "plugins": ((), OK, "available"),
    "explain": (("w4a16-g128", "--rows", "1"), OK, "selected"),
    "quantize": (("model.safetensors", "small.safetensors", "--scheme", "w4a16-g32", "--overwrite"), OK, "5 tensors:"),
    "convert": (("quantized", "neutral.safetensors", "--overwrite"), OK, "2 weights, read as qcore's; "),
    "inspect": (("model.safetensors",), OK, "layers.0.weight"),
    "bench": (("--scheme", "w8a16", *SMALL), OK, "torch.plain.linear"),
    "tune": (("--scheme", "w8a16", *SMALL), OK, "1 weights measured"),
    "conformance": (
        ("torch", "--scheme", "w8a16", "--contract", "embedding", "--select", "embedding["),
        OK,
        "0 failed",
    ),
    "new-plugin": (("acme", "--directory"), OK, "pip install"),
}


def test_the_table_names_every_command():
    assert [command.NAME for command in app._COMMANDS] == list(COMMANDS)


WAYS = [(name, json_flag) for name in COMMANDS for json_flag in ("", "--json")]


def assert_done(name, json_flag, call):
    """Hold what ``call(*arguments)`` gives, exit code, output and errors, against the table."""
    arguments, code, text = COMMANDS[name]
    place = (f"new{json_flag}",) if name == "new-plugin" else ()
    found, out, err = call(name, *arguments, *place, *filter(None, [json_flag]))
    assert (found, err) == (code, ""), out
    if json_flag:
        assert json.loads(out) is not None
    else:
        assert text in out


@pytest.mark.parametrize(("name", "json_flag"), WAYS)
def test_every_command(run, model, monkeypatch, name, json_flag):
    monkeypatch.chdir(model)
    assert_done(name, json_flag, run)


@pytest.mark.parametrize(("name", "json_flag"), sampled(WAYS, 4))
def test_every_command_in_a_process_of_its_own(spawn, model, name, json_flag):
    def call(*line):
        (done,) = spawn(line)
        return done.returncode, done.stdout, done.stderr

    assert_done(name, json_flag, call)


NOT_RUN = {
    "qcore conformance vulkan --output conformance.json --html conformance.html": "needs the plugin",
    "qcore conformance torch --scheme w8a16 --contract linear": "the kit has tests of its own",
    "qcore doctor --timeout 60 --json": "differs from the first in numbers only",
}


def with_options(words, options):
    """The words of a command with these options instead of the values that it gives them."""
    kept = [word for i, word in enumerate(words) if word not in options and (i == 0 or words[i - 1] not in options)]
    return [*kept, *(part for option in options.items() for part in option)]


def test_the_examples_of_help_work(run, model, monkeypatch):
    monkeypatch.chdir(model)
    monkeypatch.setenv("HOME", str(model))
    examples = [line for command in app._COMMANDS for line in command.EXAMPLES]
    assert set(examples) >= NOT_RUN.keys()
    for line in examples:
        if line in NOT_RUN:
            continue
        words = [word.replace("~", str(model)) for word in shlex.split(line)[1:]]
        if words[0] in ("bench", "tune"):
            words = with_options(words, {"--seconds": "0.001", "--n": "64", "--k": "64"})
        code, out, err = run(*words)
        assert code == OK, (line, out, err)
        assert "--json" not in words or json.loads(out)


def test_help_shows_examples_and_exit_codes(run):
    code, out, _ = run("--help")
    assert code == OK
    for command in app._COMMANDS:
        assert f"\n    {command.NAME} " in out
        _, text, _ = run(command.NAME, "--help")
        assert all(f"  {line}" in text for line in command.EXAMPLES)
        assert "exit codes: 0 done" in text


def test_version(run):
    code, out, _ = run("--version")
    assert code == OK
    assert out.startswith("qcore 26.")


@pytest.mark.parametrize("line", ["--help", "--version", *(f"{name} -h" for name in COMMANDS)])
def test_help_and_version_do_without_torch(line, run):
    (entry,) = importlib_metadata.entry_points(group="console_scripts", name="qcore")
    forbidden = "import sys; sys.modules.update(torch=None, numpy=None)"
    code = f"{forbidden}; from {entry.module} import {entry.attr} as main; sys.exit(main())"
    command = [sys.executable, "-W", "error", "-c", code, *line.split()]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == run(*line.split())


def test_the_entry_point_runs_commands(model):
    # After -- a word is no option, whatever it looks like: the command runs and says that there is no such file.
    code = "from qcore_command import main; raise SystemExit(main())"
    for line, expected in ((["inspect", "model.safetensors"], OK), (["inspect", "--", "--help"], WRONG_USAGE)):
        done = subprocess.run(
            [sys.executable, "-c", code, *line], check=False, capture_output=True, text=True, cwd=model
        )
        assert done.returncode == expected, done.stderr
        assert "Traceback" not in done.stderr


def test_ctrl_c_while_torch_is_imported(tmp_path):
    # A dataclass's methods are text that is executed, too.
    stand_in = 'exec("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")\n'
    (tmp_path / "torch.py").write_text(stand_in, encoding="utf-8")
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += f"; sys.path.insert(0, {str(tmp_path)!r}); from qcore_command import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "plugins"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "stopped\n")


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("", WRONG_USAGE, "required: COMMAND"),
        ("expplain", WRONG_USAGE, "Did you mean 'explain'?"),
        ("quantise a b", WRONG_USAGE, "Did you mean 'quantize'?"),
        ("explain w8a16 --contract linaer", WRONG_USAGE, "Did you mean 'linear'?"),
        ("report", WRONG_USAGE, "invalid choice: 'report'"),
        ("explain", WRONG_USAGE, "SCHEME"),
        ("explain w4a16-g12x", WRONG_USAGE, "Did you mean 'w4a16-g128'?"),
        ("explain w8a16 --dtype int3", WRONG_USAGE, "bfloat16"),
        ("explain w8a16 --device tpu9000", WRONG_USAGE, "is not a torch device"),
        ("explain w8a16 --n 0", WRONG_USAGE, "positive integer"),
        ("explain w8a16 --disable", WRONG_USAGE, "expected one argument"),
        ("inspect nowhere.safetensors", WRONG_USAGE, "nowhere.safetensors"),
        ("quantize nowhere out --scheme w8a16", WRONG_USAGE, "nowhere"),
        ("quantize a b --scheme w8a16 --max-shard-size huge", WRONG_USAGE, "4GB"),
        ("tune --seconds -1", WRONG_USAGE, "positive number of seconds"),
        ("conformance nobody", WRONG_USAGE, "nobody"),
        ("new-plugin My-Chip", WRONG_USAGE, "Did you mean 'my_chip'?"),
    ],
)
def test_what_is_wrong_is_said_on_stderr(run, tmp_path, monkeypatch, line, code, text):
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(line))[0] == code
    found, out, err = run(*shlex.split(line))
    assert (found, out) == (code, "")
    assert text in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(run):
    code, out, err = run("explain", "w4", "--debug")
    assert (code, out) == (WRONG_USAGE, "")
    assert "Traceback" in err


def test_ctrl_c(run, monkeypatch):
    def interrupted(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(app.plugins, "run", interrupted)
    code, _, err = run("plugins")
    assert (code, err) == (130, "stopped\n")


def test_a_reader_that_leaves_is_no_accident(tmp_path):
    command = [sys.executable, "-m", "qcore", "plugins"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as ended:
        ended.stdout.close()
        assert ended.stderr.read() == ""
    assert ended.returncode == UNREAD


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written(tmp_path):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "qcore", "plugins"]
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == WRONG_USAGE
    assert done.stderr.startswith("qcore: standard output cannot be written: No space left on device.\n")


def test_explain_exits_with_1_where_nobody_serves(run, monkeypatch):
    monkeypatch.setattr(offers, "offers_for", list)
    monkeypatch.setattr(resolver, "ask", lambda status, *_: [offers.row_of(status, "refused", "not today")])
    code, out, _ = run("explain", "w8a16", "--n", "8", "--k", "8")
    assert code == FAILED
    assert "no kernel supports this request" in out
    assert "not today" in out


def test_explain_obeys_its_settings(run_json, add_kernel):
    add_kernel("fast")
    arguments = ("explain", "w8a16", "--n", "16", "--k", "64")
    assert run_json(*arguments)[1]["plugin"] == "fast"
    assert run_json(*arguments, "--backends", "torch")[1]["plugin"] == "torch"
    _, decision = run_json(*arguments, "--disable", "fast")
    assert [row["stage"] for row in decision["candidates"] if row["plugin"] == "fast"] == ["blocked"]


def test_a_plugin_that_prints_does_not_spoil_the_json(spawn, install):
    folder = install("noisy", "import os\nprint('python')\nos.system('echo native')\nraise ValueError('no')\n")
    (done,) = spawn(["explain", "w8a16", "--json"], PYTHONPATH=str(folder))
    assert json.loads(done.stdout)["plugin"] == "torch"
    assert "python" in done.stderr
    assert "native" in done.stderr
