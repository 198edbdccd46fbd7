"""Discovers plugins by entry point, one at a time, each step inside a guard.

A plugin that cannot be imported, registered or probed affects no other plugin: its status says why. Nothing is
imported before the first resolve or listing, and plugins that are disabled are not imported at all.
"""

from __future__ import annotations

import enum
import importlib
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pluggy

from ..errors import PluginError, QcoreWarning, did_you_mean
from ..formats import elements, layouts
from ..runtime import disk_cache, forks, guard, plain_text, settings
from ..runtime.guard import StepError, guarded, mark_key
from ..weights import quantizers, registered_quantizers
from . import answers, hookspecs
from .hookspecs import ENTRY_POINT_GROUP, PROJECT
from .kernels import Available, Unavailable

BUILTIN = guard.BUILTIN
"""The name of the built-in fallback plugin."""
_BUILTIN_MODULE = "qcore.fallback.plugin"
"""Loaded by name, like every plugin: discovery must not import from the floors above it."""

PROBE_SECONDS = 10.0
"""A probe that has not returned after this many seconds counts as hung."""

_GROUP = re.compile(r"qcore[._-]plugins?(?P<version>[._-].*)?", re.IGNORECASE)
"""Entry-point groups of qcore plugins, with any API version or without one."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names that can be written in a list of backends."""

_T = TypeVar("_T")

Guarded = (Exception, SystemExit)
"""The exceptions that a guard catches: all but KeyboardInterrupt. A plugin's ``sys.exit`` must not end the program."""


class State(str, enum.Enum):
    """How far a plugin got."""

    AVAILABLE = "available"
    BLOCKED = "blocked"
    WRONG_API = "wrong API"
    BAD_NAME = "bad name"
    NAME_CONFLICT = "name conflict"
    IMPORT_FAILED = "import failed"
    REGISTRATION_FAILED = "registration failed"
    PROBE_FAILED = "probe failed"
    UNAVAILABLE = "unavailable"

    def __str__(self) -> str:
        return self.value


_BROKEN = (
    State.WRONG_API,
    State.BAD_NAME,
    State.NAME_CONFLICT,
    State.IMPORT_FAILED,
    State.REGISTRATION_FAILED,
    State.PROBE_FAILED,
)


@dataclass(frozen=True)
class PluginStatus:
    """The status of one plugin.

    **Fields:** ``name``; ``dist`` and ``version`` of the distribution it came from; ``state``; ``reason``: empty when
    available; ``device``, ``driver`` and ``details``: as its probe reported them; ``seconds``: time to import, register
    and probe it; ``broken``: True for a defect, False if the plugin is merely not applicable here.
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


def crash_marks(name: str, dist: str, version: str) -> tuple[str, str, str]:
    """The keys of the crash marks for a plugin's import, probe and registration, in this order."""
    plugin = PluginStatus(name, dist, version, State.AVAILABLE)
    return mark_key("import", plugin), mark_key("probe", plugin), mark_key("register", plugin)


