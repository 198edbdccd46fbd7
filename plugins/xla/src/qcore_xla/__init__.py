"""qcore-xla: quantized kernels on XLA, for TPUs, GPUs and CPUs; a plugin of qcore.

qcore finds `qcore_xla.plugin` by its entry point. Importing this imports neither JAX nor a backend of torch; it defines
``torch.ops.qcore_xla.*``, which exported programs call, and ``torch.ops.xla.quantized_matmul`` if torch_xla is
not installed.

For users of JAX, `load` reads a checkpoint into a pytree of packed arrays, and `linear`, `embedding`, `conv2d` and
`grouped_linear` are pure functions of it; they import JAX when they are first looked up. `shard_` spreads
the programs of ``torch.compile(model, backend="qcore_xla")`` over several devices.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import ops as _ops  # noqa: F401 - defines them
from .quantized_matmul import XlaQuantizedLinear

if TYPE_CHECKING:
    from .arrays import PackedWeight, conv2d, embedding, grouped_linear, linear, load, pack
    from .graphs.meshes import shard_

__version__ = "26.11.0"
__all__ = [
    "PackedWeight",
    "XlaQuantizedLinear",
    "conv2d",
    "embedding",
    "grouped_linear",
    "linear",
    "load",
    "pack",
    "shard_",
]
_OF_JAX = frozenset(__all__) - {"XlaQuantizedLinear"}


def __getattr__(name: str) -> Any:
    if name in _OF_JAX:
        return getattr(import_module(".graphs.meshes" if name == "shard_" else ".arrays", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_JAX])
