"""How ``torch.ops.qcore.*`` are registered: an implementation, a fake, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import FormatError
from .kernels import runs_now

_library: Any = torch.library.Library("qcore", "DEF")  # type: ignore[no-untyped-call]

_TRACED = (
    "this op has no gradient inside a trace. Call it under torch.no_grad(), or use a layer of qcore.nn, which has one."
)


def define(schema: str, fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Define ``qcore::<schema>`` by the decorated function, with ``fake`` for shapes and dtypes."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = schema.split("(", maxsplit=1)[0]
        _library.define(schema)
        _library.impl(name, _without_gradients(function), "CompositeExplicitAutograd")
        _library.impl(name, _differentiable(name, function), "Autograd")
        torch.library.register_fake(f"qcore::{name}", fake, lib=_library)
        return function

    return register


def require(condition: bool, op: str, text: str) -> None:
    """Raise `FormatError` in the name of an op unless ``condition`` holds."""
    if not condition:
        raise FormatError(f"qcore::{op}: {text}")


def require_float(op: str, x: Tensor) -> None:
    """Raise `FormatError` in the name of an op unless x is floating."""
    require(x.is_floating_point(), op, f"x has dtype {x.dtype}; it must be floating.")


def _without_gradients(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What runs behind autograd, where nothing is recorded any more, whatever x says."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def _differentiable(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What runs in front of autograd: ``function`` is made of operations that it records."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled():
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if any(value.requires_grad for value in given):
                require(all(map(runs_now, given)), name, _TRACED)
                return function(*args, **kwargs)
        op: Any = getattr(torch.ops.qcore, name).default
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library's own ops get there
            return op(*args, **kwargs)  # type: ignore[no-any-return]

    return run
