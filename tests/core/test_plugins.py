from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from types import ModuleType

import pytest

import qcore
from qcore.discovery.kernels import Available, Unavailable
from qcore.discovery.registry import PluginStatus, Registry, State, _Entry
from qcore.errors import PluginError, QcoreWarning
from qcore.formats import layouts as known_layouts

plugins = importlib.import_module("qcore.discovery.registry")  # `qcore.plugins` is the function of that name
NEXT_GROUP = "qcore.plugins.v2"


def module(**hooks):
    made = ModuleType("made")
    vars(made).update({name: qcore.hookimpl(function) for name, function in hooks.items()})
    return made


def entry(name="p", plugin=None, load=None, **more):
    return _Entry(name, f"dist-{name}", "1.0", load or (lambda: plugin), **more)


def status_of(item, disabled=frozenset()):
    return Registry([item]).status(item.name, disabled)


def here():
    return Available("here")


def probing(answer):
    return entry(plugin=module(qcore_probe=answer))


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def warns(text):
    return pytest.warns(QcoreWarning, match=text)


def test_available():
    found = Available("a device", "driver 1", {"memory": 3})
    status = status_of(probing(lambda: found))
    assert status == PluginStatus("p", "dist-p", "1.0", State.AVAILABLE, "", "a device", "driver 1", status.seconds)
    assert status.details == {"memory": 3}
    assert 0 < status.seconds < 5
    assert not status.broken


def test_a_plugin_without_a_probe_is_available():
    assert status_of(entry(plugin=module(qcore_linear=lambda request: None))).state is State.AVAILABLE


def test_blocked_without_import():
    item = entry(load=lambda: pytest.fail("imported"))
    status = status_of(item, frozenset({"p"}))
    assert (status.state, status.reason, status.broken) == (State.BLOCKED, "disabled by the user", False)


def test_another_api_version_is_reported_without_import():
    item = entry(load=lambda: pytest.fail("imported"), group=NEXT_GROUP)
    with warns("wrong API: made for qcore.plugins.v2, this qcore supports qcore.plugins.v1; upgrade qcore"):
        status = status_of(item)
    assert status.state is State.WRONG_API
    assert status.broken


def test_an_older_plugin_is_the_one_to_upgrade():
    with warns("upgrade dist-p"):
        status_of(entry(group="qcore.plugins.v0"))


def test_name_conflict_keeps_the_first_and_names_both():
    first, second = probing(here), entry(load=lambda: pytest.fail("imported"))
    second.dist = "other"
    registry = Registry([first, second])
    with warns("the name 'p' is taken by dist-p 1.0; uninstall one"):
        statuses = registry.statuses()
    assert [(s.dist, s.state) for s in statuses] == [("dist-p", State.AVAILABLE), ("other", State.NAME_CONFLICT)]
    assert registry.conflicts()[0].broken


def test_disabling_a_name_silences_its_conflict():
    registry = Registry([entry(), entry()])
    assert registry.status("p", frozenset({"p"})).state is State.BLOCKED


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("libcudart is missing"), "ImportError: libcudart is missing"),
        (SystemExit(3), r"it called sys.exit\(3\)"),
        (RuntimeError(""), "RuntimeError"),
    ],
)
def test_import_that_raises_is_one_warning(error, words):
    registry = Registry([entry(load=raising(error))])
    with warns(f"'p' .dist-p 1.0. cannot be used: import failed: {words}") as caught:
        assert registry.status("p").state is State.IMPORT_FAILED
    assert "QCORE_DISABLE=p" in str(caught[0].message)
    assert registry.status("p").broken  # and no second warning
    assert registry.error("p") is error


def test_an_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        status_of(entry(load=raising(KeyboardInterrupt())))


def test_a_misspelt_hook_is_found_with_a_suggestion():
    item = entry(plugin=module(qcore_liner=lambda request: None))
    registry = Registry([item])
    with warns("registration failed: unknown hook 'qcore_liner'. Did you mean 'qcore_linear'"):
        registry.status("p")
    assert item.manager is None


