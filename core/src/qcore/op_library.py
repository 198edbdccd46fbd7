"""How ``torch.ops.qcore.*`` are registered: an implementation, a fake, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from .errors import FormatError
from .kernels import is_traced

_library: Any = torch.library.Library("qcore", "DEF")  # type: ignore[no-untyped-call]

_DIFFERENTIABLE = frozenset({"x", "input", "bias"})
"""Names of the arguments that gradients are for; the others are quantized weights and their parameters."""
_TRACED = (
    "this op has no gradient inside a trace or a transform of torch.func. "
    "Call it under torch.no_grad(), or use a layer of qcore.nn, which has one."
)
_FORWARD = "this op has no forward-mode derivative."


def define(schema: str, fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Define ``qcore::<schema>`` by the decorated function, with ``fake`` for shapes and dtypes."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = schema.split("(", maxsplit=1)[0]
        _library.define(schema)
        _library.impl(name, _without_gradients(function), "CompositeExplicitAutograd")
        _library.impl(name, _differentiable(name, _arguments(schema), function), "Autograd")
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


def _arguments(schema: str) -> list[str]:
    """The names of an op's arguments."""
    inside = schema.partition("(")[2].partition(") ->")[0]
    return [argument.split()[-1].partition("=")[0] for argument in inside.split(",")]


def _differentiable(name: str, names: Sequence[str], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What runs in front of autograd: ``function`` is made of operations that it records."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        recorded, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0  # noqa: SLF001 - no public way
        if recorded or forward:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            wanted = [value for key, value in given.items() if key in _DIFFERENTIABLE and isinstance(value, Tensor)]
            require(not (forward and any(map(_has_tangent, wanted))), name, _FORWARD)
            if recorded and any(value.requires_grad for value in wanted):
                require(not any(map(_is_traced, wanted)), name, _TRACED)
                return function(*args, **kwargs)
        op: Any = getattr(torch.ops.qcore, name).default
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library's own ops get there
            return op(*args, **kwargs)  # type: ignore[no-any-return]

    return run


def _is_traced(value: Tensor) -> bool:
    """Whether there are no numbers to compute with; unlike `runs_now`, not whether anybody looks on."""
    return torch.compiler.is_compiling() or is_traced() or isinstance(value, (FakeTensor, FunctionalTensor))


def _has_tangent(value: Tensor) -> bool:
    dual: Any = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return dual.tangent is not None
