"""What became of each case and each law."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class Outcome(str, enum.Enum):
    """How a case or a law came out."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """The plugin said, with a reason, that it does not serve this."""
    GAP = "gap"
    """It fails, and the plugin's list of known gaps says so."""
    INAPPLICABLE = "inapplicable"
    """There is nothing here that the law speaks of, such as a second device, or an op of the plugin's own."""
    SKIPPED = "skipped"
    """It could not be tried here; nothing is shown either way."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Result:
    """The outcome of one case or one law.

    **Fields:** ``id``: e.g. ``linear[w4a16-bfloat16-k-odd]`` or ``compile[linear-w4a16]``; ``law``: the law that was
    checked, or for a failed case the one that it broke; ``contract``, ``scheme``: empty for laws on the plugin as a
    whole; ``outcome``; ``reason``: empty where it passed; ``kernels``: those that were offered; ``worst``: error /
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
        """Plain values; an infinite ``worst`` becomes None, since JSON has no infinity."""
        worst = self.worst if math.isfinite(self.worst) else None
        return {**asdict(self), "outcome": self.outcome.value, "kernels": list(self.kernels), "worst": worst}


def count(results: Iterable[Result]) -> Counter[Outcome]:
    """How many results there are of each outcome."""
    return Counter(result.outcome for result in results)


def summary_line(passed: int, failed: int, skipped: int) -> str:
    """The line that scripts read."""
    return f"{passed} passed, {failed} failed, {skipped} skipped"