def test_an_optional_hook_of_a_newer_qcore_is_no_mistake():
    future = qcore.hookimpl(optionalhook=True)(lambda request: None)
    plugin = module(qcore_probe=here)
    plugin.qcore_attention = future
    assert status_of(entry(plugin=plugin)).state is State.AVAILABLE


def test_a_plugin_without_hooks():
    with warns("it implements no hook; mark its functions with @qcore.hookimpl"):
        status_of(entry(plugin=ModuleType("unmarked")))


def test_a_hook_that_wants_unknown_arguments():
    with warns("registration failed: PluginValidationError"):
        assert status_of(entry(plugin=module(qcore_linear=lambda request, batch: None))).broken


def test_a_hook_may_take_fewer_arguments():
    assert status_of(entry(plugin=module(qcore_linear=lambda: None))).state is State.AVAILABLE


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (raising(OSError("no driver")), "OSError: no driver"),
        (raising(SystemExit("bye")), r"it called sys.exit\('bye'\)"),
        (lambda: None, "returned None instead of Available or Unavailable"),
        (lambda: False, "returned False instead"),
        (lambda: Unavailable(""), "returned Unavailable"),
        (raising(TimeoutError()), "TimeoutError"),
    ],
)
def test_probes_that_fail(answer, words):
    with warns(f"probe failed: .*{words}"):
        assert status_of(probing(answer)).state is State.PROBE_FAILED


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(plugins, "PROBE_SECONDS", 0.05)
    forever = threading.Event()
    start = time.perf_counter()
    with warns("its probe did not answer within 0.05 seconds"):
        assert status_of(probing(lambda: forever.wait(60))).state is State.PROBE_FAILED
    assert time.perf_counter() - start < 5
    forever.set()


def test_a_device_that_is_not_here_is_silent():
    status = status_of(probing(lambda: Unavailable("no such device")))
    assert (status.state, status.reason, status.broken) == (State.UNAVAILABLE, "no such device", False)


def test_a_broken_device_is_one_warning():
    registry = Registry([probing(lambda: Unavailable("driver 5 is too old; install 6", broken=True))])
    with warns("unavailable: driver 5 is too old; install 6"):
        registry.status("p")
    assert registry.status("p").broken


def test_a_probe_that_ended_an_earlier_process_is_not_run_again():
    plugins_code = """
        import os
        from types import ModuleType
        import qcore
        from qcore.discovery.registry import Registry, _Entry
        plugin = ModuleType("plugin")
        plugin.qcore_probe = qcore.hookimpl(lambda: os._exit(7))
        Registry([_Entry("p", "dist-p", "1.0", lambda: plugin)]).status("p")
    """
    code = [sys.executable, "-c", textwrap.dedent(plugins_code)]
    assert subprocess.run(code, check=False).returncode == 7
    with warns("ended an earlier process; run 'qcore doctor'"):
        status = status_of(probing(lambda: pytest.fail("probed")))
    assert status.state is State.PROBE_FAILED


