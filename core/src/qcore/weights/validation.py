"""Checks of the tensors that make a `QTensor`: dtypes, shapes, devices and values; each raises `FormatError`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import FormatError, dtype_name
from ..formats import Element, Format, ZeroPoint
from ..formats.bits import has_values
from ..formats.scales import check_scale_values

_CHUNK = 1 << 24
"""Codes checked at a time."""
_SIGN = 0x80


def check_tensors(tensors: dict[str, Tensor]) -> None:
    """Dense tensors on one device."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise FormatError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor.")
        # A trace through a backward pass cannot read a layout.
        if not torch.compiler.is_compiling() and value.layout != torch.strided:
            raise FormatError(f"{name} has the layout {value.layout}; it must be dense. Use {name}.to_dense().")
    devices = {name: str(value.device) for name, value in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise FormatError(f"all tensors of a quantized weight must be on one device; got {where}.")


def check_parameter(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], dims: str = "(G, N)"
) -> None:
    """``value`` has one of ``dtypes`` and ``shape``; ``dims`` names the dimensions in the error."""
    if value.dtype not in dtypes or tuple(value.shape) != shape:
        allowed = " or ".join(dtype_name(d) for d in dtypes)
        raise FormatError(
            f"{name} has dtype {value.dtype} and shape {tuple(value.shape)};\n"
            f"this format needs {allowed} and {dims} = {shape}."
        )


def check_zero(zero: Tensor | None, format: Format, scale: Tensor, shape: tuple[int, ...], dims: str) -> None:
    """A zero point of the format's kind, or none if the format has none."""
    if (zero is None) != (format.zero is ZeroPoint.NONE):
        have = "no zero point" if zero is None else "a zero point"
        raise FormatError(f"format {format} has zero {format.zero.name}, but {have} was given.")
    if zero is not None:
        allowed = (torch.int8,) if format.zero is ZeroPoint.INT else (scale.dtype,)
        check_parameter("zero", zero, allowed, shape, dims)


def check_order(order: Tensor | None, lead: tuple[int, ...], k: int) -> None:
    """None, or int32 ``(K,)`` (``(E, K)`` for E weights) that holds each feature of x once."""
    if order is None:
        return
    check_parameter("order", order, (torch.int32,), (*lead, k), "(E, K)" if lead else "(K,)")
    if has_values(order) and not torch.equal(
        order.sort(dim=-1).values, torch.arange(k, dtype=torch.int32, device=order.device).expand(order.shape)
    ):
        raise FormatError(f"order must hold each of the features 0..{k - 1} of x once.")


def check_global_scale(global_scale: Tensor | None, format: Format, lead: tuple[int, ...]) -> None:
    """One float32 per weight if the format's scales need it, else None."""
    if (global_scale is not None) != format.scale.has_global:
        have = "none" if global_scale is None else "one"
        need = "one float32 per weight" if format.scale.has_global else "none"
        raise FormatError(f"format {format} needs {need} as global_scale, but {have} was given.")
    if global_scale is not None:
        check_parameter("global_scale", global_scale, (torch.float32,), lead, "(E,)" if lead else "()")


def check_values(
    format: Format, scale: Tensor, global_scale: Tensor | None, zero: Tensor | None, integer_zero: Tensor | None
) -> None:
    """Finite scales, zero points within the range of the codes."""
    check_scale_values(format.scale, scale, global_scale)
    if integer_zero is not None and integer_zero.numel():
        low, high = format.code_range
        found_low, found_high = (int(v) for v in torch.aminmax(integer_zero))
        if found_low < low or found_high > high:
            raise FormatError(f"zero points span {found_low}..{found_high}; {format.dtype} codes allow {low}..{high}.")
    elif zero is not None and not bool(torch.isfinite(zero).all()):
        raise FormatError("zero holds NaN or Inf; a float zero point must be finite.")


def check_codes(codes: Tensor, format: Format) -> None:
    """Raw codes ``(N, K)`` or ``(E, N, K)`` of the element's dtype and range."""
    element = format.element
    if codes.dim() not in (2, 3) or codes.dtype != element.code_dtype:
        raise FormatError(
            f"codes have dtype {codes.dtype} and shape {tuple(codes.shape)};\n"
            f"they must be {str(element.code_dtype).removeprefix('torch.')} of shape (N, K)."
        )
    low, high = element.code_range
    limits = torch.iinfo(element.code_dtype)
    if (low, high) != (limits.min, limits.max) and codes.numel() and has_values(codes):
        found_low, found_high = (int(v) for v in torch.aminmax(codes))
        if found_low < low or found_high > high:
            raise FormatError(f"codes span {found_low}..{found_high}; {format.dtype} allows {low}..{high}.")


def check_valid_codes(codes: Tensor, element: Element) -> None:
    """No code that represents NaN or Inf; ``codes`` of any shape."""
    if not element.has_invalid_codes or not codes.numel() or not has_values(codes):
        return
    first = _first_invalid(element)
    for chunk in torch.split(codes.reshape(-1), _CHUNK):
        if first is not None and int((chunk & ~_SIGN).max()) < first:
            continue
        # bfloat16 is enough: it distinguishes NaN and Inf from every finite value of an element.
        bad = ~torch.isfinite(element.decode(chunk, torch.bfloat16))
        if bool(bad.any()):
            code = int(chunk[bad][0])
            raise FormatError(
                f"codes hold {code:#04x}, which is {_word(element, code)} in {element.name}; a weight must be finite.\n"
                f"Repair the checkpoint, or exclude this layer."
            )


def _first_invalid(element: Element) -> int | None:
    """The smallest code, ignoring its sign, that represents NaN or Inf; None if valid codes follow it.

    In the floating-point types all codes from there on are invalid, so checking the largest code of a weight suffices.
    """
    assert element.values is not None
    invalid = {code for code, value in enumerate(element.values) if not math.isfinite(value)}
    first = min(code & ~_SIGN for code in invalid)
    return first if invalid == {code for code in range(1 << element.bits) if code & ~_SIGN >= first} else None


def _word(element: Element, code: int) -> str:
    assert element.values is not None
    value = element.values[code]
    return "NaN" if value != value else "Inf"  # noqa: PLR0124 - only NaN differs from itself
