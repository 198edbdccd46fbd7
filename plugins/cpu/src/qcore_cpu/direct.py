"""Calls of ``linear`` past torch's dispatcher: one row of a small layer takes 5 us, and the dispatcher as long again.

The library is called through ctypes with addresses. Traces, dispatch modes, profilers and everything unusual take the
op (`ops.linear`), which computes the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from qcore import LinearRequest, ScaleType, ZeroPoint
from qcore.plugin_api import Packed, given_numbers, runs_now

from . import native, ops
from .kinds import Kind, Mode, kind_of, needs_sums, numbers_of

# torch has no public query for a profiler, in which the op shall appear.
_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # noqa: SLF001


def form_of(request: LinearRequest, group: int) -> bytes | None:
    """What all calls of a layer have in common: ``Form`` of ``native/host.cpp``; None if each call is given scales."""
    if not request.k or any(getattr(part, "per_token", False) for part in (request.activation, request.output)):
        return None
    _, make, size = native.direct()
    scale, zero = numbers_of(request.activation)
    out_scale, out_zero = given_numbers(request.output)
    form, weight, x_type = ctypes.create_string_buffer(size), request.weight, ops.TYPES[request.x_dtype]
    make(
        form, request.n, request.k, group, kind_of(weight.element), Mode.of(request.activation), x_type,
        ops.TYPES[request.out_dtype], weight.zero is ZeroPoint.FLOAT, weight.scale is ScaleType.E4M3D, scale,
        zero, out_scale or 1.0, out_zero,
    )  # fmt: skip
    return form.raw


class DirectLinear:
    """Computes what a `CpuLinear` does for x that is ready: on the CPU, contiguous, of the request's dtype."""

    def __init__(self, request: LinearRequest, form: bytes) -> None:
        self.n, self.k, self.x_dtype, self.out_dtype = request.n, request.k, request.x_dtype, request.out_dtype
        self._run = native.direct()[0]
        self._form = form

    def __call__(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor | None:
        """``(..., N)`` for x ``(..., K)``; None if only the op can compute it."""
        shape = x.shape
        usual = x.dtype is self.x_dtype and x.is_cpu and x.is_contiguous() and len(shape) and shape[-1] == self.k
        if not usual or not runs_now(x) or _is_profiled():
            return None
        address, bias_at, bias_type = x.data_ptr(), None, 0
        if bias is not None:
            if bias.dtype not in ops.FLOAT_TYPES or not bias.is_contiguous() or bias.is_neg():
                return None
            bias_at, bias_type = bias.data_ptr(), ops.FLOAT_TYPES[bias.dtype]
        rows = x.numel() // self.k
        if not address or not rows:
            return None
        codes, scale, zero = packed["data"], packed["scale"], packed.get("zero")
        y = x.new_empty((*shape[:-1], self.n), dtype=self.out_dtype)
        failed = self._run(
            self._form, address, rows, codes.data_ptr(), codes.numel(), scale.data_ptr(), ops.SCALE_TYPES[scale.dtype],
            None if zero is None else zero.data_ptr(), bias_at, bias_type, y.data_ptr(),
        )  # fmt: skip
        return None if failed else y


def direct_linear(request: LinearRequest, form: bytes | None) -> DirectLinear | None:
    """The direct call for a request; None if its arguments are more than codes, scale, zero points and bias."""
    integer = kind_of(request.weight.element) in (Kind.INT4, Kind.INT8)
    plain = integer and not request.weight.scale.has_global and not needs_sums(request.activation)
    return DirectLinear(request, form) if plain and form is not None else None
