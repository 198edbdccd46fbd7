"""``torch.ops.qcore_xpu.*``: what the kernels are in a graph.

Arguments are flat and results new tensors. Every op looks at the number of rows when it runs, so one graph serves any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from qcore.plugin_api import define_op

NAMESPACE = "qcore_xpu"

library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_defined: dict[str, Callable[..., Tensor]] = {}
_keys = ["XPU"]


def define(schema: str, implementation: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """Register an op for XPU, and give its overload to call."""
    _defined[schema.partition("(")[0]] = implementation
    return define_op(library, schema, implementation, fake, _keys)


def also_on(key: str) -> None:
    """Register every op, those to come included, under another dispatch key, too: for a stand-in of the device."""
    if key in _keys:
        return
    _keys.append(key)
    for name, implementation in _defined.items():
        library.impl(name, implementation, key)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def settled(x: Tensor) -> Iterator[None]:
    """Make x's device the current one, and switch autocast off, which would narrow products."""
    device, as_it_is = x.device, contextlib.nullcontext()
    elsewhere = device.type == "xpu" and device.index != torch.xpu.current_device()
    narrows = torch.is_autocast_enabled(device.type)
    # Both are asked for first: entering a context that changes nothing costs more than that.
    with (
        torch.xpu.device(device) if elsewhere else as_it_is,
        torch.autocast(device.type, enabled=False) if narrows else as_it_is,
    ):
        yield
