"""The meaning of a quantized weight's bytes: element type, groups, zero point and layout.

A `Format` contains everything needed to decode the bytes and never depends on a device. Codes are those of an `Element`
(int4: -8..7, int8: -128..127, tables such as fp8 and nf4: 0..2**bits - 1) of a logical weight of shape ``(N, K)`` =
(output features, input features); each group of ``group_size`` consecutive codes along K shares a scale and, if the
format has one, a zero point, both of shape ``(G, N)`` with ``G = ceil(K / group_size)``.

A `Layout` defines how codes are stored in a tensor. Two are built in, `PLAIN` and `PLAIN_INT32`; plugins add more
through the hook ``qcore_formats``.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import FormatError, quoted
from .elements import Element, ElementType, find_element
from .layouts import PLAIN, Layout, _codec, find_layout
from .scales import ScaleType


class ZeroPoint(enum.Enum):
    """How a group's zero point enters the weight ``w``, given the value ``q`` of its code and its scale ``s``."""

    NONE = "none"
    """``w = q * s``"""
    INT = "int"
    """``w = (q - z) * s``, z int8 in the domain of the codes; for integer elements"""
    FLOAT = "float"
    """``w = q * s + z``, z in the scale's dtype"""


_ZERO_SUFFIX = {ZeroPoint.NONE: "", ZeroPoint.INT: "-asym", ZeroPoint.FLOAT: "-fzp"}


_TEXT = re.compile(
    r"(?P<dtype>[a-z][a-z0-9_]*)(-g(?P<group>[0-9]{1,18}))?(-(?P<zero>asym|fzp))?"
    r"(-(?P<scale>e8m0|e4m3d?))?(/(?P<layout>\w+))?"
)


def match_text(pattern: re.Pattern[str], text: object) -> re.Match[str] | None:
    """The match of all of ``text``; None if there is none, or if ``text`` is not a string."""
    return pattern.fullmatch(text) if isinstance(text, str) else None


@dataclass(frozen=True)
class Format:
    """The meaning of a quantized weight's bytes; ``str(format)`` is e.g. ``int4-g128-asym/plain``.

    **Fields:** ``dtype``: the name of an `Element`: ``"int4"``, ``"int8"``, ``"fp8"``, ``"fp4"``, ``"nf4"``, ...
    ``group_size``: codes along K that share a scale, None = one group per output channel. ``zero``: see `ZeroPoint`.
    ``layout``: how the codes are stored. ``scale``: how the scales are stored, see `ScaleType`.

    Raises `FormatError` for an unknown element type, group size or layout, and for a zero point that the element or the
    scale type does not support.
    """

    dtype: ElementType
    group_size: int | None = None
    zero: ZeroPoint = ZeroPoint.NONE
    layout: Layout = field(default=PLAIN)
    scale: ScaleType = ScaleType.FLOAT

    def __post_init__(self) -> None:
        element = find_element(self.dtype)
        g = self.group_size
        if g is not None and (type(g) is not int or g < 1):
            raise FormatError(f"group_size is {g!r}; it must be a positive integer, or None for per-channel.")
        if not isinstance(self.zero, ZeroPoint):
            raise FormatError(f"zero is {self.zero!r}; it must be a qcore.ZeroPoint.")
        if not isinstance(self.layout, Layout):
            raise FormatError(f"layout is {self.layout!r}; it must be a Layout such as qcore.PLAIN.")
        if not isinstance(self.scale, ScaleType):
            raise FormatError(f"scale is {self.scale!r}; it must be a qcore.ScaleType.")
        if self.zero is ZeroPoint.INT and not element.is_integer:
            raise FormatError(
                f"{self.dtype} codes are not integers, so they cannot have an integer zero point (-asym).\n"
                f"Use ZeroPoint.FLOAT (-fzp), or none."
            )
        if self.zero is ZeroPoint.FLOAT and self.scale is not ScaleType.FLOAT:
            raise FormatError(
                f"a float zero point (-fzp) has the dtype of a float scale; scales here are {self.scale.value}."
            )
        _codec(self.layout, self.dtype)

    @classmethod
    def parse(cls, text: str) -> Format:
        """Parse the text that ``str(format)`` returns. A missing ``/layout`` means ``/plain``."""
        match = match_text(_TEXT, text)
        if match is None:
            raise FormatError(
                f"cannot read the format {quoted(text)}.\n"
                f"The syntax is ELEMENT[-gGROUP][-asym|-fzp][-e8m0|-e4m3|-e4m3d][/LAYOUT],\n"
                f"for example int4-g128-asym/plain or fp4-g32-e8m0/plain."
            )
        zero = {None: ZeroPoint.NONE, "asym": ZeroPoint.INT, "fzp": ZeroPoint.FLOAT}[match["zero"]]
        group = None if match["group"] is None else int(match["group"])
        scale = ScaleType(match["scale"] or "float")
        return cls(match["dtype"], group, zero, find_layout(match["layout"] or PLAIN.name), scale)

    def __str__(self) -> str:
        group = "" if self.group_size is None else f"-g{self.group_size}"
        scale = "" if self.scale is ScaleType.FLOAT else f"-{self.scale.value}"
        return f"{self.dtype}{group}{_ZERO_SUFFIX[self.zero]}{scale}/{self.layout.name}"

    @property
    def element(self) -> Element:
        """The element of the codes."""
        return find_element(self.dtype)

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self.element.bits

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code, inclusive."""
        return self.element.code_range

    @property
    def codec(self) -> Layout:
        """The layout specialised to this element type, which encodes and decodes; a third party's is guarded."""
        return _codec(self.layout, self.dtype)

    def group(self, k: int) -> int:
        """Codes per group along a K of ``k``: `group_size`, or all of them if per-channel or if K is shorter."""
        return max(k, 1) if self.group_size is None else min(self.group_size, max(k, 1))

    def groups(self, k: int) -> int:
        """G, the number of groups along a K of ``k``; the last one may be ragged."""
        return 1 if self.group_size is None else -(-k // self.group_size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickled data is input like any other: it goes through the same checks.
        self.__init__(**state)  # type: ignore[misc]

    def with_layout(self, layout: Layout) -> Format:
        """The same codes in another layout."""
        return replace(self, layout=layout)


def grouped_int4(group_size: int, symmetric: bool = True, layout: Layout = PLAIN) -> Format:
    """Grouped int4: ``Format("int4", group_size)``, with an integer zero point unless ``symmetric``."""
    return Format("int4", group_size, ZeroPoint.NONE if symmetric else ZeroPoint.INT, layout)
