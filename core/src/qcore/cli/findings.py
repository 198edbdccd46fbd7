"""What ``qcore doctor`` found: problems and notes, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something found: a ``problem`` makes the command exit with 1, a note does not; ``remedy``: what to do."""

    about: str
    text: str
    remedy: str = ""
    problem: bool = True

    def __str__(self) -> str:
        text = self.text.replace("\n", "\n    ")
        return f"{self.about}: {text}" + (f"\n    -> {self.remedy}" if self.remedy else "")
