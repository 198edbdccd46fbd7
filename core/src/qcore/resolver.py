"""Choosing a kernel for a request, and explaining the choice.

Order: the user's order, then rank, then name. An offer that ``qcore tune`` measured on this device comes behind each
one that it measured faster, whatever their ranks: a rank is what a plugin expects, a time is what the machine did.
Kernels of software devices stay last, and under ``strict`` no plugin goes behind the fallback. The first offer in that
order that passes verification serves.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import hardware, settings, tuning, verify
from .contracts import contract_of
from .decision import Candidate, Decision, Stage
from .errors import PluginError, QcoreWarning, UnsupportedError, did_you_mean
from .kernels import EMULATED, Kernel, Offer, Refusal
from .plugins import BUILTIN, Guarded, PluginStatus, State, registry
from .settings import Settings

_TIER = 1000
_CACHE_LIMIT = 1024

_lock = threading.RLock()
_decisions: dict[Any, Decision] = {}
_failures: dict[tuple[str, str, Any], tuple[Stage, str]] = {}
_warned: set[str] = set()


@dataclass(frozen=True)
class _Offered:
    """One offer of one plugin, with what it is ordered by."""

    status: PluginStatus
    offer: Offer
    milliseconds: float | None

    def candidate(self, stage: Stage, reason: str = "") -> Candidate:
        return Candidate(
            self.status.name,
            self.offer.kernel.name,
            stage.value,
            reason or self.offer.note,
            int(self.offer.rank),
            self.milliseconds,
            self.status.dist,
            self.status.version,
        )


def resolve(
    request: Any,
    *,
    backends: str | Iterable[str] | None = None,
    disable: str | Iterable[str] | None = None,
    strict: bool | None = None,
    verify: str | None = None,
) -> Decision:
    """Choose a kernel for a `LinearRequest`, `Conv2dRequest` or `EmbeddingRequest`.

    The arguments are those of `using` and beat every other setting. Raises `UnsupportedError`, with the decision table
    as its text, where nobody can serve the request, or under ``strict`` where only the fallback can; `PluginError`
    where a plugin that the user named is broken.
    """
    decision = decide(request, settings.current(backends=backends, disable=disable, strict=strict, verify=verify))
    if decision.kernel is None:
        raise UnsupportedError(f"no kernel can serve this request.\n{decision}")
    return decision


def decide(request: Any, wanted: Settings) -> Decision:
    """The decision under given settings, cached. Its ``kernel`` is None where nobody can serve."""
    key = (request, wanted, registry.generation)
    found = _decisions.get(key) or _decide_once(key, request, wanted)
    if wanted.strict:
        _enforce_strict(found, wanted)
    return found


def _decide_once(key: Any, request: Any, wanted: Settings) -> Decision:
    with _lock:
        # Another thread may have decided the same while this one waited.
        found = _decisions.get(key)
        if found is not None:
            return found
        found = _decide(request, wanted)
        if len(_decisions) >= _CACHE_LIMIT:
            _decisions.clear()
        _decisions[key] = found
    _tell_observers(found, wanted)
    return found


def forget() -> None:
    """Drop every cached decision and failure, e.g. after ``qcore tune`` wrote new figures."""
    with _lock:
        _decisions.clear()
        _failures.clear()


def report_failure(request: Any, kernel: Kernel, reason: str, stage: Stage = Stage.FAILED_IN_USE) -> None:
    """Take a kernel out of use for requests of this form: it failed with a layer's own weight, as ``stage`` says."""
    with _lock:
        _failures[_plugin_key(kernel, request)] = (stage, reason)
        _decisions.clear()


def withdraw_failure(request: Any, kernel: Kernel) -> None:
    """Take `report_failure` back: no other kernel could do better, so the input was at fault."""
    with _lock:
        _failures.pop(_plugin_key(kernel, request), None)
        _decisions.clear()


