"""The results of cases and laws."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class Outcome(str, enum.Enum):
    """The outcome of a case or a law."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """The plugin declares, with a reason, that it does not support this."""
    GAP = "gap"
    """It failed, as stated in the plugin's list of known gaps."""
    INAPPLICABLE = "inapplicable"
    """The law has no subject here, such as a second device, or an op of the plugin's own."""
    SKIPPED = "skipped"
    """It could not be tested here; whether it holds is unknown."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Result:
    """The outcome of one case or one law.

    **Fields:** ``id``: e.g. ``linear[w4a16-bfloat16-k-odd]`` or ``compile[linear-w4a16]``; ``law``: the law that was
    checked, or for a failed case the one that it broke; ``contract``, ``scheme``: empty for laws on the plugin as a
    whole; ``outcome``; ``reason``: empty if it passed; ``kernels``: names of the offered kernels; ``worst``: error /
    allowed error of the worst element; ``seconds``.
    """

    id: str
    law: str
    contract: str
    scheme: str
    outcome: Outcome
    reason: str = ""
    kernels: tuple[str, ...] = ()
    worst: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite ``worst`` becomes None, because JSON has no infinity."""
        worst = self.worst if math.isfinite(self.worst) else None
        return {**asdict(self), "outcome": self.outcome.value, "kernels": list(self.kernels), "worst": worst}


def count(results: Iterable[Result]) -> Counter[Outcome]:
    """Count the results by outcome."""
    return Counter(result.outcome for result in results)


def summary_line(passed: int, failed: int, skipped: int) -> str:
    """Return the summary line for scripts."""
    return f"{passed} passed, {failed} failed, {skipped} skipped"
