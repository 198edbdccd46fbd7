"""`Engine`: the interface that passes tensors of a torch device to XLA and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor

MODULES = {"cpu": "jax", "cuda": "jax", "xla": "torch_xla", "tpu": "tpu"}
"""The engine's module in this package, by type of torch device."""


class Engine(Protocol):
    """A bridge: it handles devices and tensors, not quantization."""

    name: str

    def why_not(self, device: Any) -> str:
        """Why tensors on ``device`` (a `torch.device`) are not supported, a sentence; empty if they are.

        Imports nothing heavy.
        """
        ...

    def run(
        self,
        function: Callable[..., Any],
        form: Any,
        tensors: Sequence[Any],
        fresh: Sequence[int],
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Call ``function(*tensors, form=form)``, a pure function of JAX arrays, and return its result as a tensor.

        A tensor may be None; on a CPU, one that changes may be a NumPy array.
        ``fresh``: the positions of tensors that change with each call; the others stay the same. ``size``: the last two
        dimensions of the part of the result that is wanted; an engine may return all of it.
        """
        ...


@lru_cache(maxsize=16)
def find(kind: str) -> Engine | None:
    """The engine for a type of torch device; None if there is none."""
    name = f"{__package__}.{MODULES.get(kind)}"
    if kind not in MODULES or find_spec(name) is None:
        return None
    module = import_module(name)
    engine: Engine = module.ENGINE
    return engine
