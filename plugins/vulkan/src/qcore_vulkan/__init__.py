"""qcore-vulkan: quantized kernels for any GPU with a Vulkan driver; a plugin of qcore.

qcore finds `qcore_vulkan.plugin` by its entry point. The public functions: `sequential`, which runs several modules as
one submission, `on_device`, which picks one of several devices, and `empty_cache`, which frees memory. Importing
this loads no native library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chain import Sequential, sequential
    from .device import empty_cache, on_device

__version__ = "26.11.0"
__all__ = ["Sequential", "empty_cache", "on_device", "sequential"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in {"Sequential", "sequential"}:
        from . import chain

        return getattr(chain, name)
    if name in {"empty_cache", "on_device"}:
        from . import device

        return getattr(device, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
