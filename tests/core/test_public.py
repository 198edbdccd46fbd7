"""The public surface of `import qcore`, and what importing it and the first `explain` cost."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

import qcore

LAZY = {"convert", "graphs", "load_", "save"}


def test_all_is_exactly_the_public_names():
    named = {name for name, value in vars(qcore).items() if not name.startswith("_") and not inspect.ismodule(value)}
    public = {name for name in named if name != "annotations"} | LAZY | {"__version__", "hookspecs", "nn"}
    assert set(qcore.__all__) == public


def test_all_is_sorted_and_without_doubles():
    # As ruff sorts it: constants, then classes, then the rest.
    def kind(name):
        return (not name.isupper(), not name[0].isupper() and not name.startswith("__"), name)

    assert len(set(qcore.__all__)) == len(qcore.__all__)
    constants, others = [n for n in qcore.__all__ if n.isupper()], [n for n in qcore.__all__ if not n.isupper()]
    assert qcore.__all__ == constants + others
    assert constants == sorted(constants)
    classes = [name for name in others if name[0].isupper()]
    assert others[: len(classes)] == sorted(classes)
    assert others[len(classes) :] == sorted(others[len(classes) :])


@pytest.mark.parametrize("name", qcore.__all__)
def test_every_name_is_there_and_documented(name):
    value = getattr(qcore, name)
    if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
        assert inspect.getdoc(value)


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'qcore' has no attribute 'lineer'"):
        qcore.lineer  # noqa: B018


def _python(code, *, measured=True, **environ):
    """What ``code`` prints in a process of its own; coverage, where it runs, watches only a ``measured`` one."""
    command = [sys.executable, "-W", "error", "-c", code]
    env = {name: value for name, value in os.environ.items() if measured or not name.startswith("COVERAGE_")}
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**env, **environ}).stdout


def test_importing_imports_no_plugin_and_nothing_heavy():
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import qcore
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(sorted(name for name in sys.modules if name.startswith("qcore.fallback")))
        print(sorted(new & {"rich", "safetensors", "pytest", "importlib_metadata", "platformdirs", "numpy"}))
        print("torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
        print(sorted(name for name in new if name.startswith("qcore_")))
        from qcore.discovery.registry import registry
        print(registry._entries)
    """
    assert _python(code).splitlines() == ["[]", "[]", "False False", "[]", "None"]


def _least(code, limit, **environ):
    """The least of up to seven times that ``code`` prints: what it costs, not what else the machine does.

    ``code`` takes processor time of its own thread for the same reason; benchmarks/overhead.py takes the time of the
    clock. One below ``limit`` shows that it can be done, so no more are taken then.
    """
    times = []
    while len(times) < 7 and (not times or min(times) >= limit):
        times.append(float(_python(code, measured=False, **environ).split()[0]))
    return min(times)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Variables for processes that take compiled modules from a folder, as an installation has them."""
    folder = tmp_path_factory.mktemp("compiled")
    return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


_IMPORT = """if True:
    import asyncio, concurrent.futures, email.message, email.parser, http.client, importlib, multiprocessing.pool
    import sys, time, torch, unittest, xml.dom.minidom
    packages = {"asyncio", "concurrent", "email", "http", "multiprocessing", "unittest", "xml"}
    def standard():  # imports, too: files, unmarshalling and classes become slower alike on a busy machine
        held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in packages}
        start = time.thread_time()
        for name in held:
            importlib.import_module(name)
        seconds = time.thread_time() - start
        sys.modules.update(held)
        return seconds
    standard()
    before, start = standard(), time.thread_time()
    import qcore
    seconds = time.thread_time() - start
    print(2 * seconds / (before + standard()))
"""


def test_import_time(record_property, compiled):
    """At most 3.5 times the time of some 80 modules of the standard library; 2.1 was measured, idle and busy."""
    _python(_IMPORT, measured=False, **compiled)  # the first run compiles
    least = _least(_IMPORT, 3.5, **compiled)
    record_property("import_in_standard_imports", least)
    assert least < 3.5


_EXPLAIN = """if True:
    import gc, sys, time, torch, qcore
    qcore.plugins()
    gc.collect()  # a collection of torch's heap takes 70 ms and falls where it likes
    before, start = set(sys.modules), time.thread_time()
    qcore.explain("w4a16-g128")
    print(time.thread_time() - start)
    heavy = ("sympy", "torch.fx", "torch._dynamo", "torch._inductor")
    print(sorted(name for name in set(sys.modules) - before if name.startswith(heavy)))
"""


def test_explain_time(record_property, compiled):
    first = _python(_EXPLAIN, measured=False, **compiled).splitlines()
    assert first[1] == "[]"  # nothing is on disk then, so that kernels are verified too
    least = _least(_EXPLAIN, 0.1, **compiled)
    record_property("explain_ms", least * 1e3)
    assert least < 0.1  # 0.03 on an idle machine; an import of torch.fx alone takes 0.3


def test_the_ops_are_registered_by_the_import():
    assert _python("import torch, qcore; print(torch.ops.qcore.linear_q8csw.default)") == "qcore.linear_q8csw.default\n"
