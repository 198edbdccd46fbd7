"""The conformance kit in pytest: one item per case and per law. Registered by ``qcore_pytest`` if requested."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..errors import QcoreError
from . import html_report
from .case_selection import PreparedCase
from .kit import Kit, fresh_seed
from .results import Outcome, Result
from .target import check_installed

SUITE = Path(__file__).with_name("suite.py")
_SUITE_MODULE = "qcore.testing.suite"


class FailedLawError(Exception):
    """A case or a law that failed; pytest shows its text, not its traceback."""


class KitItem(pytest.Item):
    """One case or one law."""

    def __init__(self, *, check: Callable[[], Result], **more: Any) -> None:
        super().__init__(**more)
        self._check = check

    def runtest(self) -> None:
        """Run the check and translate its outcome to pytest."""
        result = self._check()
        if result.outcome is Outcome.FAILED:
            raise FailedLawError(f"{result.id}: {result.reason}" + (f"\nlaw: {result.law}" if result.law else ""))
        if result.outcome is Outcome.GAP:
            pytest.xfail(result.reason)
        if result.outcome is not Outcome.PASSED:
            pytest.skip(f"{result.outcome}: {result.reason}")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Return the text of a failed law; any other exception is a defect of the kit and gets a traceback."""
        if isinstance(excinfo.value, FailedLawError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return one location for all items, so that pytest folds equal reasons for skipping."""
        return self.path, 0, self.name


class KitFile(pytest.File):
    """Collects the kit for one plugin."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield every case and law, or only the status of a plugin that is not available."""
        owner = self.config.pluginmanager.get_plugin("qcore-kit")
        assert isinstance(owner, KitPlugin)
        try:
            kit = owner.kit()
        except QcoreError as error:  # e.g. a missing device, or an unreadable list of gaps
            raise self.CollectError(str(error)) from error
        if not kit.target.available:
            yield KitItem.from_parent(self, name="status[plugin]", check=kit.status_result)
            return
        for case in kit.cases:
            yield KitItem.from_parent(self, name=case.id, check=lambda c=case: kit.run_case(PreparedCase(c, kit.seed)))
        for item in kit.laws:
            yield KitItem.from_parent(self, name=item.id, check=lambda i=item: kit.run_law(i))
        if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker sees only a part of the results
            yield KitItem.from_parent(self, name="shown[plugin]", check=kit.shown_result)
        if kit.gaps.known:
            yield KitItem.from_parent(self, name="gaps[plugin]", check=kit.gaps_result)


class KitPlugin:
    """Adds the kit to a run of pytest, and its certificate to the terminal summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._kit: Kit | None = None
        _as_usage(lambda: check_installed(config.option.qcore_backend))
        if config.option.qcore_seed is None:
            # Kept in the options, so that the workers of pytest-xdist get the same.
            config.option.qcore_seed = fresh_seed()
        _collect_suite(config)

    def kit(self) -> Kit:
        """Return the kit, which is created on first use."""
        if self._kit is None:
            options = self._config.option
            names = ("device", "seed", "gaps")
            chosen = {name: getattr(options, f"qcore_{name}") for name in names}
            self._kit = Kit(options.qcore_backend, **chosen)
        return self._kit

    def pytest_report_header(self) -> str:
        """Return a line with backend and seed."""
        options = self._config.option
        seed = options.qcore_seed
        return f"qcore: conformance of {options.qcore_backend}, seed {seed} (repeat it with --qcore-seed {seed})"

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> Any:
        """Collect the kit in place of the module ``suite.py``."""
        if module_path != SUITE:
            return None
        return KitFile.from_parent(parent, path=module_path, nodeid=self._config.option.qcore_backend)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Record whether all of the kit was selected: a part of it cannot tell which gaps are needed."""
        if self._kit is not None:
            chosen = {item.name for item in items if isinstance(item, KitItem)}
            every = {case.id for case in self._kit.cases} | {item.id for item in self._kit.laws}
            self._kit.complete = chosen >= every

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the certificate's table and write the requested files."""
        if self._kit is None:
            return
        certificate, options = self._kit.certificate(), self._config.option
        terminalreporter.section("qcore conformance")
        terminalreporter.line(str(certificate))
        if options.qcore_json:
            certificate.write_json(options.qcore_json)
        if options.qcore_html:
            html_report.write([certificate], options.qcore_html)
        for path in filter(None, (options.qcore_json, options.qcore_html)):
            terminalreporter.line(f"written: {path}")


def _as_usage(call: Callable[[], None]) -> None:
    """Convert errors about names on the command line to `pytest.UsageError`, which pytest shows without a traceback."""
    try:
        call()
    except QcoreError as error:
        raise pytest.UsageError(str(error)) from error


def _collect_suite(config: pytest.Config) -> None:
    """Add the kit to the paths that pytest collects.

    If requested on the command line, the kit runs alone, or together with the given paths. If requested in a project's
    settings (addopts), it runs together with the project's tests, unless paths are given.
    """
    paths = config.args_source is pytest.Config.ArgsSource.ARGS
    typed = any(str(arg).startswith("--qcore-backend") for arg in config.invocation_params.args)
    if typed and not paths:
        config.args = [str(SUITE)]
    elif typed == paths and not any(
        str(arg).startswith(_SUITE_MODULE) or str(arg) == str(SUITE) for arg in config.args
    ):
        config.args.append(str(SUITE))
