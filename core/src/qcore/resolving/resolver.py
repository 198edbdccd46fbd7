"""Selects a kernel for a request and explains the decision.

Order: the user's order, then rank, then name. An offer that ``qcore tune`` measured on this device comes after every
offer that it measured as faster, whatever their ranks: a rank is an expectation, a time is a measurement.
Kernels of software devices stay last, and under ``strict`` no plugin comes after the fallback. The first offer in that
order that passes verification is selected.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..contracts import Request
from ..discovery import hardware
from ..discovery.answers import name_of
from ..discovery.kernels import EMULATED, Kernel, Offer
from ..discovery.registry import BUILTIN, PluginStatus, State, registry
from ..errors import PluginError, UnsupportedError, did_you_mean
from ..formats import BrokenLayoutError
from ..runtime import disk_cache, forks, settings
from ..runtime.guard import FIRST_CALL_SECONDS, Plugin, StepError, guarded, mark_key, note_failure
from ..runtime.plain_text import plain
from ..runtime.settings import Settings
from . import tuning, verification
from .decision import Candidate, Decision, Stage
from .offers import (
    CACHE_LIMIT,
    HOW_TO_CLEAR,
    Offered,
    ask,
    device_and_signature,
    first_offered_names,
    kernels_of,
    row_of,
    warn_once,
)

_TIER = 1000

_lock = forks.Lock(awaited=True)
_decisions: dict[Any, Decision] = {}
_failures: dict[tuple[str, str, Any], tuple[Stage, str]] = {}

_STAGES = {"pack": "its pack", "call": "its first call"}


def resolve(
    request: Request,
    *,
    backends: str | Iterable[str] | None = None,
    disable: str | Iterable[str] | None = None,
    strict: bool | None = None,
    verify: str | None = None,
) -> Decision:
    """Select a kernel for a request: a `LinearRequest`, `Conv2dRequest`, `EmbeddingRequest` or `GroupedLinearRequest`.

    The arguments are those of `using` and take precedence over every other setting. Raises `UnsupportedError`, with the
    decision table in its message, if no kernel supports the request, or under ``strict`` if only the fallback does;
    `PluginError` if a plugin that the user named is broken.
    """
    decision = decide(request, settings.current(backends=backends, disable=disable, strict=strict, verify=verify))
    if decision.kernel is None:
        raise UnsupportedError(f"no kernel supports this request.\n{decision}")
    return decision


def decide(request: Request, wanted: Settings) -> Decision:
    """The decision under the given settings, cached. Its ``kernel`` is None if none supports the request."""
    key = (request, wanted, registry.generation)
    found = _decisions.get(key) or _decide_once(key, request, wanted)
    if wanted.strict:
        _enforce_strict(found, wanted)
    return found


def _decide_once(key: Any, request: Request, wanted: Settings) -> Decision:
    with _lock:
        # Another thread may have decided the same request while this one waited for the lock.
        found = _decisions.get(key)
        if found is not None:
            return found
        found = _decide(request, wanted)
        if len(_decisions) >= CACHE_LIMIT:
            _decisions.clear()
        _decisions[key] = found
    _notify_observers(found, wanted)
    return found


def forget() -> None:
    """Clear cached decisions and failures, e.g. after ``qcore tune`` stored new times."""
    with _lock:
        _decisions.clear()
        _failures.clear()
        first_offered_names.clear()


def report_failure(request: Request, kernel: Kernel, reason: str, stage: Stage = Stage.FAILED_IN_USE) -> None:
    """Disable a kernel for requests of this signature: it failed with a layer's own weight, at ``stage``."""
    with _lock:
        _failures[_failure_key(kernel, request)] = (stage, reason)
        _decisions.clear()


def withdraw_failure(request: Request, kernel: Kernel) -> None:
    """Undo `report_failure`: the next kernel failed, too, so the input was at fault."""
    with _lock:
        _failures.pop(_failure_key(kernel, request), None)
        _decisions.clear()


def _failure_key(kernel: Kernel, request: Request) -> tuple[str, str, Any]:
    return (name_of(kernel), str(request.device), request.signature())


