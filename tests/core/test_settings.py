from __future__ import annotations

import contextvars
import threading

import pytest

import qcore
from qcore.errors import QcoreError, QcoreWarning
from qcore.runtime import settings
from qcore.runtime.settings import Settings, current, parse_backends, parse_flag


def test_defaults():
    assert current() == Settings((), frozenset(), False, "once")


def test_argument_beats_using_beats_configure_beats_environment(monkeypatch):
    monkeypatch.setenv("QCORE_BACKENDS", "environment")
    assert current().order("linear") == ("environment",)
    qcore.configure(backends="configured")
    assert current().order("linear") == ("configured",)
    with qcore.using("outer"):
        assert current().order("linear") == ("outer",)
        with qcore.using("inner") as seen:
            assert seen.order("linear") == current().order("linear") == ("inner",)
            assert current(backends="argument").order("linear") == ("argument",)
        assert current().order("linear") == ("outer",)
    assert current().order("linear") == ("configured",)


def test_each_setting_has_its_own_precedence(monkeypatch):
    monkeypatch.setenv("QCORE_STRICT", "yes")
    monkeypatch.setenv("QCORE_VERIFY", "off")
    monkeypatch.setenv("QCORE_DISABLE", "a, b")
    qcore.configure(verify="always")
    with qcore.using(strict=False):
        assert current() == Settings((), frozenset({"a", "b"}), False, "always")


def test_using_merges_with_the_block_around_it():
    with qcore.using("cuda", strict=True), qcore.using(disable=("xla",)):
        assert current() == Settings((("*", ("cuda",)),), frozenset({"xla"}), True)


def test_an_empty_order_cancels_the_one_below(monkeypatch):
    monkeypatch.setenv("QCORE_BACKENDS", "cuda")
    with qcore.using(""):
        assert current().order("linear") == ()


def test_using_is_left_when_the_block_raises():
    with pytest.raises(KeyError), qcore.using("cuda"):
        raise KeyError
    assert current() == Settings()


def test_environment_is_read_at_each_use(monkeypatch):
    for name in ("cuda", "xla"):
        monkeypatch.setenv("QCORE_BACKENDS", name)
        assert current().order("linear") == (name,)


@pytest.mark.parametrize("name", ["QCORE_BACKENDS", "QCORE_DISABLE", "QCORE_STRICT", "QCORE_VERIFY"])
def test_an_empty_variable_says_nothing(monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert current() == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda", (("*", ("cuda",)),)),
        (" cuda , torch ,", (("*", ("cuda", "torch")),)),
        ("linear=xla;*=torch", (("linear", ("xla",)), ("*", ("torch",)))),
        ("embedding = torch ; cuda", (("embedding", ("torch",)), ("*", ("cuda",)))),
        (("cuda", " torch", ""), (("*", ("cuda", "torch")),)),
        ("", ()),
    ],
)
def test_backends(text, expected):
    assert parse_backends(text) == expected


def test_order_of_a_contract_falls_back_to_the_star():
    wanted = current(backends="linear=xla;*=torch")
    assert (wanted.order("linear"), wanted.order("conv2d")) == (("xla",), ("torch",))
    assert current(backends="linear=xla").order("embedding") == ()


def test_named_covers_order_and_disabled():
    assert current(backends="linear=xla;*=torch", disable="cuda").named() == {"xla", "torch", "cuda"}


def test_unknown_contract_is_an_error_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("QCORE_BACKENDS", "liner=xla")
    with pytest.raises(QcoreError, match=r"unknown contract 'liner'\. Did you mean 'linear'"):
        current()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        (" YES ", True),
        ("on", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off", False),
    ],
)
def test_flags(monkeypatch, text, value):
    assert parse_flag("X", text) is value
    monkeypatch.setenv("QCORE_STRICT", text)
    assert current().strict is value


@pytest.mark.parametrize("text", ["2", "ja", "y e s", "tru"])
def test_unclear_flags_are_errors_that_name_the_variable(monkeypatch, text):
    monkeypatch.setenv("QCORE_STRICT", text)
    with pytest.raises(QcoreError, match="QCORE_STRICT"):
        current()


@pytest.mark.parametrize("value", ["0", "off", 1, 0])
def test_strict_as_an_argument_is_a_boolean(value):
    with pytest.raises(QcoreError, match="True or False"):
        qcore.configure(strict=value)
    assert settings._configured == {}


def test_verify_modes(monkeypatch):
    monkeypatch.setenv("QCORE_VERIFY", "alway")
    with pytest.raises(QcoreError, match=r"QCORE_VERIFY is 'alway'; it must be one of off, once, always. Did you mean"):
        current()
    assert current is settings.current
    with pytest.raises(QcoreError, match="verify is 'never'"):
        qcore.configure(verify="never")


def test_unknown_arguments_are_errors():
    with pytest.raises(TypeError):
        current(backend="cuda")


def test_unknown_names_warn_once_with_a_suggestion(request_of):
    with qcore.using("torhc"), pytest.warns(QcoreWarning, match="no plugin is called 'torhc'.* Did you mean 'torch'"):
        decision = qcore.resolve(request_of())
    assert any("torhc" in hint for hint in decision.hints)
    with qcore.using("torhc", verify="off"):
        assert any("torhc" in hint for hint in qcore.resolve(request_of()).hints)  # and no second warning


def test_unknown_names_to_disable_warn_too(request_of):
    with qcore.using(disable="cuuda"), pytest.warns(QcoreWarning, match="no plugin is called 'cuuda'"):
        qcore.resolve(request_of())


def test_the_fallback_cannot_be_disabled_and_says_so(request_of):
    with qcore.using(disable="torch"), pytest.warns(QcoreWarning, match="cannot be disabled; strict=True"):
        assert qcore.resolve(request_of()).plugin == "torch"


def test_using_is_seen_in_its_own_thread_only():
    seen = {}

    def look(key):
        seen[key] = current().order("linear")

    with qcore.using("cuda"):
        plain = threading.Thread(target=look, args=("plain",))
        carried = threading.Thread(target=contextvars.copy_context().run, args=(look, "carried"))
        for thread in (plain, carried):
            thread.start()
            thread.join()
    assert seen == {"plain": (), "carried": ("cuda",)}


def test_threads_do_not_see_each_other():
    barrier, seen = threading.Barrier(4), {}

    def work(name):
        with qcore.using(name):
            barrier.wait()
            seen[name] = current().order("linear")
            barrier.wait()

    threads = [threading.Thread(target=work, args=(f"p{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {f"p{i}": (f"p{i}",) for i in range(4)}


def test_configure_is_seen_in_every_thread():
    qcore.configure(backends="cuda")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current().order("linear")))
    thread.start()
    thread.join()
    assert seen == [("cuda",)]
