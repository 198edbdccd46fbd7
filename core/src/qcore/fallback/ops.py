"""The torch ops of this plugin: what its CPU kernels are in a compiled graph, where a Python function cannot be.

In eager mode kernels call the functions themselves, which saves the few microseconds of a dispatch. The ops look at
the number of rows when they run, so that one graph serves every M.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

NAMESPACE = "qcore_torch"


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


_MADE: dict[str, Any] = {}


def op(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The op ``qcore_torch::<schema>``, registered at its first use: ``function`` on CPU, ``fake`` for tracing."""
    name = schema.partition("(")[0]
    if name not in _MADE:
        library = _library()
        library.define(schema)
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        _MADE[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return _MADE[name]