def _decide(request: Request, wanted: Settings) -> Decision:
    order = wanted.order(request.contract)
    offers: list[Offered] = []
    others: list[Candidate] = []
    for name in registry.entries():
        status = registry.status(name, wanted.disable)
        _fail_if_named_and_broken(status, order)
        if status.state is State.AVAILABLE:
            found = ask(status, request, order)
            offers += [_with_time(answer, request) for answer in found if isinstance(answer, Offered)]
            others += [answer for answer in found if isinstance(answer, Candidate)]
        else:
            others.append(row_of(status, str(status.state), status.reason))
    others += [row_of(status, str(status.state), status.reason) for status in registry.conflicts()]
    ranked = _rank(offers, wanted, order)
    rows, kernel = _select(ranked, request, wanted, order)
    slow = _slow_hints(ranked, rows)
    hints = (
        *_setting_hints(wanted),
        *_tie_hints(ranked, rows, order),
        *slow,
        *_hardware_hints(),
        *_device_hints(request),
    )
    return Decision(request, (*rows, *others), kernel, hints)


def _with_time(offered: Offered, request: Request) -> Offered:
    """The offer with its time from ``qcore tune``."""
    return replace(offered, milliseconds=tuning.measured(request, offered.status, offered.offer.kernel))


def _rank(offers: list[Offered], wanted: Settings, order: Sequence[str]) -> list[Offered]:
    def key(offered: Offered) -> tuple[Any, ...]:
        name = offered.status.name
        place = order.index(name) if name in order else len(order)
        return (place, -offered.offer.rank, name, offered.name)

    groups = itertools.groupby(sorted(offers, key=key), key=lambda o: key(o)[0])
    return [offered for _, members in groups for offered in _by_time(list(members), wanted)]


def _by_time(ranked: list[Offered], wanted: Settings) -> list[Offered]:
    """Offers in order of rank, but each measured one after every one that was measured faster.

    The slower one moves down and the faster one stays: unmeasured offers between them keep their precedence.
    """
    waiting = sorted((o for o in ranked if _time_counts(o, wanted)), key=lambda o: o.milliseconds or 0.0)
    ordered: list[Offered] = []
    reached: list[Offered] = []
    for offered in ranked:
        if not _time_counts(offered, wanted):
            ordered.append(offered)
            continue
        reached.append(offered)
        while waiting and any(waiting[0] is o for o in reached):
            ordered.append(waiting.pop(0))
    return ordered


def _time_counts(offered: Offered, wanted: Settings) -> bool:
    """Whether an offer's measured time may override ranks."""
    barred = wanted.strict and offered.status.name == BUILTIN
    return offered.milliseconds is not None and _tier(offered) > EMULATED and not barred