def test_an_import_that_ended_a_process_is_not_run_again():
    code = """
        import os
        from qcore.discovery.registry import Registry, _Entry
        Registry([_Entry("p", "dist-p", "1.0", lambda: os._exit(7))]).status("p")
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 7
    with warns("ended an earlier process; run 'qcore doctor'"):
        status = Registry([entry("p", load=lambda: pytest.fail("imported"))]).status("p")
    assert status.state is State.IMPORT_FAILED


def test_a_broken_neighbour_costs_nobody_else():
    items = [entry("bad", load=raising(ImportError())), entry("good", module(qcore_probe=here))]
    with pytest.warns(QcoreWarning):
        states = [status.state for status in Registry(items).statuses()]
    assert states == [State.IMPORT_FAILED, State.AVAILABLE]


def test_warnings_as_errors_leave_a_settled_status():
    registry = Registry([entry(load=raising(ImportError("x")))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(QcoreWarning):
            registry.status("p")
        assert registry.status("p").state is State.IMPORT_FAILED


def test_each_plugin_is_brought_up_once_by_many_threads():
    imports = []

    def load():
        imports.append(1)
        time.sleep(0.02)
        return module(qcore_probe=here)

    registry = Registry([entry(load=load)])
    threads = [threading.Thread(target=registry.status, args=("p",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(imports) == 1


def test_call_asks_one_plugin_only():
    items = [entry(name, module(qcore_linear=lambda request, name=name: f"{name} {request}")) for name in "ab"]
    registry = Registry(items)
    registry.statuses()
    assert registry.call("a", "qcore_linear", request=1) == "a 1"
    assert registry.implements("a", "qcore_linear")
    assert not registry.implements("a", "qcore_conv2d")
    assert registry.call("a", "qcore_conv2d", request=1) is None


class _Layout(known_layouts.Layout):
    name = "upside_down"
    dtypes = ("int8",)

    def encode(self, codes):
        return codes.flip(0).contiguous()

    def decode(self, data, k):
        return data.flip(0)

    def check(self, data, n, k):
        pass


@pytest.fixture
def layouts(monkeypatch):
    monkeypatch.setattr(known_layouts, "_LAYOUTS", dict(known_layouts._LAYOUTS))


def test_layouts_of_a_plugin_are_known_once_somebody_names_one(layouts, add_plugin):
    add_plugin("layouts", formats=lambda: [_Layout()])
    assert str(qcore.Format.parse("int8/upside_down")) == "int8/upside_down"


def test_a_bad_layout_fails_the_registration(layouts):
    with warns("registration failed: FormatError"):
        status_of(entry(plugin=module(qcore_formats=lambda: ["plain"])))


def test_add_replaces_a_plugin_of_the_same_name(add_plugin):
    before = plugins.registry.generation
    for device in ("first", "second"):
        add_plugin("mine", probe=lambda device=device: Available(device))
        assert plugins.registry.status("mine").device == device
    assert plugins.registry.generation > before
    plugins.registry.remove("mine")
    assert "mine" not in plugins.registry.entries()


def test_the_fallback_is_listed_once_and_last(add_plugin):
    add_plugin("zebra", probe=here)
    names = [status.name for status in qcore.plugins()]
    assert names.count("torch") == 1
    assert names[-1] == "torch"
    assert qcore.plugins()[-1].driver.startswith("torch ")


def test_the_listing_obeys_the_settings(add_plugin):
    add_plugin("mine", probe=lambda: pytest.fail("probed"))
    with qcore.using(disable="mine"):
        assert {status.name: status.state for status in qcore.plugins()}["mine"] is State.BLOCKED


def test_the_distribution_called_by_a_name_has_it():
    impostor = entry("vulkan", load=lambda: pytest.fail("imported"))
    impostor.dist, owner = "aaa-impostor", probing(here)
    owner.name, owner.dist = "vulkan", "Qcore_Vulkan"
    with warns("the name 'vulkan' is taken by Qcore_Vulkan 1.0; uninstall one") as caught:
        statuses = Registry([impostor, owner]).statuses()
    assert [(s.dist, s.state) for s in statuses] == [
        ("Qcore_Vulkan", State.AVAILABLE),
        ("aaa-impostor", State.NAME_CONFLICT),
    ]
    assert "QCORE_DISABLE" not in str(caught[0].message)  # which would disable the other one


@pytest.mark.parametrize("name", ["nib ble,", "", "a;b", "linear=a", "*", "-a", "a\n", "x" * 65, "n\xefbble"])
def test_names_that_no_list_can_hold_are_refused_without_import(name):
    with warns("bad name: .* cannot be written in a list of names") as caught:
        status = status_of(entry(name, load=lambda: pytest.fail("imported")))
    assert (status.state, status.broken) == (State.BAD_NAME, True)
    assert "QCORE_DISABLE" not in str(caught[0].message)


@pytest.mark.parametrize("group", ["qcore.plugins", "qcore.plugin", "qcore_plugins.v1", "Qcore.Plugins.v1"])
def test_a_group_without_the_right_version_is_reported(group, monkeypatch):
    points = [_Point("old", group, None), _Point("other", "qcore.pluginsandmore", None)]
    monkeypatch.setattr("importlib_metadata.entry_points", lambda: points)
    (found,) = plugins._scan()
    with warns(f"wrong API: made for {group}, this qcore supports qcore.plugins.v1; upgrade"):
        assert status_of(found).state is State.WRONG_API


def test_the_fallback_cannot_be_disabled_so_nobody_is_told_to():
    broken = PluginStatus("torch", "qcore", "1", State.IMPORT_FAILED, "x", broken=True)
    with warns("'torch' .* cannot be used") as caught:
        plugins._warn_if_broken(broken)
    assert "QCORE_DISABLE" not in str(caught[0].message)


class _Point:
    def __init__(self, name, group, dist):
        self.name, self.group, self.dist = name, group, dist
        self.load = lambda: None


class _Dist:
    def __init__(self, **files):
        self.files = files

    def read_text(self, name):
        return self.files.get(name)


class _HalfRemoved:
    def read_text(self, name):
        raise TypeError("no metadata")


def test_scanning_takes_every_version_of_the_group_and_no_other(monkeypatch):
    dist = _Dist(METADATA="Metadata-Version: 2.4\nName: d\nVersion: 2\nSummary: x\n\nName: not this\n")
    older = _Dist(**{"PKG-INFO": "Name: egg\nVersion: 1.0\n"})
    points = [
        _Point("new", NEXT_GROUP, dist),
        _Point("other", "console_scripts", dist),
        _Point("ours", "qcore.plugins.v1", dist),
        _Point("half", "qcore.plugins.v1", _HalfRemoved()),
        _Point("egg", "qcore.plugins.v1", older),
        _Point("empty", "qcore.plugins.v1", _Dist()),
        _Point("none", "qcore.plugins.v1", None),
    ]
    monkeypatch.setattr("importlib_metadata.entry_points", lambda: points)
    found = [(item.name, item.dist, item.version) for item in plugins._scan()]
    unknown = [(name, "?", "?") for name in ("empty", "half", "none")]
    assert found == [*unknown, ("ours", "d", "2"), ("egg", "egg", "1.0"), ("new", "d", "2")]


def test_a_failed_scan_is_tried_again(monkeypatch):
    registry = Registry()
    monkeypatch.setattr(plugins, "_scan", raising(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        registry.entries()
    monkeypatch.setattr(plugins, "_scan", list)
    assert list(registry.entries()) == ["torch"]


def test_another_distribution_cannot_take_the_fallbacks_name(monkeypatch):
    monkeypatch.setattr(plugins, "_scan", lambda: [entry("torch", load=lambda: pytest.fail("imported"))])
    registry = Registry()
    with warns("the name 'torch' is taken by qcore"):
        assert registry.status("torch").dist == "qcore"


def test_a_named_broken_plugin_fails_with_the_original_error(add_plugin, request_of):
    error = OSError("no driver")
    add_plugin("mine", probe=raising(error))
    with pytest.warns(QcoreWarning), qcore.using("mine"), pytest.raises(PluginError, match="probe failed") as caught:
        qcore.resolve(request_of())
    assert caught.value.__cause__ is error
    assert qcore.resolve(request_of()).plugin == "torch"


def test_a_named_plugin_on_a_broken_device_fails_loudly(add_plugin, request_of):
    add_plugin("mine", probe=lambda: Unavailable("driver too old", broken=True))
    with pytest.warns(QcoreWarning), pytest.raises(PluginError, match="driver too old"):
        qcore.resolve(request_of(), backends="mine")


def test_a_named_plugin_that_is_not_for_this_machine_gives_way(add_plugin, request_of):
    add_plugin("mine", probe=lambda: Unavailable("no such device"))
    decision = qcore.resolve(request_of(), backends="mine")
    assert decision.plugin == "torch"
    assert "no such device" in str(decision)


def test_discovery_time(record_property):
    # Time of its own thread, as other work on the machine is not what is tested.
    code = "import time, qcore\nt = time.thread_time()\nqcore.plugins()\nprint(time.thread_time() - t)"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    record_property("discovery_ms", float(out.stdout) * 1e3)
    assert float(out.stdout) < 2  # the figure to reach is 100 ms; benchmarks/overhead.py measures it
