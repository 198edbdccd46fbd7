"""Discovery of plugins by entry point, one at a time and each step inside a guard.

A plugin that cannot be imported, registered or probed costs itself and nobody else: its status says why. Nothing is
imported before the first resolve or listing, and plugins that are disabled are not imported at all.
"""

from __future__ import annotations

import enum
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pluggy

from . import formats, hookspecs, settings
from ._cache import crash_mark, crashed
from .errors import PluginError, QcoreWarning, did_you_mean
from .hookspecs import ENTRY_POINT_GROUP, PROJECT
from .kernels import Available, Unavailable

BUILTIN = "torch"
"""The name of the built-in fallback plugin."""

PROBE_SECONDS = 10.0
"""A probe that has not answered by then counts as hung."""

_GROUP_PREFIX = "qcore.plugins."

Guarded = (Exception, SystemExit)
"""What a guard catches: everything but an interrupt. A plugin that calls ``sys.exit`` must not end the program."""


class State(str, enum.Enum):
    """How far a plugin got."""

    AVAILABLE = "available"
    BLOCKED = "blocked"
    WRONG_API = "wrong API"
    NAME_CONFLICT = "name conflict"
    IMPORT_FAILED = "import failed"
    REGISTRATION_FAILED = "registration failed"
    PROBE_FAILED = "probe failed"
    UNAVAILABLE = "unavailable"

    def __str__(self) -> str:
        return self.value


_BROKEN = (
    State.WRONG_API,
    State.NAME_CONFLICT,
    State.IMPORT_FAILED,
    State.REGISTRATION_FAILED,
    State.PROBE_FAILED,
)


@dataclass(frozen=True)
class PluginStatus:
    """What became of one plugin.

    **Fields:** ``name``; ``dist`` and ``version`` of the distribution it came from; ``state``; ``reason``: empty when
    available; ``device``, ``driver`` and ``details``: what its probe found; ``seconds``: time to import, register and
    probe it; ``broken``: whether something is wrong, as opposed to not applicable here.
    """

    name: str
    dist: str
    version: str
    state: State
    reason: str = ""
    device: str = ""
    driver: str = ""
    seconds: float = 0.0
    broken: bool = False
    details: Mapping[str, Any] = field(default_factory=dict, compare=False)


def crash_marks(name: str, dist: str, version: str) -> tuple[str, str]:
    """The keys of the crash marks that stand while a plugin is imported, and while it is probed."""
    return f"import {name} {dist} {version}", f"probe {name} {dist} {version}"


@dataclass
class _Entry:
    """One entry point, and how far it got."""

    name: str
    dist: str
    version: str
    load: Callable[[], Any]
    group: str = ENTRY_POINT_GROUP
    plugin: Any = None
    error: BaseException | None = None
    status: PluginStatus | None = None
    told: bool = False

    def set(self, state: State, reason: str = "", error: BaseException | None = None, **found: Any) -> PluginStatus:
        self.error = error
        broken = found.pop("broken", state in _BROKEN)
        self.status = PluginStatus(self.name, self.dist, self.version, state, reason, broken=broken, **found)
        return self.status