@dataclass
class _Entry:
    """One entry point and its progress through import, registration and probe."""

    name: str
    dist: str
    version: str
    load: Callable[[], Any]
    group: str = ENTRY_POINT_GROUP
    plugin: Any = None
    manager: pluggy.PluginManager | None = None
    error: BaseException | None = None
    status: PluginStatus | None = None
    started: bool = False
    warned: bool = False
    is_object: bool = False

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call one hook; None if the plugin does not implement it."""
        # Each plugin has its own manager: pluggy reads attributes, hashes and equality of every plugin in one.
        return None if self.manager is None else getattr(self.manager.hook, hook)(**arguments)

    def implements(self, hook: str) -> bool:
        return self.manager is not None and bool(getattr(self.manager.hook, hook).get_hookimpls())

    def set(self, state: State, reason: str = "", error: BaseException | None = None, **found: Any) -> PluginStatus:
        self.error = error
        broken = found.pop("broken", state in _BROKEN)
        self.status = PluginStatus(self.name, self.dist, self.version, state, reason, broken=broken, **found)
        return self.status


class Registry:
    """The plugins of this process."""

    def __init__(self, entries: Iterable[_Entry] | None = None) -> None:
        self._lock = forks.Lock(awaited=True)
        self._entries: dict[str, _Entry] | None = None
        self._given = entries
        self._extra: list[PluginStatus] = []
        self.generation = 0

    def entries(self) -> dict[str, _Entry]:
        """Every plugin by name, without importing any."""
        with self._lock:
            if self._entries is None:
                found = [*_builtin(), *_scan()] if self._given is None else list(self._given)
                # Assigned in one step: other threads read without the lock, and a fork may happen at any time.
                self._entries, self._extra = _resolve_names(found)
            return self._entries

    def add(self, name: str, plugin: Any, dist: str = "", version: str = "") -> None:
        """Register a plugin object directly, as tests and notebooks do; it replaces one of the same name."""
        with self._lock:
            others = {key: entry for key, entry in self.entries().items() if key != name}
            self._entries = {**others, name: _Entry(name, dist or name, version or "0", lambda: plugin, is_object=True)}
            self.generation += 1

    def is_object(self, name: str) -> bool:
        """Whether a plugin was added to this process, which others do not know."""
        return self.entries()[name].is_object

    def remove(self, name: str) -> None:
        """Forget a plugin that was added."""
        with self._lock:
            self._entries = {key: entry for key, entry in self.entries().items() if key != name}
            self.generation += 1

    def status(self, name: str, disabled: frozenset[str] = frozenset()) -> PluginStatus:
        """The status of one plugin; imports, registers and probes it at the first call."""
        entry = self.entries()[name]
        if name in disabled and name != BUILTIN:
            return PluginStatus(name, entry.dist, entry.version, State.BLOCKED, "disabled by the user")
        if not entry.warned:
            with self._lock:
                self._determine_status(entry)
        assert entry.status is not None
        return entry.status

    def _determine_status(self, entry: _Entry) -> None:
        """Determine the status of a plugin, and warn once if it is broken."""
        if entry.status is None:
            start = time.perf_counter()
            entry.started = True
            status = _load(entry)
            entry.status = replace(status, seconds=time.perf_counter() - start)
        if not entry.warned:
            entry.warned = True
            for status in (entry.status, *(s for s in self._extra if s.name == entry.name)):
                _warn_if_broken(status)

    def statuses(self, disabled: frozenset[str] = frozenset()) -> list[PluginStatus]:
        """Every plugin's status, the built-in one last."""
        names = sorted(self.entries(), key=lambda name: (name == BUILTIN, name))
        return [*(self.status(name, disabled) for name in names), *self.conflicts()]

    def conflicts(self) -> tuple[PluginStatus, ...]:
        """The plugins that lost their name to another one."""
        self.entries()
        return tuple(self._extra)

    def error(self, name: str) -> BaseException | None:
        """The exception that broke a plugin, for chaining."""
        return self._entry(name).error

    def call(self, name: str, hook: str, **arguments: Any) -> Any:
        """Call one hook of one plugin; exceptions propagate. Returns None if it does not implement the hook."""
        return self._entry(name).call(hook, **arguments)

    def implements(self, name: str, hook: str) -> bool:
        """Whether a loaded plugin implements a hook."""
        return self._entry(name).implements(hook)

    def repair(self) -> None:
        """In a forked child: mark plugins that another thread was loading as failed; their import locks stay held."""
        for entry in (self._entries or {}).values():
            if entry.started and entry.status is None:
                reason = "another thread was loading it when this process was forked; use it before the fork, or spawn."
                entry.set(State.IMPORT_FAILED, reason)

    def _entry(self, name: str) -> _Entry:
        # Takes no lock: the probe's thread calls this while the thread that waits for it holds the lock.
        assert self._entries is not None
        return self._entries[name]

    def load_plugins(self) -> None:
        """Load every plugin that is not disabled, so that their elements, layouts and quantizers are known.

        A plugin that is being registered may call this, too, for an element of another plugin; it is itself skipped.
        """
        disabled = settings.current().disable
        for name in sorted(self.entries()):
            with self._lock:
                entry = self.entries().get(name)
                if entry is not None and not (entry.started and entry.status is None):
                    self.status(name, disabled)


