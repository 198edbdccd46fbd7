"""Collects plugins' offers for a request: each answer is read once, guarded, and a defect is reported once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..contracts import Request, contract_of
from ..discovery import answers
from ..discovery.answers import name_of
from ..discovery.kernels import Kernel, Offer, Refusal
from ..discovery.registry import PluginStatus, State, registry
from ..errors import PluginError, QcoreWarning
from ..runtime import disk_cache
from ..runtime.guard import StepError, guarded, mark_key
from .decision import Candidate, Stage

CACHE_LIMIT = 1024
HOW_TO_CLEAR = "(run 'qcore doctor --clear' to retry)"

first_offered_names: dict[tuple[str, Request], frozenset[str]] = {}
"""The kernel names in each plugin's first answer to a request."""
_warned: set[str] = set()


@dataclass(frozen=True)
class Offered:
    """One offer of one plugin, with its sort keys."""

    status: PluginStatus
    offer: Offer
    milliseconds: float | None = None

    @property
    def name(self) -> str:
        """The kernel's name at the time of the offer."""
        return name_of(self.offer.kernel)

    def candidate(self, stage: Stage, reason: str = "") -> Candidate:
        """The row of the decision table; ``reason`` defaults to the note of the offer."""
        return Candidate(
            self.status.name,
            self.name,
            stage.value,
            reason or self.offer.note,
            self.offer.rank,
            self.milliseconds,
            self.status.dist,
            self.status.version,
        )


def warn_once(text: str, about: str = "") -> str:
    """Warn once per process about ``about``, or about ``text`` if that is empty; returns ``text``."""
    if (about or text) not in _warned:
        _warned.add(about or text)
        warnings.warn(text, QcoreWarning, stacklevel=2)
    return text


def row_of(status: PluginStatus, stage: str, reason: str) -> Candidate:
    """The row of a plugin without an offer."""
    return Candidate(status.name, "", stage, reason, dist=status.dist, version=status.version)


def ask(status: PluginStatus, request: Request, order: Sequence[str] = ()) -> Sequence[Offered | Candidate]:
    """A plugin's offers, or one row with the reason why there are none."""
    hook = contract_of(request).hook
    key = mark_key("offer", status, f"{hook} {device_and_signature(request)}")
    if left := disk_cache.left_over(key):
        return [_defect_row(status, f"{hook} {left} {HOW_TO_CLEAR}", order)]
    try:
        # A copy, since a plugin could bypass ``frozen``; validated inside the guard, since attributes may raise.
        with guarded(status, hook, key):
            answer = registry.call(status.name, hook, request=copy.copy(request))
            if answer is None and not registry.implements(status.name, hook):
                return [row_of(status, Stage.REFUSED.value, f"has no kernels for {request.contract}")]
            found = answers.offered(hook, answer)
    except StepError as error:
        return [_defect_row(status, error.describe(hook), order, error.cause)]
    if isinstance(found, Refusal):
        return [row_of(status, Stage.REFUSED.value, found.reason)]
    if len(first_offered_names) >= CACHE_LIMIT:
        first_offered_names.clear()
    first_offered_names.setdefault((status.name, request), frozenset(name_of(offer.kernel) for offer in found))
    return [Offered(status, offer) for offer in found]


def device_and_signature(request: Request) -> str:
    """A request as text for cache keys, without its sizes."""
    return f"{request.device} {request.signature()}"


def _defect_row(
    status: PluginStatus, reason: str, order: Sequence[str], error: BaseException | None = None
) -> Candidate:
    """The row of a plugin whose answer is a defect: one warning, or an error if the user named the plugin."""
    if status.name in order:
        raise PluginError(
            f"plugin {status.name!r} ({status.dist} {status.version}), which you asked for, is broken.\n{reason}"
        ) from error
    who = f"plugin {status.name!r} ({status.dist} {status.version})"
    warn_once(f"{who} is skipped: {reason}", about=who)
    return row_of(status, Stage.OFFER_FAILED.value, reason)


def kernels_of(name: str) -> Callable[[Request], list[Kernel]]:
    """A function that returns one plugin's kernels for a request."""
    status = registry.status(name)
    return lambda request: [o.offer.kernel for o in ask(status, request) if isinstance(o, Offered)]


def offers_for(request: Request, disabled: frozenset[str] = frozenset()) -> list[tuple[PluginStatus, Offer]]:
    """Every offer of every available plugin, unranked and unverified, for ``qcore tune`` and ``bench``."""
    found = []
    for name in registry.entries():
        status = registry.status(name, disabled)
        if status.state is State.AVAILABLE:
            found += [(status, o.offer) for o in ask(status, request) if isinstance(o, Offered)]
    return found
