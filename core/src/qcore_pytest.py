"""The options that qcore adds to pytest.

pytest imports this module in every run of an environment that has qcore, so it stands outside the package ``qcore``,
whose import brings torch: nothing is imported until ``--qcore-backend`` asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the conformance kit."""
    group = parser.getgroup("qcore", "conformance of a qcore plugin")
    say = group.addoption
    say(
        "--qcore-backend",
        metavar="NAME",
        help="run the conformance kit for this plugin (alone, unless paths are given)",
    )
    say("--qcore-device", metavar="DEVICE", help="torch device to test on (default: the plugin's own)")
    say(
        "--qcore-seed", type=int, metavar="N", help="seed of the random inputs (default: a fresh one, which is printed)"
    )
    say("--qcore-gaps", metavar="FILE", help="known gaps (default: qcore_gaps.toml beside the plugin's module)")
    say("--qcore-json", metavar="FILE", help="write the certificate as JSON")
    say("--qcore-html", metavar="FILE", help="write the certificate as a page")


def pytest_configure(config: pytest.Config) -> None:
    """Bring the kit in where it is asked for."""
    if config.getoption("--qcore-backend"):
        from qcore.testing.pytest_kit import KitPlugin

        config.pluginmanager.register(KitPlugin(config), "qcore-kit")
