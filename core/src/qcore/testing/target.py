"""The plugin under test: its device, and its answers to requests."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..contracts import Request
from ..discovery.kernels import Available, Kernel
from ..discovery.registry import BUILTIN, Guarded, PluginStatus, State, registry
from ..errors import ConformanceError, did_you_mean
from ..resolving.decision import Candidate, Stage
from ..resolving.offers import ask
from .gaps import FILE_NAME
from .preflight import Preflight, preflight


@dataclass(frozen=True)
class Answer:
    """A plugin's answer to a request: the offered ``kernels``, or the ``reason`` of the refusal.

    ``broken``: whether the answer is invalid.
    """

    kernels: tuple[Kernel, ...] = ()
    reason: str = ""
    broken: bool = False


class Target:
    """One installed plugin, loaded and probed.

    **Arguments:** ``name``: of its entry point; ``device``: to test the kernels on. Default: the device in its probe,
    ``Available(details={"device": "cuda:0"})``, else the torch device of the plugin's name, else the CPU.

    Raises `ConformanceError` if no plugin of that name is installed, or torch cannot use the device here.
    """

    def __init__(self, name: str, device: str | torch.device | None = None) -> None:
        check_installed(name)
        self.name = name
        self.baseline: Callable[[], list[str]] = list  # puts back what the current step has changed in the process
        if registry.entries()[name].status is None:
            # In a separate process first: if the probe kills the process, that is recorded, and it is not called here.
            _ = self.preflight
        self.status: PluginStatus = registry.status(name)
        self.device = self._default_device() if device is None else usable_device(device, "you asked for")

    @cached_property
    def preflight(self) -> Preflight:
        """The result of importing and probing the plugin in another process."""
        return preflight(self.name)

    @property
    def available(self) -> bool:
        return self.status.state is State.AVAILABLE

    @property
    def is_fallback(self) -> bool:
        return self.name == BUILTIN

    @property
    def plugin(self) -> Any:
        """The module or object of the entry point; None if it could not be loaded."""
        return registry.entries()[self.name].plugin

    def ask(self, request: Request) -> Answer:
        """Send a request to this plugin only."""
        rows: Sequence[Any] = ask(self.status, request)
        if isinstance(rows[0], Candidate):
            return Answer(reason=rows[0].reason, broken=rows[0].stage != Stage.REFUSED.value)
        return Answer(tuple(row.offer.kernel for row in rows))

    def gaps_file(self) -> Path | None:
        """Return the list of known gaps in the directory of the plugin's module, or None."""
        module = getattr(self.plugin, "__file__", None)
        path = Path(module).with_name(FILE_NAME) if module else None
        return path if path and path.is_file() else None

    def _default_device(self) -> torch.device:
        named = self._device_of_probe()
        if named:
            return usable_device(named, f"the probe of {self.name!r} requests")
        return torch.device("cpu" if _why_unusable(self.name) else self.name)

    def _device_of_probe(self) -> str | None:
        if not self.available or not registry.implements(self.name, "qcore_probe"):
            return None
        try:
            found = registry.call(self.name, "qcore_probe")
        except Guarded:
            return None
        details = found.details if isinstance(found, Available) else None
        return str(details["device"]) if details and "device" in details else None


def check_installed(name: str) -> None:
    """Raise `ConformanceError` if no plugin is called ``name``; does not import any plugin."""
    if name not in registry.entries():
        known = ", ".join(sorted(registry.entries()))
        raise ConformanceError(
            f"no plugin is called {name!r}; installed: {known}.{did_you_mean(name, registry.entries())}\n"
            f"Install it into this environment, e.g. 'pip install -e .' in its folder."
        )


def usable_device(device: str | torch.device, who: str) -> torch.device:
    """Return a device that torch can use on this machine; raises `ConformanceError` for others.

    ``who``: the source of the name, for the error.
    """
    reason = _why_unusable(device)
    if reason:
        raise ConformanceError(
            f"{who} the device {_printable(device)!r}, which torch cannot use on this machine:\n"
            f"{reason}\n"
            f"Pass another one with --device, for example cpu; 'qcore doctor' lists the devices of this machine."
        )
    return torch.device(device)


def _why_unusable(device: str | torch.device) -> str:
    """Return why torch cannot use a device, or an empty string."""
    try:
        with no_warnings():
            torch.ones(1, device=device).cpu()
    except Exception as error:  # noqa: BLE001 - depends on the missing backend
        text = _printable(str(error).strip().partition("\n")[0][:200])
        # torch's own message for a backend that was not compiled is about operators.
        return "no torch backend for it is loaded." if text.startswith("Could not run") else text or repr(error)
    return ""


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Ignore warnings of a backend during its initialization."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _printable(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()
