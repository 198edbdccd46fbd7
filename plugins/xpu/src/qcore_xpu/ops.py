"""``torch.ops.qcore_xpu.*``: the kernels as opaque ops of a graph.

Arguments are flat and results new tensors. An op chooses by the number of rows when it runs, so a graph is valid for
any number.
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


def define(schema: str, implementation: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """Register an op for XPU; returns its overload, to be called."""
    return define_op(library, schema, implementation, fake, ["XPU"])


@contextlib.contextmanager
def device_guard(x: Tensor) -> Iterator[None]:
    """Make x's device the current one, and switch autocast off, which would narrow products."""
    device, as_it_is = x.device, contextlib.nullcontext()
    elsewhere = device.type == "xpu" and device.index != torch.xpu.current_device()
    narrows = torch.is_autocast_enabled(device.type)
    # Check first: entering a context that changes nothing costs more.
    with (
        torch.xpu.device(device) if elsewhere else as_it_is,
        torch.autocast(device.type, enabled=False) if narrows else as_it_is,
    ):
        yield