def _plugin_key(kernel: Kernel, request: Any) -> tuple[str, str, Any]:
    return (kernel.name, str(request.device), request.signature())


def _decide(request: Any, wanted: Settings) -> Decision:
    order = wanted.order(request.contract)
    offers: list[_Offered] = []
    others: list[Candidate] = []
    for name in registry.entries():
        status = registry.status(name, wanted.disable)
        _fail_if_named_and_broken(status, order)
        if status.state is State.AVAILABLE:
            answers = _ask(status, request, order)
            offers += [answer for answer in answers if isinstance(answer, _Offered)]
            others += [answer for answer in answers if isinstance(answer, Candidate)]
        else:
            others.append(_plain(status, str(status.state), status.reason))
    others += [_plain(status, str(status.state), status.reason) for status in registry.conflicts()]
    ranked = _rank(offers, wanted, order)
    rows, kernel = _select(ranked, request, wanted, order)
    slow = _slow_hints(ranked, rows)
    hints = (*_setting_hints(wanted), *_ties(ranked, rows, order), *slow, *_hardware_hints(), *_device_hints(request))
    return Decision(request, (*rows, *others), kernel, hints)


def _plain(status: PluginStatus, stage: str, reason: str) -> Candidate:
    return Candidate(status.name, "", stage, reason, dist=status.dist, version=status.version)


def _ask(status: PluginStatus, request: Any, order: Sequence[str] = ()) -> Sequence[_Offered | Candidate]:
    """A plugin's offers, or the one row that says why there are none."""
    hook = contract_of(request).hook
    try:
        answer = registry.call(status.name, hook, request=request)
    except Guarded as error:
        return [_defective(status, f"{hook} raised {type(error).__name__}: {error}", order, error)]
    if answer is None and not registry.implements(status.name, hook):
        return [_plain(status, Stage.REFUSED.value, f"has no kernels for {request.contract}")]
    if isinstance(answer, Refusal) and answer.reason:
        return [_plain(status, Stage.REFUSED.value, answer.reason)]
    offers = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if not offers or not all(map(_is_offer, offers)):
        return [_defective(status, f"{hook} returned {answer!r}, not an Offer(kernel) or Refusal(reason)", order)]
    return [_Offered(status, offer, tuning.measured(request, status, offer.kernel)) for offer in offers]


def _is_offer(answer: Any) -> bool:
    """Whether an answer is an `Offer` that can be ranked and shown."""
    kernel, rank = getattr(answer, "kernel", None), getattr(answer, "rank", None)
    named = isinstance(kernel, Kernel) and isinstance(getattr(kernel, "name", None), str)
    return named and isinstance(answer, Offer) and isinstance(rank, int)


def _defective(
    status: PluginStatus, reason: str, order: Sequence[str], error: BaseException | None = None
) -> Candidate:
    """The row of a plugin whose answer is a defect: worth one warning, or an error where the user named the plugin."""
    if status.name in order:
        raise PluginError(
            f"plugin {status.name!r} ({status.dist} {status.version}), which you asked for, is broken.\n{reason}"
        ) from error
    _warn_once(f"plugin {status.name!r} ({status.dist} {status.version}) is passed over: {reason}")
    return _plain(status, Stage.OFFER_FAILED.value, reason)


def kernels_of(name: str) -> Callable[[Any], list[Kernel]]:
    """A function that asks one plugin for its kernels for a request."""
    status = registry.status(name)
    return lambda request: [o.offer.kernel for o in _ask(status, request) if isinstance(o, _Offered)]


def offers_for(request: Any, disabled: frozenset[str] = frozenset()) -> list[tuple[PluginStatus, Offer]]:
    """Every offer of every available plugin, unranked and unverified; what ``qcore tune`` and ``bench`` measure."""
    found = []
    for name in registry.entries():
        status = registry.status(name, disabled)
        if status.state is State.AVAILABLE:
            found += [(status, o.offer) for o in _ask(status, request) if isinstance(o, _Offered)]
    return found


