"""``torch.ops.qcore_cuda.*``: the kernels as opaque ops of a graph, and the functions behind them.

Arguments are flat and results new tensors. An op reads the number of rows when it runs, so one graph is valid
for any number. Triton is imported at the first run. In eager mode kernels call the functions directly if `runs_now`
allows: that saves 3 to 4 microseconds of dispatching to Python, up to a quarter of a call's time on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qcore.plugin_api import GIVEN_NAMES, define_op
from qcore_triton.codes import given_of
from qcore_triton.weights import Weight, bias_of, check_devices, nonempty

from .runtime.replay import replay_call

NAMESPACE = "qcore_cuda"

# ruff: noqa: ARG001 - a fake has the signature of its op
# ruff: noqa: SLF001 - torch has no public API for the state of its dispatcher
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
"""Other modules of this plugin define their ops here too."""


def define(schema: str, implementation: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """Register an op for CUDA (torch uses this dispatch key for HIP, too), and return its overload."""
    return define_op(library, schema, implementation, fake, ("CUDA",))


def needs_guard(x: Tensor) -> bool:
    """Whether the current device or autocast has to change for launches and torch products on x, see `device_guard`."""
    index = x.get_device()
    return torch.is_autocast_enabled() or (index >= 0 and index != _current_device())


@contextlib.contextmanager
def device_guard(x: Tensor) -> Any:
    """Make x's device the current one, and switch autocast off, which would run products in lower precision."""
    here = torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
    with here, torch.autocast("cuda", enabled=False):
        yield


@lru_cache(maxsize=1)
def _weight_only() -> Callable[..., Tensor]:
    from .weight_only import linear

    return linear


@lru_cache(maxsize=1)
def _int8() -> Callable[..., Tensor]:
    from .int8 import product

    return product


@lru_cache(maxsize=1)
def _fp8() -> Callable[..., Tensor]:
    from .fp8 import product

    return product


@lru_cache(maxsize=1)
def _gather() -> Callable[..., Tensor]:
    from .gather import rows

    return rows


