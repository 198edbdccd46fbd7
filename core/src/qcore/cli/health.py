"""The checks of ``qcore doctor``: the machine, the settings, the plugins, the cache."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from typing import Any

from .. import __version__
from ..discovery import hardware
from ..discovery.registry import BUILTIN, PROBE_SECONDS, PluginStatus, State, crash_marks, registry
from ..errors import QcoreError, did_you_mean
from ..runtime import disk_cache, settings
from ..runtime.plain_text import plain
from .findings import Finding
from .probing import probe_all

_CLEAR = "After fixing the cause, run: qcore doctor --clear"
_FAR_FUTURE = 1e11

_SETTINGS = {
    "backends": "QCORE_BACKENDS",
    "disable": "QCORE_DISABLE",
    "strict": "QCORE_STRICT",
    "verify": "QCORE_VERIFY",
}


def machine() -> dict[str, str]:
    """Versions, interpreter, platform, cache directory."""
    return {
        "qcore": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "cache": f"{disk_cache.cache_dir_text()} ({'writable' if cache_writable() else 'not writable'})",
    }


def cache_writable() -> bool:
    """Whether a record can be stored. Writes one, since permissions do not reveal a read-only file system."""
    stored = disk_cache.write("doctor", "writable?")
    disk_cache.remove("doctor", "writable?")
    return stored


def settings_in_force() -> tuple[settings.Settings, list[Finding]]:
    """The settings in force; if the environment is invalid, the defaults and a finding."""
    try:
        return settings.current(), []
    except QcoreError as error:
        return settings.Settings(), [Finding("settings", str(error), "Correct or unset the environment variable.")]


def settings_table(wanted: settings.Settings) -> list[dict[str, str]]:
    """Each setting with its value and source."""
    values = {
        "backends": "; ".join(f"{contract}={','.join(names)}" for contract, names in wanted.backends) or "by rank",
        "disable": ", ".join(sorted(wanted.disable)) or "none",
        "strict": "yes" if wanted.strict else "no",
        "verify": wanted.verify,
    }
    rows = [{"name": n, "value": v, "source": _source(_SETTINGS[n])} for n, v in values.items()]
    return [*rows, {"name": "cache", "value": disk_cache.cache_dir_text(), "source": _source("QCORE_CACHE_DIR")}]


def _source(variable: str) -> str:
    return variable if os.environ.get(variable) else "default"


def examine(disabled: frozenset[str], seconds: float, at_once: int) -> list[PluginStatus]:
    """The status of every plugin. Only the built-in one is loaded in this process."""
    # With every plugin disabled nothing is imported; states found without an import are kept.
    listed = registry.statuses(frozenset(registry.entries()))
    known = [_without_import(status) for status in listed]
    asked = [s for s in known if s.state is State.BLOCKED and s.name not in disabled]
    probed = probe_all(asked, seconds, at_once)
    return [probed.get(s.name, s) if s.state is State.BLOCKED else s for s in known]


def _without_import(status: PluginStatus) -> PluginStatus:
    entry = registry.entries()[status.name]
    return entry.status if status.state is State.BLOCKED and entry.status is not None else status


def plugin_findings(statuses: list[PluginStatus]) -> list[Finding]:
    """A problem for each broken plugin, a note for each slow one."""
    broken = [Finding(s.name, f"{s.state}: {s.reason}", _remedy(s)) for s in statuses if s.broken]
    slow = [s for s in statuses if not s.broken and s.seconds > PROBE_SECONDS]
    limit = f"programs give up after {PROBE_SECONDS:g} seconds"
    return broken + [Finding(s.name, f"took {s.seconds:.0f} seconds; {limit}.", _disable(s)) for s in slow]


def _remedy(status: PluginStatus) -> str:
    if status.state in (State.WRONG_API, State.NAME_CONFLICT, State.BAD_NAME) or status.name == BUILTIN:
        return ""  # the reason contains the remedy
    if status.state is State.UNAVAILABLE:
        return _disable(status)
    if "did not finish within" in status.reason:
        return f"Check the device's driver, or allow more time with --timeout. {_disable(status)}"
    if status.reason.startswith(("ModuleNotFoundError", "ImportError", "OSError")):
        return f"Reinstall it: pip install --force-reinstall {status.dist}. {_disable(status)}"
    return f"Report it to its authors, or upgrade it: pip install --upgrade {status.dist}. {_disable(status)}"


def _disable(status: PluginStatus) -> str:
    return "" if status.name == BUILTIN else f"To disable it: QCORE_DISABLE={status.name}"


def name_findings(wanted: settings.Settings, statuses: list[PluginStatus]) -> list[Finding]:
    """A problem for each unknown plugin name in the settings."""
    known = {status.name for status in statuses}
    return [
        Finding(
            "settings",
            f"no plugin is called {name!r}.{did_you_mean(name, known)}",
            f"Installed: {', '.join(sorted(known))}",
        )
        for name in sorted(wanted.named() - known)
    ]


def cache_findings() -> list[Finding]:
    """A note if the cache cannot be used."""
    why = disk_cache.why_untrusted() or ("" if cache_writable() else f"{disk_cache.cache_dir_text()} cannot be written")
    if not why:
        return []
    text = f"{why}: kernels are checked again in every process, and tuning is lost."
    return [Finding("cache", text, "Set QCORE_CACHE_DIR to a directory that only you can write.", problem=False)]


def clear() -> list[Finding]:
    """Clear the records of plugins that failed, crashed or hung in earlier processes."""
    count = disk_cache.clear_failures()
    return [Finding("cache", f"{count} plugin failure{'' if count == 1 else 's'} cleared.", problem=False)]


def left_findings(statuses: list[PluginStatus]) -> list[Finding]:
    """A problem for each plugin step that crashed or hung an earlier process, and for each kernel that failed."""
    by_doctor = {mark for s in statuses if s.broken for mark in crash_marks(s.name, s.dist, s.version)}
    marks = [mark for mark in disk_cache.left_over_marks() if mark["key"] not in by_doctor]
    here = {(s.name, s.dist, s.version) for s in statuses}
    failed = [
        f for f in disk_cache.records(disk_cache.FAILURES) if (f.get("plugin"), f.get("dist"), f.get("version")) in here
    ]
    return [*map(_of_mark, marks), *map(_of_failure, failed)]


def _of_mark(mark: dict[str, Any]) -> Finding:
    plugin, doing = (plain(str(mark.get(name) or "")) for name in ("plugin", "doing"))
    text = f"{doing or plain(mark['key'])} {disk_cache.left_over(mark['key'])}{_when(mark)}; it is skipped."
    return Finding(plugin or "plugins", text, _CLEAR)


def _of_failure(failure: dict[str, Any]) -> Finding:
    slow = failure.get("slow") is True
    text = f"{plain(str(failure.get('text')))}{_when(failure)}"
    return Finding(plain(str(failure.get("plugin"))), text, "" if slow else _CLEAR, problem=not slow)


def _when(record: dict[str, Any]) -> str:
    since = record.get("since")
    if not isinstance(since, float) or not 0 < since < _FAR_FUTURE:
        return ""
    return time.strftime(" (%Y-%m-%d %H:%M)", time.localtime(since))


def slow_findings(statuses: list[PluginStatus]) -> list[Finding]:
    """A note for each kernel of a plugin that ``qcore tune`` measured slower than the fallback."""
    from ..resolving.tuning import slower_than_fallback

    return [
        Finding(
            slow.plugin,
            f"{slow.kernel} was measured slower than the fallback for {slow.request}: "
            f"{slow.milliseconds:.3g} ms, against {slow.fallback_milliseconds:.3g} ms for {slow.fallback}.",
            "The fallback is selected, unless the order of backends or strict prevents it.",
            problem=False,
        )
        for slow in slower_than_fallback(statuses)
    ]


def hardware_findings(statuses: list[PluginStatus]) -> list[Finding]:
    """A note for each accelerator without an installed plugin."""
    installed = {s.name for s in statuses if s.name != BUILTIN}
    hints = (seen.hint(installed) for seen in hardware.present())
    return [Finding("hardware", hint, problem=False) for hint in hints if hint]