def _rank(offers: list[_Offered], wanted: Settings, order: Sequence[str]) -> list[_Offered]:
    def key(offered: _Offered) -> tuple[Any, ...]:
        name = offered.status.name
        place = order.index(name) if name in order else len(order)
        return (place, -offered.offer.rank, name, offered.offer.kernel.name)

    groups = itertools.groupby(sorted(offers, key=key), key=lambda o: key(o)[0])
    return [offered for _, members in groups for offered in _by_time(list(members), wanted)]


def _by_time(ranked: list[_Offered], wanted: Settings) -> list[_Offered]:
    """Offers in order of rank, but one that was measured behind every one that was measured faster.

    It goes down to the faster one's place instead of giving that one its own: nothing is known against those between.
    """
    waiting = sorted((o for o in ranked if _is_timed(o, wanted)), key=lambda o: o.milliseconds or 0.0)
    ordered: list[_Offered] = []
    reached: list[_Offered] = []
    for offered in ranked:
        if not _is_timed(offered, wanted):
            ordered.append(offered)
            continue
        reached.append(offered)
        while waiting and any(waiting[0] is o for o in reached):
            ordered.append(waiting.pop(0))
    return ordered


def _is_timed(offered: _Offered, wanted: Settings) -> bool:
    """Whether an offer's measured time counts beside those of other ranks."""
    barred = wanted.strict and offered.status.name == BUILTIN
    return offered.milliseconds is not None and _tier(offered) > EMULATED and not barred


