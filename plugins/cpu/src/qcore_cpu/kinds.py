"""How the library reads codes and x: enums with the values of ``native/problem.h``."""

from __future__ import annotations

import enum

from qcore import DynamicFP8, DynamicInt8, StaticFP8, StaticInt8
from qcore.plugin_api import Activation, Element, given_numbers


class Kind(enum.IntEnum):
    """How the library reads codes; the values are the library's."""

    INT4 = 0
    INT8 = 1
    HALVES4 = 2
    """A 4-bit table of multiples of 0.5 up to 6 in magnitude: fp4 (e2m1)."""
    FLOAT4 = 3
    FLOAT8 = 4

    @property
    def bits(self) -> int:
        """Bits of a packed code."""
        return 8 if self in (Kind.INT8, Kind.FLOAT8) else 4

    @property
    def offset(self) -> int:
        """The offset that makes codes unsigned."""
        return {Kind.INT4: 8, Kind.INT8: 128}.get(self, 0)


class Mode(enum.IntEnum):
    """How x becomes rows of int8; the values are the library's."""

    DIGITS = 0
    DYNAMIC = 1
    AFFINE = 2
    STATIC = 3
    TOKEN = 4
    FP8 = 5

    @classmethod
    def of(cls, activation: Activation | None) -> Mode:
        """The mode for an activation, or for none."""
        if activation is None:
            return cls.DIGITS
        if isinstance(activation, DynamicInt8):
            return cls.DYNAMIC if activation.symmetric else cls.AFFINE
        if isinstance(activation, (DynamicFP8, StaticFP8)):
            return cls.FP8
        return cls.TOKEN if activation.per_token else cls.STATIC


def numbers_of(activation: Activation | None) -> tuple[float, int]:
    """Scale and zero point as the library's ops take them.

    Of a dynamic fp8 activation 0 and its group, which is 0 for all of K.
    """
    if isinstance(activation, DynamicFP8):
        return 0.0, activation.group or 0
    scale, zero = given_numbers(activation)
    return scale or 1.0, zero


def kind_of(element: Element) -> Kind:
    """How the codes of an element are read."""
    if element.is_integer:
        return Kind.INT4 if element.container_bits == 4 else Kind.INT8
    if element.container_bits == 8:
        return Kind.FLOAT8
    assert element.values is not None
    halves = all(abs(value) <= 6 and (2 * value).is_integer() for value in element.values)
    return Kind.HALVES4 if halves else Kind.FLOAT4


def needs_sums(activation: Activation | None) -> bool:
    """Whether the correction for zero points of x needs sums of the weight."""
    mode = Mode.of(activation)
    if mode is Mode.STATIC:
        assert isinstance(activation, StaticInt8)
        return activation.zero_point != 0
    return mode in (Mode.AFFINE, Mode.TOKEN)