def _load(entry: _Entry) -> PluginStatus:
    """Import, register and probe a plugin: three steps, each of which may fail."""
    marks = crash_marks(entry.name, entry.dist, entry.version)
    steps = (
        (State.IMPORT_FAILED, "its import", marks[0], _import, None),
        (State.REGISTRATION_FAILED, "its registration", marks[2], _register, None),
        (State.PROBE_FAILED, "its probe", marks[1], _probe, 2 * PROBE_SECONDS),  # `_probe` times out first
    )
    if entry.name != BUILTIN:
        for state, _, mark, _, _ in steps:
            if left := disk_cache.left_over(mark):
                return entry.set(state, f"it {left}; run 'qcore doctor', which probes each plugin in its own process.")
    found: Available | Unavailable = Available()
    try:
        for state, doing, mark, step, seconds in steps:  # noqa: B007 - the handler below reads the failed state
            with guarded(entry, doing, mark, seconds):
                found = step(entry)
    except StepError as error:
        return entry.set(state, _reason(error), error.cause)
    if isinstance(found, Unavailable):
        return entry.set(State.UNAVAILABLE, found.reason, broken=found.broken)
    return entry.set(State.AVAILABLE, device=found.device, driver=found.driver, details=dict(found.details or {}))


def _import(entry: _Entry) -> Available:
    entry.plugin = entry.load()
    return Available()


def _register(entry: _Entry) -> Available:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry.plugin, entry.name)
    _check_hooks(manager, entry.plugin)
    _register_formats(manager, entry.name)
    entry.manager = manager
    return Available()


def _register_formats(manager: pluggy.PluginManager, plugin: str) -> None:
    """Register what a plugin adds to formats and schemes: all of it or, if anything is wrong, nothing."""
    # All answers, before the first is taken: a generator may raise in the middle.
    new_elements = answers.elements(manager.hook.qcore_elements())
    new_layouts = answers.layouts(manager.hook.qcore_formats())
    new_quantizers = answers.quantizers(manager.hook.qcore_quantizers())
    known = [
        set(found())
        for found in (
            elements.registered_elements, layouts.registered_layouts, registered_quantizers.registered_quantizers,
        )
    ]  # fmt: skip
    try:
        for element in new_elements:  # first: layouts and quantizers name them
            elements.register_element(element, plugin)
        for layout in new_layouts:
            layouts.register_layout(layout, plugin)
        for quantizer in new_quantizers:
            for name in quantizer.elements or ():
                elements.find_element(name)
            registered_quantizers.register_quantizer(quantizer, plugin, quantizers.QUANTIZERS)
    except BaseException:
        elements.forget_elements(set(elements.registered_elements()) - known[0], plugin)
        layouts.forget_layouts(set(layouts.registered_layouts()) - known[1], plugin)
        registered_quantizers.forget_quantizers(set(registered_quantizers.registered_quantizers()) - known[2], plugin)
        raise


def _check_hooks(manager: pluggy.PluginManager, plugin: Any) -> None:
    callers = manager.get_hookcallers(plugin) or []
    known = [name for name in dir(hookspecs) if name.startswith("qcore_")]
    for caller in callers:
        # A plugin may mark a hook of a newer qcore as optional, as pluggy's own check allows.
        if not caller.has_spec() and not all(i.optionalhook for i in caller.get_hookimpls()):
            raise PluginError(f"unknown hook {caller.name!r}.{did_you_mean(caller.name, known)}")
    if not callers:
        raise PluginError("it implements no hook; mark its functions with @qcore.hookimpl.")


def _probe(entry: _Entry) -> Available | Unavailable:
    if not entry.implements("qcore_probe"):
        return Available()
    return _limited(lambda: answers.probed(entry.call("qcore_probe")), PROBE_SECONDS)