class Registry:
    """The plugins of this process."""

    def __init__(self, entries: Iterable[_Entry] | None = None) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] | None = None
        self._given = entries
        self._extra: list[PluginStatus] = []
        self.generation = 0

    def entries(self) -> dict[str, _Entry]:
        """Every plugin by name, without importing any."""
        with self._lock:
            if self._entries is None:
                found = [*_builtin(), *_scan()] if self._given is None else self._given
                self._entries = {}
                for entry in found:
                    self._add(self._entries, entry)
            return self._entries

    def _add(self, entries: dict[str, _Entry], entry: _Entry) -> None:
        holder = entries.get(entry.name)
        if holder is not None and entry.name == BUILTIN and entry.dist == holder.dist:
            return  # core's own entry point; the fallback is here even where core's metadata is not
        if entry.group != ENTRY_POINT_GROUP:
            reason = f"made for {entry.group}, this qcore speaks {ENTRY_POINT_GROUP}; upgrade {_older(entry)}."
            entry.set(State.WRONG_API, reason)
        if holder is None:
            entries[entry.name] = entry
            return
        reason = f"the name {entry.name!r} is taken by {holder.dist} {holder.version}; uninstall one of the two."
        self._extra.append(entry.set(State.NAME_CONFLICT, reason))

    def add(self, name: str, plugin: Any, dist: str = "", version: str = "") -> None:
        """Register a plugin object directly, as tests and notebooks do; one of the same name gives way."""
        with self._lock:
            if name in self.entries():
                self.remove(name)
            self.entries()[name] = _Entry(name, dist or name, version or "0", lambda: plugin)
            self.generation += 1

    def remove(self, name: str) -> None:
        """Forget a plugin that was added."""
        with self._lock:
            entry = self.entries().pop(name)
            if entry.plugin is not None and self._manager.is_registered(entry.plugin):
                self._manager.unregister(entry.plugin)
            self.generation += 1

    def status(self, name: str, disabled: frozenset[str] = frozenset()) -> PluginStatus:
        """The status of one plugin; imports, registers and probes it at the first asking."""
        entry = self.entries()[name]
        if name in disabled and name != BUILTIN:
            return PluginStatus(name, entry.dist, entry.version, State.BLOCKED, "disabled by the user")
        if not entry.told:
            with self._lock:
                self._settle(entry)
        assert entry.status is not None
        return entry.status

    def _settle(self, entry: _Entry) -> None:
        """Find out the status of a plugin, and say once what is wrong with it."""
        if entry.status is None:
            start = time.perf_counter()
            status = self._bring_up(entry)
            entry.status = replace(status, seconds=time.perf_counter() - start)
        if not entry.told:
            entry.told = True
            for status in (entry.status, *(s for s in self._extra if s.name == entry.name)):
                _warn_if_broken(status)

    def statuses(self, disabled: frozenset[str] = frozenset()) -> list[PluginStatus]:
        """Every plugin's status, the built-in one last."""
        names = sorted(self.entries(), key=lambda name: (name == BUILTIN, name))
        return [*(self.status(name, disabled) for name in names), *self.conflicts()]

    def conflicts(self) -> tuple[PluginStatus, ...]:
        """The plugins whose name another one holds."""
        self.entries()
        return tuple(self._extra)

    def error(self, name: str) -> BaseException | None:
        """The exception that broke a plugin, for chaining."""
        return self._up(name).error

    def call(self, name: str, hook: str, **arguments: Any) -> Any:
        """Call one hook of one plugin; what it raises passes through. None where it does not implement the hook."""
        plugin = self._up(name).plugin
        others = [p for p in self._manager.get_plugins() if p is not plugin]
        return self._manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)

    def implements(self, name: str, hook: str) -> bool:
        """Whether a plugin that is up implements a hook."""
        plugin = self._up(name).plugin
        return any(impl.plugin is plugin for impl in getattr(self._manager.hook, hook).get_hookimpls())

    def _up(self, name: str) -> _Entry:
        # Takes no lock: a probe runs in a thread of its own while the lock is held for it.
        assert self._entries is not None
        return self._entries[name]

    def load_layouts(self) -> None:
        """Bring up every plugin that is not disabled, so that the layouts they add are known."""
        self.statuses(settings.current().disable)

    def _bring_up(self, entry: _Entry) -> PluginStatus:
        importing, _ = marks = crash_marks(entry.name, entry.dist, entry.version)
        if entry.name != BUILTIN and any(crashed(mark) for mark in marks):
            state = State.IMPORT_FAILED if crashed(importing) else State.PROBE_FAILED
            return entry.set(state, "it ended an earlier process; run 'qcore doctor', which has a process for each.")
        try:
            with crash_mark(importing):
                entry.plugin = entry.load()
        except Guarded as error:
            return entry.set(State.IMPORT_FAILED, _words(error), error)
        try:
            self._register(entry)
        except Guarded as error:
            return entry.set(State.REGISTRATION_FAILED, _words(error), error)
        return self._probe(entry)

    def _register(self, entry: _Entry) -> None:
        self._manager.register(entry.plugin, entry.name)
        try:
            self._check_hooks(entry.plugin)
            for layouts in self.call(entry.name, "qcore_formats"):
                for layout in layouts:
                    formats.register_layout(layout, entry.name)
        except BaseException:
            self._manager.unregister(entry.plugin)
            raise

    def _check_hooks(self, plugin: Any) -> None:
        callers = self._manager.get_hookcallers(plugin) or []
        known = [name for name in dir(hookspecs) if name.startswith("qcore_")]
        for caller in callers:
            # A plugin may mark a hook of a newer qcore as optional, as pluggy's own check allows.
            asked = any(i.plugin is plugin and not i.optionalhook for i in caller.get_hookimpls())
            if asked and not caller.has_spec():
                raise PluginError(f"unknown hook {caller.name!r}.{did_you_mean(caller.name, known)}")
        if not callers:
            raise PluginError("it implements no hook; mark its functions with @qcore.hookimpl.")

    def _probe(self, entry: _Entry) -> PluginStatus:
        if not self.implements(entry.name, "qcore_probe"):
            return entry.set(State.AVAILABLE)
        try:
            with crash_mark(crash_marks(entry.name, entry.dist, entry.version)[1]):
                found = _limited(lambda: self.call(entry.name, "qcore_probe"), PROBE_SECONDS)
        except Guarded as error:
            return entry.set(State.PROBE_FAILED, _words(error), error)
        return _probed(entry, found)


