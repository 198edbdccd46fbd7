"""Activation and output quantization: x is quantized to int8 or fp8 codes, and a result to int8 codes.

An int8 code ``q`` with scale ``s`` and zero point ``z`` means ``s * (q - z)``, an fp8 (e4m3fn) value ``q`` means
``s * q``. Everything is computed in float32 and rounds half to even; "per token" means one scale per row of the last
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import FormatError

if TYPE_CHECKING:
    from typing_extensions import Self

INT8_MIN, INT8_MAX = -128, 127
FP8_MAX = 448
"""The largest value of e4m3fn."""
_LARGEST = torch.finfo(torch.float32).max


def smallest_scale() -> float:
    """The smallest normal number of float32.

    A function, and `FP8_MAX` an integer: dynamo makes a variable float an input of the graph, also a float of a module,
    and loses it where two autograd functions in one graph read it.
    """
    return 2.0**-126


@dataclass(frozen=True)
class DynamicInt8:
    """Activations are quantized per token at run time.

    ``symmetric``: ``s = max|x| / 127``, ``z = 0``. Otherwise ``s = (max(x, 0) - min(x, 0)) / 255`` and
    ``z = round(-128 - min/s)``. A row of zeros gets ``s = 1`` and code ``z``.
    """

    symmetric: bool = True


def _usable_number(kind: str, scale: float) -> float:
    scale = float(scale)
    if not smallest_scale() <= scale <= _LARGEST:
        raise FormatError(f"{kind}: scale is {scale!r}; it must be positive and finite in float32.")
    return scale


@dataclass(frozen=True)
class _GivenInt8:
    scale: float | None = None
    zero_point: int = 0
    per_token: bool = False

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if self.per_token and self.scale is not None:
            raise FormatError(f"{kind}: per-token scales are tensors, passed with each call; omit scale.")
        if self.scale is None and self.zero_point != 0:
            raise FormatError(f"{kind}: zero_point {self.zero_point!r} needs a scale; pass both or neither.")
        if self.scale is not None:
            # Plain numbers, so that equality, hashing and the text form see the same value.
            object.__setattr__(self, "scale", _usable_number(kind, self.scale))
        if self.zero_point != int(self.zero_point) or not INT8_MIN <= int(self.zero_point) <= INT8_MAX:
            raise FormatError(
                f"{kind}: zero_point is {self.zero_point!r}; it must be an integer in {INT8_MIN}..{INT8_MAX}."
            )
        object.__setattr__(self, "zero_point", int(self.zero_point))

    @property
    def is_given(self) -> bool:
        """Whether the parameters are known: a scale is set, or they are passed per token with each call."""
        return self.per_token or self.scale is not None

    def blank(self) -> Self:
        """The same kind without its parameters."""
        return replace(self, scale=None, zero_point=0)


@dataclass(frozen=True)
class StaticInt8(_GivenInt8):
    """Activations are quantized with given parameters: ``q = clamp(round(x / scale) + zero_point, -128, 127)``.

    ``scale`` None means "to be calibrated". ``per_token``: one scale and zero point per token, passed with each call
    as tensors of shape ``(tokens,)``. An x of dtype int8 is interpreted as codes.
    """


@dataclass(frozen=True)
class OutputInt8(_GivenInt8):
    """Results are requantized to int8: ``clamp(round(y / scale) + zero_point, -128, 127)``; see `StaticInt8`."""


@dataclass(frozen=True)
class DynamicFP8:
    """Activations are quantized to e4m3fn at run time: ``s = max|x| / 448``, ``q = e4m3(x / s)``, saturating at 448.

    ``group``: features of x that share a scale, None = one scale per token. A row or group of zeros gets ``s = 1``.
    Raises `FormatError` for a group that is not a positive integer.
    """

    group: int | None = None

    def __post_init__(self) -> None:
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise FormatError(f"DynamicFP8: group is {self.group!r}; it must be a positive integer, or None.")


@dataclass(frozen=True)
class StaticFP8:
    """Activations are quantized to e4m3fn with a given scale: ``q = e4m3(x / scale)``, saturating at 448.

    ``scale`` None means "to be calibrated". Raises `FormatError` unless the scale is positive and finite in float32.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", _usable_number("StaticFP8", self.scale))

    @property
    def is_given(self) -> bool:
        """Whether the scale is known."""
        return self.scale is not None

    def blank(self) -> StaticFP8:
        """The same kind without its scale."""
        return StaticFP8()


Activation = DynamicInt8 | StaticInt8 | DynamicFP8 | StaticFP8
Int8Activation = DynamicInt8 | StaticInt8
FP8Activation = DynamicFP8 | StaticFP8


