"""The plugin under test: where it runs, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..decision import Candidate, Stage
from ..errors import ConformanceError, did_you_mean
from ..kernels import Available, Kernel
from ..plugins import BUILTIN, Guarded, PluginStatus, State, registry
from ..resolver import _ask
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

    Raises `ConformanceError` where no plugin of that name is installed.
    """

    def __init__(self, name: str, device: str | torch.device | None = None) -> None:
        check_installed(name)
        self.name = name
        if registry.entries()[name].status is None:
            # In a process of its own first: a probe that ends the process leaves a mark, and is not called in this one.
            _ = self.preflight
        self.status: PluginStatus = registry.status(name)
        self.device = torch.device(device) if device is not None else self._own_device()

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

    def ask(self, request: Any) -> Answer:
        """Ask this plugin, and only this one."""
        rows: Sequence[Any] = _ask(self.status, request)
        if isinstance(rows[0], Candidate):
            return Answer(reason=rows[0].reason, broken=rows[0].stage != Stage.REFUSED.value)
        return Answer(tuple(row.offer.kernel for row in rows))

    def gaps_file(self) -> Path | None:
        """The list of known gaps beside the plugin's module, where there is one."""
        module = getattr(self.plugin, "__file__", None)
        path = Path(module).with_name(FILE_NAME) if module else None
        return path if path and path.is_file() else None

    def _own_device(self) -> torch.device:
        named = self._device_of_probe()
        if named:
            return torch.device(named)
        return torch.device(self.name) if _usable(self.name) else torch.device("cpu")

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


def _usable(device: str) -> bool:
    """Whether torch has a device of this name that tensors can live on."""
    try:
        return bool(torch.ones(1, device=device).cpu().item() == 1)
    except Exception:  # noqa: BLE001 - torch raises whatever the missing backend happens to
        return False