def _probed(entry: _Entry, found: Any) -> PluginStatus:
    if isinstance(found, Available):
        details = dict(found.details or {})
        return entry.set(State.AVAILABLE, device=found.device, driver=found.driver, details=details)
    if isinstance(found, Unavailable) and found.reason:
        return entry.set(State.UNAVAILABLE, found.reason, broken=found.broken)
    return entry.set(State.PROBE_FAILED, f"its probe returned {found!r} instead of Available or Unavailable(reason).")


def _limited(call: Callable[[], Any], seconds: float) -> Any:
    """Run ``call`` in a thread of its own and give up on it after ``seconds``."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            outcome.append((None, error))

    # A daemon, so that a hung probe does not keep the interpreter from ending.
    thread = threading.Thread(target=run, name="qcore-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"its probe did not answer within {seconds:g} seconds.")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    text = str(error).strip()
    return text if text and isinstance(error, (PluginError, TimeoutError)) else f"{type(error).__name__}: {text}"


def _warn_if_broken(status: PluginStatus) -> None:
    if status.broken:
        warnings.warn(
            f"qcore plugin {status.name!r} ({status.dist} {status.version}) is out of use: "
            f"{status.state}: {status.reason}\n"
            f"Run 'qcore doctor' for details, or set QCORE_DISABLE={status.name} to silence this.",
            QcoreWarning,
            stacklevel=2,
        )


def _older(entry: _Entry) -> str:
    """Which of the two to upgrade, where a plugin speaks another version of the API."""
    theirs, ours = (group.removeprefix(_GROUP_PREFIX).lstrip("v") for group in (entry.group, ENTRY_POINT_GROUP))
    return "qcore" if theirs.isdigit() and int(theirs) > int(ours) else entry.dist


def _builtin() -> list[_Entry]:
    from ._version import __version__

    def load() -> Any:
        from .fallback import plugin

        return plugin

    return [_Entry(BUILTIN, "qcore", __version__, load)]


def _scan() -> list[_Entry]:
    """Entry points of every API version, in a stable order."""
    import importlib_metadata

    points = [point for point in importlib_metadata.entry_points() if point.group.startswith(_GROUP_PREFIX)]
    found = [_Entry(point.name, *_provider(point), point.load, point.group) for point in points]
    # Entry points of this API first: where names clash, the plugin that works should hold the name.
    return sorted(found, key=lambda e: (e.group != ENTRY_POINT_GROUP, e.dist, e.name))


def _provider(point: Any) -> tuple[str, str]:
    """Name and version of the distribution behind an entry point."""
    try:
        # Two lines are wanted: asking for dist.name would import an e-mail parser first.
        head = (point.dist.read_text("METADATA") or point.dist.read_text("PKG-INFO") or "").partition("\n\n")[0]
    except Exception:  # noqa: BLE001 - half-removed installations raise in many ways
        head = ""
    found = dict(re.findall(r"^(Name|Version):\s*(\S+)", head, re.MULTILINE))
    return found.get("Name", "?"), found.get("Version", "?")


registry = Registry()
"""The process's plugins."""

formats.load_plugin_layouts = registry.load_layouts


def plugins() -> list[PluginStatus]:
    """The status of every installed plugin; imports and probes those that are not disabled."""
    return registry.statuses(settings.current().disable)