def linear_a16(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    n: int, k: int, bits: int, group: int, element: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``x @ W^T + bias``: x ``(M, K)`` float, of any strides, M at least 1, to ``(M, N)``; W as in `Weight`."""
    check_devices(x, data, {"bias": bias})
    if needs_guard(x):
        with device_guard(x):
            return linear_a16(x, data, scale, zero, bias, factor, n, k, bits, group, element, out_dtype)
    weight = Weight(data, scale, zero, n, k, bits, group, element, nonempty(factor))
    return _weight_only()(x, weight, bias_of(bias, n), out_dtype)


def linear_afp8(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    blocks: Tensor | None, n: int, k: int, bits: int, group: int, element: str, x_group: int,
    static_scale: float | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias`` with e4m3 A(x): x ``(M, K)`` float, of any strides, M at least 1, to ``(M, N)``.

    Activations share a scale per token if ``x_group`` is 0, else in groups of so many columns; ``static_scale`` is
    one for all, if given. ``blocks``: see `packing.pack`.
    """
    check_devices(x, data, {"bias": bias})
    if needs_guard(x):
        with device_guard(x):
            return linear_afp8(
                x, data, scale, zero, bias, factor, blocks, n, k, bits, group, element, x_group, static_scale, out_dtype
            )
    weight = Weight(data, scale, zero, n, k, bits, group, element, nonempty(factor))
    return _fp8()(x, weight, bias_of(bias, n), out_dtype, x_group, static_scale, nonempty(blocks))


def linear_a8(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, units: Tensor | None,
    bias: Tensor | None, x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None,
    out_zero_point: Tensor | None,
    n: int, k: int, bits: int, group: int, symmetric: bool, static_scale: float | None, static_zero_point: int,
    output_scale: float | None, output_zero_point: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``A(x) @ W^T + bias`` with int8 A(x): x ``(M, K)`` float or int8 codes, M at least 1, to ``(M, N)``.

    Activations: ``x_scale`` and ``x_zero_point`` ``(M,)`` if given, else ``static_scale`` and ``static_zero_point``
    if given, else per token, ``symmetric`` or not. Results: int8 by ``out_scale`` and ``out_zero_point`` ``(M,)``,
    or by ``output_scale`` and ``output_zero_point``, else of ``out_dtype``. ``sums``, ``units``: see `packing.pack`.
    """
    given = zip(GIVEN_NAMES, (x_scale, x_zero_point, out_scale, out_zero_point), strict=True)
    check_devices(x, data, {"bias": bias, **dict(given)})
    if needs_guard(x):
        with device_guard(x):
            return linear_a8(
                x, data, scale, zero, sums, units, bias, x_scale, x_zero_point, out_scale, out_zero_point, n, k, bits,
                group, symmetric, static_scale, static_zero_point, output_scale, output_zero_point, out_dtype,
            )  # fmt: skip
    of_x = given_of(x_scale, x_zero_point, static_scale, static_zero_point)
    of_y = given_of(out_scale, out_zero_point, output_scale, output_zero_point)
    weight = Weight(data, scale, zero, n, k, bits, group, units=nonempty(units))
    return _int8()(x, weight, sums, bias_of(bias, n), out_dtype, symmetric, of_x, of_y)


def embedding(
    indices: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None,
    v: int, d: int, bits: int, group: int, element: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Rows of a table ``(v, d)``: int32 or int64 indices of any shape to ``(*indices.shape, d)``."""
    check_devices(indices, data, {})
    if needs_guard(indices):
        with device_guard(indices):
            return embedding(indices, data, scale, zero, factor, v, d, bits, group, element, out_dtype)
    weight = Weight(data, scale, zero, v, d, bits, group, element, nonempty(factor))
    found = _gather()(indices.reshape(-1).contiguous(), weight, out_dtype)
    return found.view(*indices.shape, d)


# The implementations that a graph calls: the number of rows is known only at run time, and may be 0.


def _linear_a16(x: Tensor, *rest: Any) -> Tensor:
    return replay_call(linear_a16, (x, *rest[:5]), rest[5:]) if x.shape[0] else _linear_a16_fake(x, *rest)


def _linear_a16_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def _linear_afp8(x: Tensor, *rest: Any) -> Tensor:
    return replay_call(linear_afp8, (x, *rest[:6]), rest[6:]) if x.shape[0] else _linear_afp8_fake(x, *rest)


def _linear_afp8_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None,
    blocks: Tensor | None, n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def _linear_a8(x: Tensor, *rest: Any) -> Tensor:
    return replay_call(linear_a8, (x, *rest[:10]), rest[10:]) if x.shape[0] else _linear_a8_fake(x, *rest)


def _linear_a8_fake(
    x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, sums: Tensor | None, units: Tensor | None,
    bias: Tensor | None, x_scale: Tensor | None, x_zero_point: Tensor | None, out_scale: Tensor | None,
    out_zero_point: Tensor | None,
    n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], n), dtype=rest[-1])


def _embedding_fake(
    indices: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, factor: Tensor | None,
    v: int, d: int, bits: int, group: int, element: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return indices.new_empty((*indices.shape, d), dtype=out_dtype)


_WEIGHT = "Tensor data, Tensor scale, Tensor? zero"
_SIZES = "int n, int k, int bits, int group"

op_linear_a16 = define(
    f"linear_a16(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? factor, {_SIZES}, str element, ScalarType out_dtype)"
    f" -> Tensor",
    _linear_a16,
    _linear_a16_fake,
)
op_linear_afp8 = define(
    f"linear_afp8(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? factor, Tensor? blocks, {_SIZES}, str element, "
    f"int x_group, float? static_scale, ScalarType out_dtype) -> Tensor",
    _linear_afp8,
    _linear_afp8_fake,
)
op_linear_a8 = define(
    f"linear_a8(Tensor x, {_WEIGHT}, Tensor? sums, Tensor? units, Tensor? bias, Tensor? x_scale, Tensor? x_zero_point, "
    f"Tensor? out_scale, Tensor? out_zero_point, {_SIZES}, bool symmetric, float? static_scale, int static_zero_point, "
    f"float? output_scale, int output_zero_point, ScalarType out_dtype) -> Tensor",
    _linear_a8,
    _linear_a8_fake,
)
op_embedding = define(
    f"embedding(Tensor indices, {_WEIGHT}, Tensor? factor, int v, int d, int bits, int group, str element, "
    f"ScalarType out_dtype) -> Tensor",
    embedding,
    _embedding_fake,
)
