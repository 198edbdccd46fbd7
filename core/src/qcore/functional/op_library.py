"""Registration of ``torch.ops.qcore.*``: implementation, fake, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from ..errors import FormatError
from ..formats.tracing import is_traced
from .checks import FLOAT_DTYPES, check_dense

_library: Any = torch.library.Library("qcore", "DEF")  # type: ignore[no-untyped-call]

_DIFFERENTIABLE = frozenset({"x", "input", "bias"})
"""Names of the arguments that get gradients; the others are quantized weights and their parameters."""
_NO_GRADIENT = (
    "this op has no gradient inside a trace or a transform of torch.func. "
    "Call it under torch.no_grad(), or use a layer of qcore.nn, which has one."
)
_UNSUPPORTED_DTYPES = frozenset({
    torch.bool, torch.complex32, torch.complex64, torch.complex128, torch.qint8, torch.quint8, torch.qint32
})  # fmt: skip
_NO_FORWARD_MODE = "this op has no forward-mode derivative."


def define(schema: str, fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Define the op ``qcore::<schema>``, implemented by the decorated function; ``fake`` infers shape and dtype."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name, names = schema.split("(", maxsplit=1)[0], _argument_names(schema)
        checked = _with_checks(name, names, function)
        _library.define(schema)
        _library.impl(name, _without_gradients(checked), "CompositeExplicitAutograd")
        _library.impl(name, _differentiable(name, names, checked), "Autograd")
        torch.library.register_fake(f"qcore::{name}", _with_checks(name, names, fake), lib=_library)
        return function

    return register


def _with_checks(name: str, names: Sequence[str], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``function`` in a check of its tensors: dense, of real dtypes, all on one device.

    The fake needs the check, too: torch calls it if any tensor is on meta, with the others on their own devices.
    """

    def run(*args: Any, **kwargs: Any) -> Tensor:
        device = None
        for at, value in enumerate((*args, *kwargs.values()) if kwargs else args):
            if isinstance(value, Tensor):
                device = device or value.device
                if value.device != device or value.layout is not torch.strided or not _is_supported(value):
                    raise _argument_error(name, (*names[: len(args)], *kwargs)[at], value, device)
        return function(*args, **kwargs)

    return run


def _is_supported(value: Tensor) -> bool:
    return value.dtype not in _UNSUPPORTED_DTYPES and not value.is_nested


def _argument_error(op: str, argument: str, value: Tensor, device: torch.device) -> FormatError:
    try:
        check_dense(argument, value, value.device)
    except FormatError as error:
        return FormatError(f"qcore::{op}: {error}")
    if value.dtype in _UNSUPPORTED_DTYPES:
        return FormatError(f"qcore::{op}: {argument} has dtype {value.dtype}; this op does not support that dtype.")
    return FormatError(f"qcore::{op}: {argument} is on {value.device}, others on {device}; bring all to one device.")


def require(condition: bool, op: str, text: str) -> None:
    """Raise a `FormatError` that names the op unless ``condition`` holds."""
    if not condition:
        raise FormatError(f"qcore::{op}: {text}")


def require_float(op: str, x: Tensor) -> None:
    """Raise a `FormatError` that names the op unless x has one of `FLOAT_DTYPES`."""
    fits = f"it must be floating-point: {', '.join(str(dtype).removeprefix('torch.') for dtype in FLOAT_DTYPES)}"
    require(x.dtype in FLOAT_DTYPES, op, f"x has dtype {x.dtype}; {fits}.")


def _without_gradients(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``function`` for the dispatch key below autograd: nothing is recorded there."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def _argument_names(schema: str) -> list[str]:
    """Parse the names of an op's arguments from its schema."""
    inside = schema.partition("(")[2].partition(") ->")[0]
    return [argument.split()[-1].partition("=")[0] for argument in inside.split(",")]


def _differentiable(name: str, names: Sequence[str], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``function`` for the Autograd key; if a gradient is needed, it runs as ops that autograd records."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        recorded, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0  # noqa: SLF001 - no public way
        if recorded or forward:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            wanted = [value for key, value in arguments.items() if key in _DIFFERENTIABLE and isinstance(value, Tensor)]
            require(not (forward and any(map(_has_tangent, wanted))), name, _NO_FORWARD_MODE)
            if recorded and any(value.requires_grad for value in wanted):
                require(not any(map(_is_traced, wanted)), name, _NO_GRADIENT)
                return function(*args, **kwargs)
        op: Any = getattr(torch.ops.qcore, name).default
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library's own ops get there
            return op(*args, **kwargs)  # type: ignore[no-any-return]

    return run


def _is_traced(value: Tensor) -> bool:
    """Whether ``value`` has no numbers to compute with, as in a trace; unlike `runs_now`, ignores dispatch modes."""
    return torch.compiler.is_compiling() or is_traced() or isinstance(value, (FakeTensor, FunctionalTensor))


def _has_tangent(value: Tensor) -> bool:
    dual: Any = forward_ad.unpack_dual(value)  # type: ignore[no-untyped-call]
    return dual.tangent is not None
