"""Intel's own runtimes on the CPU: OpenCL, and oneDNN. Run by the session `xpu_peers`, which installs them.

With none of them here this is another session, and there is nothing to do. With some of them the environment is broken:
then every test fails.
"""

from __future__ import annotations

import os

import isolation
import pytest
import torch
import xpu_peers_packages as packages
from xpu_peers_problems import Record

if len(packages.missing()) == len(packages.PACKAGES):
    collect_ignore_glob = ["*"]

_record = Record()


@pytest.fixture(scope="session", autouse=True)
def runtimes(tmp_path_factory):
    """Both runtimes can be found; a missing one is an error, never a skip."""
    assert not packages.missing(), f"not installed: {', '.join(packages.missing())}; run `nox -s xpu_peers`"
    packages.show_opencl(tmp_path_factory.mktemp("opencl"))


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory):
    """No settings from outside, a cache of the session's own, and one thread: those of the runtimes are enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with isolation.isolated(tmp_path_factory.getbasetemp() / "cache"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def seed():
    """Of the random inputs: a fresh one in each run; XPU_PEERS_SEED repeats one."""
    from qcore.testing.kit import fresh_seed

    given = os.environ.get("XPU_PEERS_SEED")
    return fresh_seed() if given is None else int(given)


@pytest.fixture(scope="session")
def record():
    """Judges results by the contract, and keeps their errors for the end of the report."""
    return _record


def pytest_terminal_summary(terminalreporter):
    for line in _record.lines():
        terminalreporter.write_line(line)
