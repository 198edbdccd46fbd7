"""The conformance kit under pytest: an item per case and per law. Registered by ``qcore_pytest`` when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..errors import QcoreError
from . import html_report
from .case_selection import PreparedCase
from .results import Outcome, Result
from .runner import Kit, fresh_seed
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
        """Run it, and say the outcome in pytest's terms."""
        result = self._check()
        if result.outcome is Outcome.FAILED:
            raise FailedLawError(f"{result.id}: {result.reason}" + (f"\nlaw: {result.law}" if result.law else ""))
        if result.outcome is Outcome.GAP:
            pytest.xfail(result.reason)
        if result.outcome is not Outcome.PASSED:
            pytest.skip(f"{result.outcome}: {result.reason}")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The text of a failed law; anything else is a defect of the kit, shown in full."""
        if isinstance(excinfo.value, FailedLawError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where it stands: all in one file, so that equal reasons for skipping are shown once."""
        return self.path, 0, self.name


class KitFile(pytest.File):
    """Collects the kit for one plugin."""

    def collect(self) -> Iterator[pytest.Item]:
        """Every case and law; for a plugin that did not come up, that."""
        owner = self.config.pluginmanager.get_plugin("qcore-kit")
        assert isinstance(owner, KitPlugin)
        try:
            kit = owner.kit()
        except QcoreError as error:  # a device that is not here, a list of gaps that cannot be read
            raise self.CollectError(str(error)) from error
        if not kit.target.available:
            yield KitItem.from_parent(self, name="status[plugin]", check=kit.status_result)
            return
        for case in kit.cases:
            yield KitItem.from_parent(self, name=case.id, check=lambda c=case: kit.run_case(PreparedCase(c, kit.seed)))
        for item in kit.laws:
            yield KitItem.from_parent(self, name=item.id, check=lambda i=item: kit.run_law(i))
        if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker sees a part of what ran
            yield KitItem.from_parent(self, name="shown[plugin]", check=kit.shown_result)
        if kit.gaps.known:
            yield KitItem.from_parent(self, name="gaps[plugin]", check=kit.gaps_result)


class KitPlugin:
    """Puts the kit into a run of pytest, and its certificate at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._kit: Kit | None = None
        _as_usage(lambda: check_installed(config.option.qcore_backend))
        if config.option.qcore_seed is None:
            # Kept in the options, so that the workers of pytest-xdist get the same.
            config.option.qcore_seed = fresh_seed()
        _collect_suite(config)

    def kit(self) -> Kit:
        """The kit, made at the first asking."""
        if self._kit is None:
            options = self._config.option
            names = ("device", "seed", "gaps")
            chosen = {name: getattr(options, f"qcore_{name}") for name in names}
            self._kit = Kit(options.qcore_backend, **chosen)
        return self._kit

    def pytest_report_header(self) -> str:
        """Backend and seed."""
        options = self._config.option
        seed = options.qcore_seed
        return f"qcore: conformance of {options.qcore_backend}, seed {seed} (repeat it with --qcore-seed {seed})"

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> Any:
        """Collect the kit where the suite's module stands."""
        if module_path != SUITE:
            return None
        return KitFile.from_parent(parent, path=module_path, nodeid=self._config.option.qcore_backend)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """A part of the kit cannot tell which gaps are needed."""
        if self._kit is not None:
            chosen = {item.name for item in items if isinstance(item, KitItem)}
            every = {case.id for case in self._kit.cases} | {item.id for item in self._kit.laws}
            self._kit.complete = chosen >= every

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The certificate's table; writes the files that were asked for."""
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
    """A wrong name on the command line is no accident of ours: pytest shows the text alone."""
    try:
        call()
    except QcoreError as error:
        raise pytest.UsageError(str(error)) from error


def _collect_suite(config: pytest.Config) -> None:
    """Asked for on the command line, the kit runs alone or beside the paths given.

    Asked for by a project's own settings (addopts), it runs beside the project's tests, unless paths are given.
    """
    paths = config.args_source is pytest.Config.ArgsSource.ARGS
    typed = any(str(arg).startswith("--qcore-backend") for arg in config.invocation_params.args)
    if typed and not paths:
        config.args = [str(SUITE)]
    elif typed == paths and not any(
        str(arg).startswith(_SUITE_MODULE) or str(arg) == str(SUITE) for arg in config.args
    ):
        config.args.append(str(SUITE))