def _limited(call: Callable[[], _T], seconds: float) -> _T:
    """Run ``call`` in a thread of its own; raises `TimeoutError` after ``seconds``."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with forks.waited_for():
                results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)

    # A daemon, so that a hung probe does not block interpreter exit.
    thread = threading.Thread(target=run, name="qcore-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    for error in errors:
        raise StepError(plain_text.of_error(error), error) if isinstance(error, KeyboardInterrupt) else error
    if not results:
        raise TimeoutError(f"its probe did not answer within {seconds:g} seconds.")
    return results[0]


def _reason(error: StepError) -> str:
    if isinstance(error.cause, SystemExit):
        return f"it called sys.exit({plain_text.described(error.cause.code)})"
    own = isinstance(error.cause, (PluginError, TimeoutError)) and plain_text.message(error.cause)
    return own or error.reason


def _warn_if_broken(status: PluginStatus) -> None:
    if status.broken:
        warnings.warn(
            f"qcore plugin {status.name!r} ({status.dist} {status.version}) cannot be used: "
            f"{status.state}: {status.reason}\n"
            f"Run 'qcore doctor' for details{_silence(status)}.",
            QcoreWarning,
            stacklevel=2,
        )


def _silence(status: PluginStatus) -> str:
    """How to silence a warning; empty if this plugin cannot be disabled by name."""
    permanent = status.name == BUILTIN or status.state in (State.BAD_NAME, State.NAME_CONFLICT)
    return "" if permanent else f", or set QCORE_DISABLE={status.name} to silence this"


def _builtin() -> list[_Entry]:
    from .._version import __version__

    def load() -> Any:
        return importlib.import_module(_BUILTIN_MODULE)

    return [_Entry(BUILTIN, "qcore", __version__, load)]


def _scan() -> list[_Entry]:
    """Entry points of every API version, in a stable order."""
    import importlib_metadata

    points = [point for point in importlib_metadata.entry_points() if _GROUP.fullmatch(point.group)]
    found = [_Entry(plain_text.plain(point.name), *_provider(point), point.load, point.group) for point in points]
    return sorted(found, key=lambda e: (e.group != ENTRY_POINT_GROUP, e.dist, e.name))


def _resolve_names(found: Iterable[_Entry]) -> tuple[dict[str, _Entry], list[PluginStatus]]:
    """The plugins by name, and the status of each plugin that lost a name conflict."""
    entries: dict[str, _Entry] = {}
    lost: list[PluginStatus] = []
    # In a conflict, prefer a plugin of this API version, then the distribution named after the plugin.
    for entry in sorted(found, key=lambda e: (e.group != ENTRY_POINT_GROUP, not _is_named_after(e.dist, e.name))):
        holder = entries.get(entry.name)
        if holder is not None and entry.name == BUILTIN and entry.dist == holder.dist:
            continue  # core's own entry point; the fallback must work even without core's metadata
        if entry.group != ENTRY_POINT_GROUP:
            reason = f"made for {entry.group}, this qcore supports {ENTRY_POINT_GROUP}; upgrade {_older(entry)}."
            entry.set(State.WRONG_API, reason)
        elif not _NAME.fullmatch(entry.name):
            reason = f"{entry.name!r} cannot be written in a list of names; its authors should rename its entry point."
            entry.set(State.BAD_NAME, reason)
        if holder is None:
            entries[entry.name] = entry
        else:
            taken = f"the name {entry.name!r} is taken by {holder.dist} {holder.version}; uninstall one of the two."
            lost.append(entry.set(State.NAME_CONFLICT, taken))
    return entries, lost


def _is_named_after(dist: str, name: str) -> bool:
    """Whether a distribution owns a plugin's name: qcore owns every name, qcore-x owns x."""
    normal = re.sub(r"[-_.]+", "-", dist).lower()
    return normal in ("qcore", f"qcore-{re.sub(r'[-_.]+', '-', name).lower()}")


def _older(entry: _Entry) -> str:
    """Which of the two to upgrade if a plugin was made for another version of the API."""
    versions = [re.sub(r"\D", "", group.rpartition(".")[2]) for group in (entry.group, ENTRY_POINT_GROUP)]
    theirs, ours = (int(version) if version else 0 for version in versions)
    return "qcore" if theirs > ours else entry.dist


def _provider(point: Any) -> tuple[str, str]:
    """Name and version of the distribution behind an entry point."""
    try:
        # Only two lines are needed: dist.name would import the e-mail parser.
        head = (point.dist.read_text("METADATA") or point.dist.read_text("PKG-INFO") or "").partition("\n\n")[0]
    except Exception:  # noqa: BLE001 - half-removed installations raise in many ways
        head = ""
    found = dict(re.findall(r"^(Name|Version):\s*(\S+)", head, re.MULTILINE))
    return plain_text.plain(found.get("Name", "?")), plain_text.plain(found.get("Version", "?"))


registry = Registry()
"""The process's plugins."""

elements.load_plugin_elements = registry.load_plugins
layouts.load_plugin_layouts = registry.load_plugins
registered_quantizers.load_plugin_quantizers = registry.load_plugins
forks.after_broken_fork(registry.repair)


def plugins() -> list[PluginStatus]:
    """The status of every installed plugin; imports and probes those that are not disabled."""
    return registry.statuses(settings.current().disable)
