"""Select the importer of a checkpoint: qcore's own first, then those of plugins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ...discovery.registry import registry
from ...errors import CheckpointError, QcoreError, message_of, quoted
from ..header import DOWNLOAD_AGAIN, file_error
from . import BUILTIN
from .base import Importer, Plan, Source

_MOST = 100
"""The maximum number of importers of one plugin: an iterator may be infinite."""


def plan_import(source: Source) -> tuple[str, Plan] | None:
    """The importer's name and its plan; None for a checkpoint that no importer recognizes. Raises `CheckpointError`."""
    every = itertools.chain((("", importer) for importer in BUILTIN), _of_plugins())
    plans = (_plan_of(plugin, importer, source) for plugin, importer in every)
    return next((plan for plan in plans if plan is not None), None)


def _plan_of(plugin: str, importer: Importer, source: Source) -> tuple[str, Plan] | None:
    try:
        return (importer.name, _checked(importer.plan(source), plugin, source)) if importer.recognizes(source) else None
    except (QcoreError, MemoryError):
        raise
    except Exception as error:
        owner = f" of plugin {plugin!r}" if plugin else ""
        what = f"importer {quoted(importer.name)}{owner} raised {type(error).__name__}: "
        remedy = f"Report it to the plugin, or disable it: QCORE_DISABLE={plugin}." if plugin else DOWNLOAD_AGAIN
        raise file_error(source.path, f"{what}{message_of(error)}", remedy) from error


def importer_names() -> list[str]:
    """The names of all importers, for messages."""
    return [*(importer.name for importer in BUILTIN), *(str(importer.name) for _, importer in _of_plugins())]


def _of_plugins() -> Iterator[tuple[str, Importer]]:
    """Yield the importers of plugins with the plugin's name. A device is not needed to read a file."""
    registry.load_plugins()
    for plugin in sorted(registry.entries()):
        if registry.implements(plugin, "qcore_importers"):
            yield from ((plugin, importer) for importer in _answers(plugin))


def _answers(plugin: str) -> list[Importer]:
    try:
        answers = registry.call(plugin, "qcore_importers")
        found = [each for answer in answers for each in itertools.islice(answer, _MOST)]
        wrong = next((each for each in found if not _is_importer(each)), None)
    except Exception as error:
        what = f"plugin {plugin!r}: qcore_importers raised {type(error).__name__}: {message_of(error)}"
        raise CheckpointError(what) from error
    if wrong is not None:
        raise CheckpointError(
            f"plugin {plugin!r}: qcore_importers returned {quoted(wrong)}, which is not an importer:\n"
            f"it needs name, recognizes(source) and plan(source); see qcore.plugin_api.Importer."
        )
    return found


def _is_importer(value: object) -> bool:
    methods = (getattr(value, "recognizes", None), getattr(value, "plan", None))
    return isinstance(getattr(value, "name", None), str) and all(map(callable, methods))


def _checked(plan: object, plugin: str, source: Source) -> Plan:
    if not isinstance(plan, Plan):
        what = f"an importer of plugin {plugin!r} returned {quoted(plan)} instead of a qcore.plugin_api.Plan."
        raise file_error(source.path, what, "Report it to the plugin.")
    return plan
