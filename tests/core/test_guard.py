"""The guard around steps of plugins: marks, the watchdog, signals, what is put back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch

import qcore
from qcore.discovery.registry import BUILTIN, PluginStatus, State
from qcore.errors import QcoreWarning
from qcore.resolving.binding import add_note
from qcore.runtime import disk_cache, guard, plain_text, process_state
from qcore.runtime.guard import StepError, guarded

PLUGIN = PluginStatus("mine", "qcore-mine", "1", State.AVAILABLE)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(guard, "_passed", set())
    monkeypatch.setattr(guard, "_state_changers", set())


def step(key="step", seconds=None, plugin=PLUGIN, size=""):
    return guarded(plugin, "its work", key, seconds, size)


def marks():
    return [record["key"] for record in disk_cache.records("running")]


def test_a_mark_stands_while_a_step_runs_for_the_first_time():
    with step():
        (mark,) = disk_cache.records("running")
        assert (mark["plugin"], mark["dist"], mark["version"], mark["doing"]) == ("mine", "qcore-mine", "1", "its work")
    assert not marks()
    with step():
        assert not marks()
    with step(size="40x72"):
        assert marks()


def test_the_fallback_leaves_no_mark():
    with step(plugin=PluginStatus(BUILTIN, "qcore", "1", State.AVAILABLE)):
        assert not marks()


def test_a_step_that_raised_is_marked_again():
    for _ in range(2):
        with pytest.raises(StepError, match="ValueError: x") as caught, step():  # noqa: PT012
            assert marks()
            raise ValueError("x")
        assert isinstance(caught.value.cause, ValueError)
    assert not marks()


@pytest.mark.parametrize("error", [GeneratorExit, SystemExit, StopIteration, BaseException])
def test_whatever_a_step_raises_leaves_as_one_kind_of_error(error):
    with pytest.raises(StepError), step():
        raise error


def test_a_quick_interrupt_leaves_nothing():
    with pytest.raises(KeyboardInterrupt), step():
        raise KeyboardInterrupt
    assert not disk_cache.crashed("step")


def test_an_interrupt_of_what_hangs_leaves_a_mark_that_says_so():
    told = pytest.warns(QcoreWarning, match="'mine' .qcore-mine 1. has spent over 0.05 seconds in its work")
    with told, pytest.raises(KeyboardInterrupt), step(seconds=0.05):  # noqa: PT012
        time.sleep(1.5)
        raise KeyboardInterrupt
    assert disk_cache.crashed("step")
    assert disk_cache.left_over("step") == "was interrupted after 2 seconds in an earlier process"
    disk_cache.clear_failures()
    assert not disk_cache.crashed("step")


def test_what_takes_long_and_ends_is_a_note_for_the_doctor():
    with pytest.warns(QcoreWarning, match="seconds in its work"), step(seconds=0.02):
        time.sleep(1.2)
    assert not marks()
    (record,) = disk_cache.records(disk_cache.FAILURES)
    assert (record["text"], record["slow"]) == ("its work took 1 seconds", True)


def test_where_warnings_are_errors_the_watchdog_lives(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with step(seconds=0.02):
            time.sleep(1.2)
    assert "has spent over 0.02 seconds in its work" in capsys.readouterr().err


@pytest.mark.parametrize("number", guard._TERMINATING)
def test_handlers_of_the_user_run_and_stay(number):
    heard = []
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        with step():
            os.kill(os.getpid(), number)
            assert heard == [number]
        os.kill(os.getpid(), number)
        assert heard == [number] * 2
    finally:
        signal.signal(number, before)


def test_what_a_handler_of_the_user_raises_is_not_the_plugins():
    def leave(*_):
        raise SystemExit(5)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit) as caught, step():
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 5
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not marks()


@pytest.mark.skipif(os.name == "nt", reason="no such signals on this system")
def test_native_code_that_hangs_is_named_and_can_be_ended():
    code = """
        import ctypes
        from qcore.runtime import guard
        from qcore.discovery.registry import PluginStatus, State
        with guard.guarded(PluginStatus("mine", "qcore-mine", "1", State.AVAILABLE), "its work", "step", 0.2):
            print("inside", flush=True)
            ctypes.CDLL(None).system(b"sleep 30")
    """
    command = [sys.executable, "-W", "always", "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert "seconds in its work" in process.stderr.readline()
        time.sleep(0.5)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        assert time.monotonic() - start < 15
    assert disk_cache.left_over("step") == "took over 0.2 seconds in an earlier process"


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with step():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_step_changed_is_put_back_with_one_warning():
    def meddle(key):
        with step(key):
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
        assert torch.get_default_dtype() is torch.float32
        assert torch.is_grad_enabled()

    with pytest.warns(QcoreWarning, match="'mine' .* changed process state in its work: default dtype, grad mode"):
        meddle("a")
    meddle("b")
    meddle("a")


@pytest.mark.parametrize("own", [None, "cpu", "meta"])
@pytest.mark.parametrize("around", [False, True])
def test_a_default_device_and_modes_are_put_back(own, around):
    """Also if the step began within a block that has ended, whose mode a default device takes away."""
    torch.set_default_device(own)
    place = torch.empty(0).device
    try:
        modes = process_state._function_modes()
        block = torch.device("cpu") if around else contextlib.nullcontext()
        # Torch itself raises an error at the end of a block around which and in which a default device is set.
        raised = pytest.raises(StepError, match="AssertionError") if own and around else contextlib.nullcontext()
        with pytest.warns(QcoreWarning, match="default device"), raised, step(f"{own} {around}"), block:
            torch.set_default_device("meta")
        assert torch.empty(0).device == place
        assert process_state._function_modes() == modes
    finally:
        torch.set_default_device(None)
    assert process_state._function_modes() == (None, None)


def test_random_numbers_go_on_as_if_nothing_had_been():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with step():
        torch.manual_seed(0)
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)


def test_a_snapshot_of_what_has_not_changed_changes_nothing():
    assert process_state.snapshot()() == []


def test_words_of_what_has_none():
    class Mute(Exception):  # noqa: N818
        def __str__(self):
            raise RuntimeError

        __repr__ = __str__

    assert plain_text.of_error(Mute()) == "Mute: (its message is unavailable)"
    assert plain_text.described(Mute()) == "a Mute whose repr raises"
    assert plain_text.plain("a\udcff\0\nb") == "a\\xdcff\\x00\nb"
    assert len(plain_text.plain("x" * 10**6)) < 3000
    assert plain_text.value({"a": [1, 10**30, Mute]}) == {"a": [1, "a number of 100 bits", str(Mute)]}


def test_an_exception_of_a_running_kernel_names_it(add_kernel):
    made = add_kernel("mine")
    layer = qcore.nn.QuantizedLinear.from_qtensor(qcore.quantize(torch.ones(16, 64), "int8"))
    layer(torch.ones(2, 64))
    for kernel in made.values():
        kernel.fault = "call"
    with pytest.raises(RuntimeError, match="no such instruction") as caught:
        layer(torch.ones(2, 64))
    text = "".join([*map(str, caught.value.args), *getattr(caught.value, "__notes__", ())])
    assert "raised by kernel 'mine.stub' of plugin 'mine' (qcore-mine 0." in text


def test_a_note_is_added_once():
    error = RuntimeError("x")
    for _ in range(2):
        add_note(error, "a note")
    assert [*getattr(error, "__notes__", ()), *error.args[0].splitlines()[1:]] == ["a note"]
