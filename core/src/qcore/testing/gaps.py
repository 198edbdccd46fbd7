"""Known gaps: a TOML file in which a plugin lists the cases that it is known to fail, with a reason each.

::

    [[gap]]
    cases = "linear[w8a8-*-float16-large-x]"
    reason = "float16 sums overflow in the driver before 25.4"

In ``cases``, ``*`` stands for any characters and ``?`` for one; brackets stand for themselves. A gap has to be true: a
case it covers that passes is an error, and so is a gap that covers no case.
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
"""The file's name, beside the module that a plugin's entry point names."""


def matches(glob: str, text: str) -> bool:
    """Whether ``text`` fits ``glob``; unlike `fnmatch`, brackets mean themselves, since ids are full of them."""
    pattern = re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(pattern, text) is not None


@dataclass(frozen=True)
class Gap:
    """Cases (or laws) that are known to fail, and why."""

    cases: str
    reason: str


@dataclass
class Gaps:
    """The gaps of one plugin; remembers which of them were needed."""

    known: tuple[Gap, ...] = ()
    source: str = ""
    needed: set[Gap] = field(default_factory=set)

    def reason(self, case: str) -> str | None:
        """Why the case is known to fail, or None where it is not."""
        return next((gap.reason for gap in self.known if matches(gap.cases, case)), None)

    def used(self, case: str) -> None:
        """Remember that the case failed, as its gap says."""
        self.needed.update(gap for gap in self.known if matches(gap.cases, case))

    def unneeded(self, ran: Iterable[str], *, complete: bool) -> list[str]:
        """What is wrong with each gap that nothing needed; ``complete``: whether every case and law ran."""
        ids = list(ran)
        idle = [gap for gap in self.known if gap not in self.needed]
        return [
            f"gap {gap.cases!r} in {self.source} covers nothing that fails. Delete it, or correct its pattern."
            for gap in idle
            if complete or any(matches(gap.cases, name) for name in ids)
        ]


def read_gaps(path: Path) -> Gaps:
    """Read a file of gaps. Raises `ConformanceError` where it cannot be read or an entry lacks its reason."""
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
    else:  # pytest brings tomli there
        import tomli as tomllib
    return tomllib.loads(path.read_text("utf-8"))
