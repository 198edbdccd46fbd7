"""Known gaps: a TOML file in which a plugin lists the cases that it fails, each with a reason.

::

    [[gap]]
    cases = "linear[w8a8-*-float16-large-x]"
    reason = "float16 sums overflow in the driver before 25.4"

In ``cases``, ``*`` matches any characters and ``?`` one character; brackets are literal. A gap must be accurate: if a
case that it covers passes, or if it covers no case, that is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConformanceError

FILE_NAME = "qcore_gaps.toml"
"""The file's name, in the directory of the plugin's entry-point module."""


def matches(glob: str, text: str) -> bool:
    """Whether ``text`` matches ``glob``. Unlike in `fnmatch`, brackets are literal, because ids contain them."""
    pattern = re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(pattern, text) is not None


@dataclass(frozen=True)
class Gap:
    """A pattern of cases or laws that are known to fail, and the reason."""

    cases: str
    reason: str


@dataclass
class Gaps:
    """The gaps of one plugin; records which of them were needed."""

    known: tuple[Gap, ...] = ()
    source: str = ""
    needed: set[Gap] = field(default_factory=set)

    def reason(self, case: str) -> str | None:
        """Return why the case is known to fail, or None if no gap covers it."""
        return next((gap.reason for gap in self.known if matches(gap.cases, case)), None)

    def used(self, case: str) -> None:
        """Record that the case failed as stated in its gap."""
        self.needed.update(gap for gap in self.known if matches(gap.cases, case))

    def unneeded(self, ran: Iterable[str], *, complete: bool) -> list[str]:
        """Return an error for each gap that was not needed; ``complete``: whether every case and law ran."""
        ids = list(ran)
        idle = [gap for gap in self.known if gap not in self.needed]
        return [
            f"gap {gap.cases!r} in {self.source} covers nothing that fails. Delete it, or correct its pattern."
            for gap in idle
            if complete or any(matches(gap.cases, name) for name in ids)
        ]


def read_gaps(path: Path) -> Gaps:
    """Read a file of gaps. Raises `ConformanceError` if it cannot be read or an entry lacks its reason."""
    try:
        entries = _load_toml(path).get("gap", [])
    except (OSError, ValueError) as error:
        raise ConformanceError(f"cannot read the gaps in {path}: {error}") from error
    return Gaps(tuple(_gap(entry, path) for entry in entries), str(path))


def _gap(entry: Any, path: Path) -> Gap:
    cases, reason = (str(entry.get(key, "")).strip() for key in ("cases", "reason"))
    if not cases or not reason:
        raise ConformanceError(
            f"{path}: a gap needs both a pattern and a reason, got {dict(entry)!r}.\n"
            f'Write cases = "linear[w8a8-*]" and reason = "what is wrong, and until when".'
        )
    return Gap(cases, reason)


def _load_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pytest depends on tomli there
        import tomli as tomllib
    return tomllib.loads(path.read_text("utf-8"))
