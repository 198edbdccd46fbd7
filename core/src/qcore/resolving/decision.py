"""`Decision`: the kernel selected for a request, and for every other plugin the reason against it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..contracts import Request
from ..discovery.kernels import Kernel, Rank
from ..discovery.registry import BUILTIN
from ..errors import dtype_name


class Stage(str, enum.Enum):
    """The stage that a candidate reached. Plugins that did not load have their `State` instead."""

    REFUSED = "refused"
    OFFER_FAILED = "offer failed"
    FAILED_VERIFICATION = "failed verification"
    FAILED_IN_USE = "failed in use"
    OUTRANKED = "outranked"
    SELECTED = "selected"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Candidate:
    """One row of a decision.

    **Fields:** ``plugin``; ``kernel``: its name, empty without an offer; ``stage``: a `Stage` or a plugin's state,
    as text; ``reason``; ``rank``: None without an offer; ``milliseconds``: measured by ``qcore tune``, or None;
    ``dist`` and ``version`` of the plugin.
    """

    plugin: str
    kernel: str
    stage: str
    reason: str
    rank: int | None = None
    milliseconds: float | None = None
    dist: str = ""
    version: str = ""

    @property
    def rank_text(self) -> str:
        """The rank in readable form, e.g. ``NATIVE+5``."""
        if self.rank is None:
            return ""
        tier = max((t for t in Rank if t <= self.rank + 500), default=Rank.EMULATED)
        rest = self.rank - tier
        return tier.name + (f"{rest:+d}" if rest else "")


@dataclass(frozen=True)
class Decision:
    """The result of resolving a request.

    **Fields:** ``request``; ``candidates``: every installed plugin, in the order considered; ``kernel``: the
    selected one, None if none supports the request; ``hints``: hardware without a plugin, ties, unknown names.

    ``str(decision)`` is the table that ``explain`` prints.
    """

    request: Request
    candidates: tuple[Candidate, ...]
    kernel: Kernel | None
    hints: tuple[str, ...] = ()

    @property
    def selected(self) -> Candidate | None:
        """The selected candidate, if any."""
        return next((c for c in self.candidates if c.stage == Stage.SELECTED.value), None)

    @property
    def plugin(self) -> str:
        """The name of the selected plugin; empty if none supports the request."""
        return self.selected.plugin if self.selected else ""

    @property
    def is_fallback(self) -> bool:
        """Whether the built-in torch ops were selected."""
        return self.plugin == BUILTIN

    def __str__(self) -> str:
        chosen = self.selected
        head = f"{describe(self.request)}: " + (
            f"{chosen.kernel} ({chosen.dist} {chosen.version})" if chosen else "no kernel supports this request"
        )
        rows = [(c.plugin, c.kernel, c.stage, c.rank_text, _reason(c)) for c in self.candidates]
        table = format_table(("plugin", "kernel", "stage", "rank", "why"), rows)
        return "\n".join([head, *table, *(f"hint: {hint}" for hint in self.hints)])

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``qcore explain --json`` prints them."""
        rows = [vars(c) | {"rank_text": c.rank_text} for c in self.candidates]
        kernel = self.selected.kernel if self.selected else None
        return {
            "request": describe(self.request),
            "plugin": self.plugin or None,
            "kernel": kernel,
            "fallback": self.is_fallback,
            "candidates": rows,
            "hints": list(self.hints),
        }


def _reason(candidate: Candidate) -> str:
    if candidate.milliseconds is None:
        return candidate.reason
    return f"{candidate.reason} [{candidate.milliseconds:.3g} ms measured]".lstrip()


def describe(request: Request) -> str:
    """A request in one line, e.g. ``linear int4-g128/plain n=4096 k=4096 x=bfloat16 on cpu``."""
    fields = [request.contract, str(request.weight), f"n={request.n}", f"k={request.k}"]
    x_dtype = getattr(request, "x_dtype", request.out_dtype)
    fields.append(f"x={dtype_name(x_dtype)}")
    fields += [f"{name}={value}" for name in ("activation", "output") if (value := getattr(request, name, None))]
    if getattr(request, "training", False):
        fields.append("training")
    return " ".join([*fields, f"on {request.device}"])


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Left-aligned columns; the last one is not padded."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    padded = ([*(c.ljust(w) for c, w in zip(line[:-1], widths, strict=True)), line[-1]] for line in lines)
    return ["  ".join(line).rstrip() for line in padded]
