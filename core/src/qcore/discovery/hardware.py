"""Cheap hardware detection: which accelerators are present, and which plugins support them.

Reads device files, the PCI tree and package metadata only; opens no driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_DISPLAY, _ACCELERATOR = "0x03", "0x12"
_INTEL = "0x8086"
_VENDORS = {
    "0x10de": ("NVIDIA GPU", ("cuda", "vulkan")),
    "0x1002": ("AMD GPU", ("cuda", "vulkan")),
    _INTEL: ("Intel GPU", ("xpu", "vulkan")),
    "0x1ae0": ("Google TPU", ("xla",)),
}


@dataclass(frozen=True)
class Hardware:
    """A detected accelerator: ``name``; ``plugins`` that support it, best first; ``seen``: its address or file."""

    name: str
    plugins: tuple[str, ...]
    seen: str

    def hint(self, installed: set[str]) -> str | None:
        """Which plugin to install for it, or None if one of its plugins is installed."""
        if installed.intersection(self.plugins):
            return None
        return f"{self.name} present ({self.seen}), but no plugin for it: pip install qcore-{self.plugins[0]}"


def look(root: Path = Path("/")) -> tuple[Hardware, ...]:
    """Accelerators found below ``root`` (tests pass a tree of their own)."""
    found = [*on_pci(root), *_device_files(root)]
    return tuple({hardware.name: hardware for hardware in reversed(found)}.values())


@lru_cache(maxsize=1)
def present() -> tuple[Hardware, ...]:
    """Accelerators of this machine; detected once per process."""
    return look()


def on_pci(root: Path) -> list[Hardware]:
    """Every accelerator in the PCI tree below ``root``, each with its PCI address."""
    found, devices = [], root / "sys/bus/pci/devices"
    for device in sorted(devices.glob("*")) if devices.is_dir() else ():
        vendor, kind = (word(device / name) for name in ("vendor", "class"))
        # Intel's processing accelerators are NPUs, which no plugin supports; its GPUs are all display devices.
        kinds = (_DISPLAY,) if vendor == _INTEL else (_DISPLAY, _ACCELERATOR)
        if vendor in _VENDORS and kind.startswith(kinds):
            found.append(Hardware(*_VENDORS[vendor], f"PCI {device.name}"))
    return found


def word(path: Path) -> str:
    """The stripped content of a one-word file, such as those of the PCI tree; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def installed_version(distribution: str) -> str:
    """The version of a distribution, from its metadata; empty if it is not installed. Does not import it."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _device_files(root: Path) -> list[Hardware]:
    # Containers often hide the PCI tree and pass the device file only.
    files = {"dev/nvidia0": "0x10de", "dev/kfd": "0x1002", "dev/accel0": "0x1ae0"}
    return [Hardware(*_VENDORS[vendor], f"/{name}") for name, vendor in files.items() if (root / name).exists()]
