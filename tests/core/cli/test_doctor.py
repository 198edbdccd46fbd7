"""`qcore doctor` with every plugin broken, each in its own way."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from processes import installed_plugins

import qcore
from qcore import Available
from qcore.cli import health, probe, probing
from qcore.cli.doctor import Finding
from qcore.discovery import hardware
from qcore.discovery.registry import PluginStatus, State, crash_marks
from qcore.errors import QcoreWarning
from qcore.resolving import offers, resolver, verification
from qcore.runtime import disk_cache

PROBE = "import os, time, qcore\n@qcore.hookimpl\ndef qcore_probe():\n    "

PLUGINS = {
    # name: (code, state, a part of the reason)
    "raises": ("import no_such_module_xyz\n", "import failed", "no_such_module_xyz"),
    "exits": ("import sys\nprint('bye')\nsys.exit(3)\n", "import failed", "sys.exit(3)"),
    "stops": ("import os\nos.abort()\n", "import failed", "SIGABRT while importing the plugin (in <module>"),
    "hangs": (PROBE + "time.sleep(1000)\n", "probe failed", "within 2 seconds (in qcore_probe"),
    "aborts": (PROBE + "os.abort()\n", "probe failed", "SIGABRT while probing the plugin (in qcore_probe"),
    "leaves": (PROBE + "print('last words'); os._exit(7)\n", "probe failed", "exit code 7"),
    "nothing": (PROBE + "return None\n", "probe failed", "returned None"),
    "misspelt": (PROBE.replace("probe", "porbe") + "pass\n", "registration failed", "'qcore_probe'"),
    "sick": (PROBE + "return qcore.Unavailable('driver too old', broken=True)\n", "unavailable", "driver too old"),
}


@pytest.fixture
def every_kind(install):
    for name, (code, _, _) in PLUGINS.items():
        folder = install(name, code)
    install("good", PROBE + "print('banner')\n    return qcore.Available('GPU 9', 'driver 1', {'memory': '8 GiB'})\n")
    install("away", PROBE + "return qcore.Unavailable('no such device here')\n")
    install("off", "raise SystemExit('a disabled plugin was imported')\n")
    install("future", "raise SystemExit('a plugin of another API was imported')\n", group="qcore.plugins.v2")
    install("good", "raise SystemExit('the second of two was imported')\n", dist="qcore-impostor")
    return str(folder)


@pytest.mark.slow
def test_every_plugin_broken(spawn, every_kind, tmp_path):
    settings = {
        "QCORE_DISABLE": ",".join(filter(None, ("off", installed_plugins()))),
        "QCORE_BACKENDS": "goood",
        "PYTHONPATH": every_kind,
    }
    (done,) = spawn(["doctor", "--timeout", "2", "--jobs", "3", "--json"], **settings)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    plugins = {(p["name"], p["dist"]): p for p in found["plugins"]}
    for name, (_, state, reason) in PLUGINS.items():
        status = plugins[name, f"qcore-{name}"]
        assert (status["state"], status["broken"]) == (state, True), status
        assert reason in status["reason"]
    good = plugins["good", "qcore-good"]
    assert (good["state"], good["device"], good["driver"], good["details"]) == (
        "available", "GPU 9", "driver 1", {"memory": "8 GiB"},
    )  # fmt: skip
    assert plugins["away", "qcore-away"]["broken"] is False
    assert plugins["off", "qcore-off"]["state"] == "blocked"
    assert plugins["future", "qcore-future"]["state"] == "wrong API"
    assert "upgrade qcore." in plugins["future", "qcore-future"]["reason"]
    assert plugins["good", "qcore-impostor"]["state"] == "name conflict"
    assert plugins["torch", "qcore"]["state"] == "available"
    about = {problem["about"] for problem in found["problems"]}
    assert about == {*PLUGINS, "future", "good", "settings"}
    remedies = {p["about"]: p["remedy"] for p in found["problems"]}
    assert "pip install --force-reinstall qcore-raises" in remedies["raises"]
    assert "QCORE_DISABLE=aborts" in remedies["aborts"]
    assert "--timeout" in remedies["hangs"]
    sources = {s["name"]: (s["value"], s["source"]) for s in found["settings"]}
    assert "off" in sources["disable"][0].split(", ")
    assert sources["disable"][1] == "QCORE_DISABLE"
    assert sources["strict"] == ("no", "default")


def test_crash_mark_stands_until_the_plugin_is_mended(spawn, install, monkeypatch):
    folder = install("shaky", PROBE + "os.abort()\n")
    mark = crash_marks("shaky", "qcore-shaky", "1.0")[1]
    (first,) = spawn(["doctor", "--timeout", "20"], PYTHONPATH=str(folder))
    assert first.returncode == 1
    assert "-> Report it to its authors" in first.stdout
    assert "see below" in first.stdout
    assert disk_cache.crashed(mark)
    (listed,) = spawn(["plugins", "--json"], PYTHONPATH=str(folder))
    shaky = next(p for p in json.loads(listed.stdout) if p["name"] == "shaky")
    assert "qcore doctor" in shaky["reason"]
    install("shaky", PROBE + "return qcore.Available('mended')\n")
    (second,) = spawn(["doctor", "--timeout", "20"], PYTHONPATH=str(folder))
    assert second.returncode == 0, second.stdout
    assert "No problems found." in second.stdout
    assert not disk_cache.crashed(mark)


def test_settings_that_cannot_be_read_are_a_problem(run_json, monkeypatch):
    monkeypatch.setenv("QCORE_STRICT", "maybe")
    code, found = run_json("doctor")
    assert code == 1
    assert "QCORE_STRICT='maybe'" in found["problems"][0]["text"]


def test_cache_that_cannot_be_written_is_a_note(run, monkeypatch):
    monkeypatch.setenv("QCORE_CACHE_DIR", "/dev/null/nowhere")
    code, out, _ = run("doctor")
    assert code == 0
    assert "(not writable)" in out
    assert "Set QCORE_CACHE_DIR" in out


def test_hardware_without_its_plugin_is_a_note_with_the_command(monkeypatch):
    seen = hardware.Hardware("Some GPU", ("cuda", "vulkan"), "PCI 01")
    monkeypatch.setattr(hardware, "present", lambda: (seen,))
    (note,) = health.hardware_findings([PluginStatus("torch", "qcore", "1", State.AVAILABLE)])
    assert not note.problem
    assert "pip install qcore-cuda" in note.text
    assert not health.hardware_findings([PluginStatus("vulkan", "v", "1", State.UNAVAILABLE)])


def test_a_slow_probe_is_a_problem():
    slow = PluginStatus("slow", "qcore-slow", "1", State.AVAILABLE, seconds=12.0)
    (finding,) = health.plugin_findings([slow])
    assert "took 12 seconds" in finding.text


def test_lines_of_a_finding_are_indented():
    assert str(Finding("x", "a\nb", "c")) == "x: a\n    b\n    -> c"


def test_a_process_that_never_starts_is_ended(monkeypatch):
    monkeypatch.setattr(probing, "_STARTUP", -1.0)
    monkeypatch.setattr(probing, "_CHILD", "import time; time.sleep(60)")
    status = PluginStatus("stuck", "qcore-stuck", "1", State.BLOCKED)
    found = probing.probe_all([status], 1.0, 1)["stuck"]
    assert found.broken
    assert "did not finish within 1 seconds" in found.reason


def test_ctrl_c_ends_the_probes_and_marks_nobody(install):
    folder = install("hangs", PROBE + "print('probing', flush=True); time.sleep(1000)\n")
    environment = {**os.environ, "QCORE_DISABLE": installed_plugins(), "PYTHONPATH": str(folder)}
    # Jobs in the background of a shell ignore SIGINT, and so would what they start.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start += "; from qcore_command import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "doctor", "--timeout", "100"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as doctor:
        # Other marks stand as well: of other plugins, and of the built-in one, which the command itself brings up.
        mark = crash_marks("hangs", "qcore-hangs", "1.0")[1]
        deadline = time.monotonic() + 120
        while not disk_cache.read("running", mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        doctor.send_signal(signal.SIGINT)
        _, err = doctor.communicate(timeout=30)
    assert (doctor.returncode, err) == (130, "stopped\n")
    assert not list((disk_cache.cache_dir() / "running").glob("*.json"))


def test_ctrl_c_during_a_plugins_import_has_the_same_exit_code(spawn, install):
    # As where it strikes in the decorator of a dataclass, whose methods are text that is executed.
    folder = install("interrupted", 'exec("raise KeyboardInterrupt")\n')
    (done,) = spawn(["plugins"], PYTHONPATH=str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_names_the_exit_of_a_process():
    assert probing._how_it_ended(3) == "ended with exit code 3"
    assert probing._how_it_ended(-11) == "was killed by SIGSEGV"
    assert probing._how_it_ended(-99) == "was killed by signal 99"


def test_where_skips_frames_of_python_and_qcore():
    plugin = str(Path(qcore.__file__).parent) + "_acme/plugin.py"  # beside qcore, as wheels are installed
    frames = {json.__file__: "x", probing.__file__: "y", plugin: "z"}
    trace = "".join(f'  File "{file}", line 3 in {function}\n' for file, function in frames.items())
    assert probing._where(trace) == f" (in z, {plugin}:3)"
    assert not probing._where("")


def test_what_runs_in_the_process_of_a_probe(add_plugin, tmp_path, monkeypatch):
    add_plugin("here", version="1.0", probe=lambda: Available("GPU 9"))
    monkeypatch.setattr(sys.modules["qcore.discovery.registry"], "PROBE_SECONDS", 10.0)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    result = tmp_path / "result"
    monkeypatch.setattr(sys, "argv", ["probe", "here", "30", str(result), str(tmp_path / "trace")])
    probe.main()
    found = json.loads(result.read_text())
    assert (found["name"], found["state"], found["device"]) == ("here", "available", "GPU 9")


def test_marks_failures_and_slow_steps_are_listed_and_cleared(run_json, monkeypatch):
    about = {"plugin": "mine", "dist": "qcore-mine", "version": "1"}
    disk_cache.write("running", "pack mine", doing="the pack of mine.k", pid=2**22 + 1, since=1e9, **about)
    own = {"plugin": "torch", "dist": "qcore", "version": qcore.__version__}
    disk_cache.write("failures", "a", text="torch.k failed verification: wrong", since=1e9, slow=False, **own)
    disk_cache.write("failures", "b", text="qcore_linear took 20 seconds", since="?", slow=True, **own)
    disk_cache.write("failures", "c", text="of a plugin that is gone", slow=True, **about)
    listed = [PluginStatus("torch", "qcore", qcore.__version__, State.AVAILABLE)]
    monkeypatch.setattr(health, "examine", lambda *_: listed)
    code, found = run_json("doctor")
    assert code == 1
    assert [(p["about"], p["text"].partition(" (")[0]) for p in found["problems"]] == [
        ("mine", "the pack of mine.k ended an earlier process"),
        ("torch", "torch.k failed verification: wrong"),
    ]
    assert all("qcore doctor --clear" in p["remedy"] for p in found["problems"])
    assert [n["text"] for n in found["notes"] if n["about"] == "torch"] == ["qcore_linear took 20 seconds"]
    code, found = run_json("doctor", "--clear")
    assert code == 0
    assert "4 plugin failures cleared." in [n["text"] for n in found["notes"]]
    assert not disk_cache.crashed("pack mine")


def test_a_failed_verification_is_remembered_until_it_passes(add_kernel, request_of):
    made = add_kernel("mine", fault="wrong")
    with pytest.warns(QcoreWarning, match="failed verification"):
        qcore.resolve(request_of())
    (record,) = disk_cache.records("failures")
    assert record["plugin"] == "mine"
    assert "mine.stub for int4-g32/plain on cpu: failed verification: wrong result" in record["text"]
    for kernel in made.values():
        kernel.fault = None
    verification.forget()
    resolver.forget()
    assert qcore.resolve(request_of()).plugin == "mine"
    assert not disk_cache.records("failures")


def test_a_cache_that_is_not_believed_is_a_note(run, monkeypatch, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("QCORE_CACHE_DIR", str(tmp_path / "open"))
    _, out, _ = run("doctor")
    assert "can be written by everyone" in out


def test_without_a_home_there_is_one_line(run, monkeypatch):
    monkeypatch.setattr(disk_cache, "cache_dir", lambda: None)
    code, out, _ = run("doctor")
    assert code == 0
    assert out.count("there is no home directory for it") == 1


def test_a_kernel_slower_than_the_fallback_is_a_note(run_json, request_of):
    from qcore.resolving import tuning

    request = request_of()
    status, offer = offers.offers_for(request)[0]
    tuning.measure(request, [(status, offer.kernel)], rows=(1,), seconds=0.001)
    (record,) = disk_cache.records("tuning")
    about = {"plugin": "mine", "dist": status.dist, "version": status.version, "kernel": "mine.k"}
    slow = [replace(status, name="mine"), status]
    disk_cache.write("tuning", "another", milliseconds={"1": 1e6}, request=record["request"], **about)
    (finding,) = health.slow_findings(slow)
    assert not finding.problem
    assert finding.text.startswith("mine.k was measured slower than the fallback for linear int4-g32/plain n=16 k=64")
    assert "1e+06 ms, against" in finding.text
    code, found = run_json("doctor")
    assert code == 0
    assert not found["problems"]
