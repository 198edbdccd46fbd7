"""The plugin under test: where it runs, and what it answers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
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
    """What a plugin said to a request: ``kernels`` it offers, or why not; ``broken``: that is no proper answer."""

    kernels: tuple[Kernel, ...] = ()
    reason: str = ""
    broken: bool = False


class Target:
    """One installed plugin, brought up.

    **Arguments:** ``name``: of its entry point; ``device``: where its kernels are tested. Default: what its probe says
    in ``Available(details={"device": "cuda:0"})``, else the torch device of the plugin's name, else the CPU.

    Raises `ConformanceError` if no plugin of that name is installed, or torch cannot use the device here.
    """

    def __init__(self, name: str, device: str | torch.device | None = None) -> None:
        check_installed(name)
        self.name = name
        if registry.entries()[name].status is None:
            # In a process of its own first: a probe that ends the process leaves a mark, and is not called in this one.
            _ = self.preflight
        self.status: PluginStatus = registry.status(name)
        self.device = self._default_device() if device is None else usable_device(device, "you asked for")

    @cached_property
    def preflight(self) -> Preflight:
        """What importing and probing it in another process showed."""
        return preflight(self.name)

    @property
    def available(self) -> bool:
        return self.status.state is State.AVAILABLE

    @property
    def is_fallback(self) -> bool:
        return self.name == BUILTIN

    @property
    def plugin(self) -> Any:
        """The module or object behind the entry point; None where it did not come up."""
        return registry.entries()[self.name].plugin

    def ask(self, request: Request) -> Answer:
        """Ask this plugin, and only this one."""
        rows: Sequence[Any] = ask(self.status, request)
        if isinstance(rows[0], Candidate):
            return Answer(reason=rows[0].reason, broken=rows[0].stage != Stage.REFUSED.value)
        return Answer(tuple(row.offer.kernel for row in rows))

    def gaps_file(self) -> Path | None:
        """The list of known gaps beside the plugin's module, where there is one."""
        module = getattr(self.plugin, "__file__", None)
        path = Path(module).with_name(FILE_NAME) if module else None
        return path if path and path.is_file() else None

    def _default_device(self) -> torch.device:
        named = self._device_of_probe()
        if named:
            return usable_device(named, f"the probe of {self.name!r} tells the kit to test on")
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
    """Raise `ConformanceError` where no plugin is called ``name``; imports none."""
    if name not in registry.entries():
        known = ", ".join(sorted(registry.entries()))
        raise ConformanceError(
            f"no plugin is called {name!r}; installed: {known}.{did_you_mean(name, registry.entries())}\n"
            f"Install it into this environment, e.g. 'pip install -e .' in its folder."
        )


def usable_device(device: str | torch.device, who: str) -> torch.device:
    """A device that torch can use on this machine; raises `ConformanceError` for any other: ``who`` named it."""
    reason = _why_unusable(device)
    if reason:
        raise ConformanceError(
            f"{who} the device {_printable(device)!r}, which torch cannot use on this machine:\n"
            f"{reason}\n"
            f"Give another one with --device, for example cpu; 'qcore doctor' shows which devices are here."
        )
    return torch.device(device)


def _why_unusable(device: str | torch.device) -> str:
    """Why no tensor can live on a device; empty if one can."""
    try:
        with no_warnings():
            torch.ones(1, device=device).cpu()
    except Exception as error:  # noqa: BLE001 - torch raises whatever the missing backend happens to
        text = _printable(str(error).strip().partition("\n")[0][:200])
        # Torch's own words for a backend that was not compiled speak of its operators.
        return "no backend of torch for it is loaded here." if text.startswith("Could not run") else text or repr(error)
    return ""


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """What a backend warns of while it starts is not the kit's subject."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _printable(text: object) -> str:
    return str(text).encode("utf-8", "backslashreplace").decode()
