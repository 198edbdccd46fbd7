"""Launching kernels."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run a Triton kernel: positional arguments, then constexprs and options by name."""
    kernel[grid](*args, **meta)