def _tier(offered: Offered) -> int:
    # Fine-tuning may be negative: NATIVE - 5 is still native.
    return (int(offered.offer.rank) + _TIER // 2) // _TIER


def _select(
    ranked: list[Offered], request: Request, wanted: Settings, order: Sequence[str]
) -> tuple[list[Candidate], Kernel | None]:
    rows: list[Candidate] = []
    chosen: Offered | None = None
    for offered in ranked:
        if chosen is not None:
            rows.append(offered.candidate(Stage.OUTRANKED, _why_outranked(offered, chosen, order)))
            continue
        stage, reason = _try_offer(offered, request, wanted)
        chosen = offered if stage is Stage.SELECTED else None
        rows.append(offered.candidate(stage, reason or _why_selected(offered, ranked)))
    return rows, chosen.offer.kernel if chosen else None


def _try_offer(offered: Offered, request: Request, wanted: Settings) -> tuple[Stage, str]:
    kernel, status = offered.offer.kernel, offered.status
    failure = _failures.get(_failure_key(kernel, request)) or _renamed(offered, request)
    if failure is not None:
        return failure
    key = f"verify {verification.verdict_key(status, kernel, request)}"  # the mark that `verification` sets
    reason = crash_reason(status, kernel, request)
    if reason:
        warn_once(f"kernel {offered.name!r} of {status.dist} {status.version} is skipped: {reason}")
        return Stage.FAILED_IN_USE, reason
    # `guarded` would overwrite the mark that an earlier crash left.
    step = guarded(status, f"the verification of {offered.name}", key, FIRST_CALL_SECONDS)
    try:
        with contextlib.nullcontext() if disk_cache.crashed(key) else step:
            result = verification.check(status, kernel, request, kernels_of(status.name), wanted.verify)
    except StepError as error:
        if isinstance(error.cause, BrokenLayoutError):  # the layout's fault, so no other kernel can help
            raise error.cause from None
        result = verification.Check(False, f"raised {error.reason}")
    reason = plain(result.reason)
    record_kernel_failure(status, kernel, request, "" if result.ok else f"failed verification: {reason}")
    if not result.ok:
        warn_once(f"kernel {offered.name!r} of {status.dist} {status.version} failed verification: {reason}")
        return Stage.FAILED_VERIFICATION, reason
    return Stage.SELECTED, ""


def _renamed(offered: Offered, request: Request) -> tuple[Stage, str] | None:
    """The failure row of a kernel under a new name: a plugin that renames a failed kernel would be retried forever."""
    before = first_offered_names.get((offered.status.name, request), frozenset())
    failed = any((name, str(request.device), request.signature()) in _failures for name in before)
    if offered.name in before or not failed:
        return None
    return Stage.FAILED_IN_USE, "another kernel of this plugin failed, and this one was not offered before"


def kernel_key(stage: str, plugin: Plugin, kernel: Kernel, request: Request) -> str:
    """The key of the crash mark of a kernel at ``stage`` (pack, call) for requests of one signature."""
    return mark_key(stage, plugin, f"{name_of(kernel)} {device_and_signature(request)}")


def record_kernel_failure(plugin: Plugin, kernel: Kernel, request: Request, failure: str) -> None:
    """Record on disk that a kernel failed for requests of one signature; an empty ``failure`` removes the record."""
    key = kernel_key("failed", plugin, kernel, request)
    if failure:
        note_failure(plugin, key, f"{name_of(kernel)} for {request.weight} on {request.device}: {failure}")
    elif plugin.name != BUILTIN:
        disk_cache.remove(disk_cache.FAILURES, key)


def crash_reason(plugin: Plugin, kernel: Kernel, request: Request) -> str:
    """How a kernel ended or hung an earlier process with requests of this signature; empty if it did not."""
    for stage, step in _STAGES.items():
        if left := disk_cache.left_over(kernel_key(stage, plugin, kernel, request)):
            return f"{step} {left} {HOW_TO_CLEAR}"
    return ""


def _why_selected(chosen: Offered, ranked: list[Offered]) -> str:
    """Which offers of a higher rank were measured slower than the selected one; empty if the rank decided."""
    slower = ranked[ranked.index(chosen) + 1 :]
    beaten = [o.name for o in slower if o.milliseconds is not None and _tier(o) > _tier(chosen)]
    if not beaten or chosen.milliseconds is None:
        return ""
    return _with_note(f"measured faster than {', '.join(beaten)}, which ranks higher", chosen.offer)


def _why_outranked(offered: Offered, chosen: Offered, order: Sequence[str]) -> str:
    if chosen.status.name in order and offered.status.name != chosen.status.name:
        why = f"{chosen.status.name} comes first in your order"
    elif _tier(offered) > EMULATED and _is_faster(chosen, offered):
        why = f"{chosen.name} measured faster"
    else:
        why = f"{chosen.name} ranks higher"
    return _with_note(why, offered.offer)


def _with_note(why: str, offer: Offer) -> str:
    return f"{why}; {offer.note}" if offer.note else why


def _is_faster(one: Offered, other: Offered) -> bool:
    """Whether both were measured and ``one`` took less time."""
    times = (one.milliseconds, other.milliseconds)
    return times[0] is not None and times[1] is not None and times[0] < times[1]


def _selected(ranked: list[Offered], rows: list[Candidate]) -> Offered | None:
    return next((o for o, row in zip(ranked, rows, strict=True) if row.stage == Stage.SELECTED.value), None)


def _slow_hints(ranked: list[Offered], rows: list[Candidate]) -> Iterable[str]:
    """A hint if the selected kernel was measured slower than the fallback (by the user's order, or under strict)."""
    best = _selected(ranked, rows)
    faster = [o for o in ranked if o.status.name == BUILTIN and best is not None and _is_faster(o, best)]
    if best is not None and faster and best.status.name != BUILTIN:
        name, (fallback, *_) = best.name, faster
        yield (
            f"{name} was measured slower than the fallback: {best.milliseconds:.3g} ms, against "
            f"{fallback.milliseconds:.3g} ms for {fallback.name}."
        )


def _tie_hints(ranked: list[Offered], rows: list[Candidate], order: Sequence[str]) -> Iterable[str]:
    best = _selected(ranked, rows)
    if best is None or best.status.name in order:
        return
    for other in ranked:
        same = other.offer.rank == best.offer.rank and other.milliseconds == best.milliseconds
        if same and other.status.name != best.status.name and other.status.name not in order:
            yield (
                f"{best.status.name} and {other.status.name} have the same rank; the first name is selected. "
                f"Set QCORE_BACKENDS, or run 'qcore tune'."
            )


def _setting_hints(wanted: Settings) -> Iterable[str]:
    """Unknown names in the settings; each is warned about once."""
    known = registry.entries()
    for name in sorted(wanted.named().difference(known)):
        yield warn_once(
            f"no plugin is called {name!r}; installed: {', '.join(sorted(known))}.{did_you_mean(name, known)}"
        )
    if BUILTIN in wanted.disable:
        yield warn_once(f"the built-in plugin {BUILTIN!r} cannot be disabled; strict=True refuses its kernels.")


def _hardware_hints() -> Iterable[str]:
    installed = set(registry.entries())
    return filter(None, (seen.hint(installed) for seen in hardware.present()))


def _device_hints(request: Request) -> Iterable[str]:
    if not verification.can_run_on(request.device):
        yield f"torch cannot use {str(request.device)!r} on this machine, so no kernel was verified."


def _fail_if_named_and_broken(status: PluginStatus, order: Sequence[str]) -> None:
    if status.broken and status.name in order:
        raise PluginError(
            f"plugin {status.name!r} ({status.dist} {status.version}), which you asked for, is broken.\n"
            f"{status.state}: {status.reason}\nRun 'qcore doctor', or remove it from the order of backends."
        ) from registry.error(status.name)


def _enforce_strict(decision: Decision, wanted: Settings) -> None:
    order = wanted.order(decision.request.contract)
    if decision.is_fallback and order[:1] != (BUILTIN,):
        outranked = {c.plugin for c in decision.candidates if c.stage == Stage.OUTRANKED.value} - {BUILTIN}
        text = "only the fallback to torch ops supports this request."
        if outranked:
            names = " or ".join(sorted(outranked))
            text = f"the fallback to torch ops ranks first for this request; name {names} in backends to select it."
        raise UnsupportedError(f"strict: {text}\n{decision}")


def _notify_observers(decision: Decision, wanted: Settings) -> None:
    for name in registry.entries():
        status = registry.status(name, wanted.disable)
        if status.state is State.AVAILABLE and registry.implements(name, "qcore_decided"):
            _notify(status, mark_key("observer", status), decision)


def _notify(status: PluginStatus, key: str, decision: Decision) -> None:
    if left := disk_cache.left_over(key):
        who = f"plugin {status.name!r} ({status.dist} {status.version})"
        warn_once(f"{who} is not notified of decisions: qcore_decided {left} {HOW_TO_CLEAR}")
        return
    # Exceptions are ignored: an observer must not affect the decision.
    with contextlib.suppress(StepError), guarded(status, "qcore_decided", key):
        registry.call(status.name, "qcore_decided", decision=copy.copy(decision))
