"""Findings of ``qcore doctor``: problems and notes, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One finding: a ``problem`` makes the command exit with 1, a note does not; ``remedy``: how to fix it."""

    about: str
    text: str
    remedy: str = ""
    problem: bool = True

    def __str__(self) -> str:
        text = self.text.replace("\n", "\n    ")
        return f"{self.about}: {text}" + (f"\n    -> {self.remedy}" if self.remedy else "")