def without_parameters(activation: Activation | None) -> Activation | None:
    """The same kind of activation without its calibrated parameters; dynamic ones and None have none."""
    return activation.blank() if isinstance(activation, (StaticInt8, StaticFP8)) else activation


def given_numbers(part: Activation | OutputInt8 | None) -> tuple[float | None, int]:
    """Scale and zero point for a whole tensor, as plain arguments of an op.

    The scale is None if there is none: nothing is quantized, or the parameters are per token. A request without
    calibrated parameters is only resolved, never run, so any value will do: it gets 1.
    """
    if part is None or isinstance(part, (DynamicInt8, DynamicFP8)):
        return None, 0
    if isinstance(part, StaticFP8):
        return (1.0 if part.scale is None else part.scale), 0
    if part.per_token:
        return None, 0
    return (1.0 if part.scale is None else part.scale), part.zero_point


def dynamic_parameters(x: Tensor, symmetric: bool = True) -> tuple[Tensor, Tensor | None]:
    """Per-token scale, float32 ``(..., 1)``, and zero point, integers in float32 (None if ``symmetric``)."""
    if not x.shape[-1]:  # nothing to reduce: a row without values is a row of zeros
        x = x.new_zeros((*x.shape[:-1], 1))
    if symmetric:
        scale = x.abs().amax(-1, keepdim=True).float() / INT8_MAX
        return _usable(scale), None
    # Not aminmax, which torch does not vectorize on CPUs: ten times slower.
    low, high = x.amin(-1, keepdim=True).float().clamp_max(0), x.amax(-1, keepdim=True).float().clamp_min(0)
    scale = _usable((high - low) / (INT8_MAX - INT8_MIN))
    return scale, torch.round(INT8_MIN - low / scale)


def _usable(scale: Tensor) -> Tensor:
    # NaN passes through all: a token that holds NaN must give NaN, not a number. One with an infinity had any sign.
    return torch.where(scale == 0, 1.0, scale.clamp_min(smallest_scale())) + (scale - scale)


def quantize_int8(x: Tensor, scale: Tensor | float, zero_point: Tensor | float | None) -> Tensor:
    """``clamp(round(x / scale) + zero_point, -128, 127)`` as int8; parameters broadcast against x."""
    codes = torch.round(x.float() / scale)
    if zero_point is not None:
        codes = codes + zero_point
    return codes.clamp(INT8_MIN, INT8_MAX).to(torch.int8)


def static_from_range(low: float, high: float) -> tuple[float, int]:
    """The (scale, zero point) that cover ``[min(low, 0), max(high, 0)]`` with int8 codes.

    Raises `FormatError` for a range that is not finite in float32.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if not high - low <= _LARGEST:
        raise FormatError(f"the range {low}..{high} is not finite; activations with NaN or Inf have no scale.")
    scale = max((high - low) / (INT8_MAX - INT8_MIN), smallest_scale()) if high > low else 1.0
    return scale, max(INT8_MIN, min(INT8_MAX, round(INT8_MIN - low / scale)))


def fp8_scale(activation: FP8Activation, x: Tensor) -> Tensor:
    """The scale of each feature of x ``(..., K)``: float32, ``(..., K)``, or one that broadcasts to it."""
    if isinstance(activation, StaticFP8):
        return torch.tensor(1.0 if activation.scale is None else activation.scale, device=x.device)
    k, group = x.shape[-1], activation.group
    if group is None or group >= k:
        return _fp8_usable(x.abs().amax(-1, keepdim=True) if k else x.new_zeros((*x.shape[:-1], 1)))
    padded = torch.nn.functional.pad(x.abs(), (0, -k % group))
    largest = padded.reshape(*x.shape[:-1], -(-k // group), group).amax(-1)
    return _fp8_usable(largest).repeat_interleave(group, dim=-1)[..., :k]


def _fp8_usable(largest: Tensor) -> Tensor:
    scale = largest.float() / FP8_MAX
    return torch.where(scale == 0, 1.0, scale.clamp_min(smallest_scale()))


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """``e4m3(clamp(x / scale, -448, 448))`` as float8_e4m3fn; ``scale`` broadcasts against x. NaN stays NaN."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_static_from_range(low: float, high: float) -> float:
    """The scale that covers ``[low, high]`` with e4m3fn; raises `FormatError` for a range that is not finite."""
    largest = max(abs(low), abs(high))
    if not largest <= _LARGEST:
        raise FormatError(f"the range {low}..{high} is not finite; activations with NaN or Inf have no scale.")
    return max(largest / FP8_MAX, smallest_scale()) if largest else 1.0