def _tier(offered: _Offered) -> int:
    # Fine tuning goes both ways: NATIVE - 5 is still native.
    return (int(offered.offer.rank) + _TIER // 2) // _TIER


def _select(
    ranked: list[_Offered], request: Any, wanted: Settings, order: Sequence[str]
) -> tuple[list[Candidate], Kernel | None]:
    rows: list[Candidate] = []
    chosen: _Offered | None = None
    for offered in ranked:
        if chosen is not None:
            rows.append(offered.candidate(Stage.OUTRANKED, _why_outranked(offered, chosen, order)))
            continue
        stage, reason = _trial(offered, request, wanted)
        chosen = offered if stage is Stage.SELECTED else None
        rows.append(offered.candidate(stage, reason or _why_selected(offered, ranked)))
    return rows, chosen.offer.kernel if chosen else None


def _trial(offered: _Offered, request: Any, wanted: Settings) -> tuple[Stage, str]:
    kernel, status = offered.offer.kernel, offered.status
    failure = _failures.get(_plugin_key(kernel, request))
    if failure is not None:
        return failure
    result = verify.check(status, kernel, request, kernels_of(status.name), wanted.verify)
    if not result.ok:
        _warn_once(f"kernel {kernel.name!r} of {status.dist} {status.version} failed verification: {result.reason}")
        return Stage.FAILED_VERIFICATION, result.reason
    return Stage.SELECTED, ""


def _why_selected(chosen: _Offered, ranked: list[_Offered]) -> str:
    """Which offers of a higher rank the measured time of the chosen one beats; empty where the rank decided."""
    behind = ranked[ranked.index(chosen) + 1 :]
    beaten = [o.offer.kernel.name for o in behind if o.milliseconds is not None and _tier(o) > _tier(chosen)]
    if not beaten or chosen.milliseconds is None:
        return ""
    return _with_note(f"measured faster than {', '.join(beaten)}, which ranks higher", chosen.offer)


def _why_outranked(offered: _Offered, chosen: _Offered, order: Sequence[str]) -> str:
    if chosen.status.name in order and offered.status.name != chosen.status.name:
        why = f"{chosen.status.name} comes first in your order"
    elif _tier(offered) > EMULATED and _is_faster(chosen, offered):
        why = f"{chosen.offer.kernel.name} measured faster"
    else:
        why = f"{chosen.offer.kernel.name} ranks higher"
    return _with_note(why, offered.offer)


def _with_note(why: str, offer: Offer) -> str:
    return f"{why}; {offer.note}" if offer.note else why


def _is_faster(one: _Offered, other: _Offered) -> bool:
    """Whether both were measured and ``one`` took less time."""
    times = (one.milliseconds, other.milliseconds)
    return times[0] is not None and times[1] is not None and times[0] < times[1]


def _slow_hints(ranked: list[_Offered], rows: list[Candidate]) -> Iterable[str]:
    """Point at a kernel that serves although the fallback was measured faster: by the user's order, or strict."""
    best = next((o for o, row in zip(ranked, rows, strict=True) if row.stage == Stage.SELECTED.value), None)
    faster = [o for o in ranked if o.status.name == BUILTIN and best is not None and _is_faster(o, best)]
    if best is not None and faster and best.status.name != BUILTIN:
        name, (fallback, *_) = best.offer.kernel.name, faster
        yield (
            f"{name} was measured slower than the fallback: {best.milliseconds:.3g} ms against "
            f"{fallback.milliseconds:.3g} ms of {fallback.offer.kernel.name}."
        )


def _ties(ranked: list[_Offered], rows: list[Candidate], order: Sequence[str]) -> Iterable[str]:
    best = next((o for o, row in zip(ranked, rows, strict=True) if row.stage == Stage.SELECTED.value), None)
    if best is None or best.status.name in order:
        return
    for other in ranked:
        same = other.offer.rank == best.offer.rank and other.milliseconds == best.milliseconds
        if same and other.status.name != best.status.name and other.status.name not in order:
            yield (
                f"{best.status.name} and {other.status.name} offer the same rank; the name decided. "
                f"Set QCORE_BACKENDS, or run 'qcore tune'."
            )


def _setting_hints(wanted: Settings) -> Iterable[str]:
    """Names in the settings that mean nothing; each is warned about once."""
    known = registry.entries()
    for name in sorted(wanted.named() - known.keys()):
        yield _warn_once(
            f"no plugin is called {name!r}; installed: {', '.join(sorted(known))}.{did_you_mean(name, known)}"
        )
    if BUILTIN in wanted.disable:
        yield _warn_once(
            f"the built-in plugin {BUILTIN!r} cannot be disabled; strict=True refuses what it would serve."
        )


def _hardware_hints() -> Iterable[str]:
    installed = set(registry.entries())
    return filter(None, (seen.hint(installed) for seen in hardware.present()))


def _device_hints(request: Any) -> Iterable[str]:
    if not verify.can_run_on(request.device):
        yield f"torch cannot use {str(request.device)!r} on this machine: no kernel was checked."


def _fail_if_named_and_broken(status: PluginStatus, order: Sequence[str]) -> None:
    if status.broken and status.name in order:
        raise PluginError(
            f"plugin {status.name!r} ({status.dist} {status.version}), which you asked for, is broken.\n"
            f"{status.state}: {status.reason}\nRun 'qcore doctor', or take it out of the order of backends."
        ) from registry.error(status.name)


def _enforce_strict(decision: Decision, wanted: Settings) -> None:
    order = wanted.order(decision.request.contract)
    if decision.is_fallback and order[:1] != (BUILTIN,):
        behind = {c.plugin for c in decision.candidates if c.stage == Stage.OUTRANKED.value} - {BUILTIN}
        text = "only the fallback to torch ops can serve this request."
        if behind:
            names = " or ".join(sorted(behind))
            text = f"the fallback to torch ops ranks first for this request; {names} serves where backends name it."
        raise UnsupportedError(f"strict: {text}\n{decision}")


def _tell_observers(decision: Decision, wanted: Settings) -> None:
    for name in registry.entries():
        if registry.status(name, wanted.disable).state is State.AVAILABLE:
            with contextlib.suppress(*Guarded):
                registry.call(name, "qcore_decided", decision=decision)


def _warn_once(text: str) -> str:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, QcoreWarning, stacklevel=2)
    return text
