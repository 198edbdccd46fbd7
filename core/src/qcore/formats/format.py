"""What the bytes of a quantized weight mean: element type, groups, zero point and layout.

A `Format` says everything needed to read the bytes back and never depends on a device. Codes are signed integers
(int4: -8..7, int8: -128..127) of a logical weight of shape ``(N, K)`` = (output features, input features); each
group of ``group_size`` consecutive codes along K shares a scale and, where there is one, a zero point, both of
shape ``(G, N)`` with ``G = ceil(K / group_size)``.

A `Layout` says how codes become a tensor. Two are built in, `PLAIN` and `PLAIN_INT32`; plugins add more through
the hook ``qcore_formats``.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import FormatError, did_you_mean, quoted
from .elements import CODE_RANGE, ElementType
from .layouts import PLAIN, Layout, _codec, find_layout


class ZeroPoint(enum.Enum):
    """How a group's zero point enters the weight ``w``, given its code ``q`` and scale ``s``."""

    NONE = "none"
    """``w = q * s``"""
    INT = "int"
    """``w = (q - z) * s``, z int8 in the domain of the codes"""
    FLOAT = "float"
    """``w = q * s + z``, z in the scale's dtype"""


_ZERO_SUFFIX = {ZeroPoint.NONE: "", ZeroPoint.INT: "-asym", ZeroPoint.FLOAT: "-fzp"}


_TEXT = re.compile(r"(?P<dtype>[a-z]+[0-9]+)(-g(?P<group>[0-9]{1,18}))?(-(?P<zero>asym|fzp))?(/(?P<layout>\w+))?")


def match_text(pattern: re.Pattern[str], text: object) -> re.Match[str] | None:
    """The match of all of ``text``; None also for what is no text at all."""
    return pattern.fullmatch(text) if isinstance(text, str) else None


@dataclass(frozen=True)
class Format:
    """The meaning of a quantized weight's bytes; ``str(format)`` is e.g. ``int4-g128-asym/plain``.

    **Fields:** ``dtype``: ``"int4"`` or ``"int8"``. ``group_size``: codes along K that share a scale, None = one
    group per output channel. ``zero``: see `ZeroPoint`. ``layout``: how the codes are stored.

    Raises `FormatError` for an element type, group size or layout that qcore does not know.
    """

    dtype: ElementType
    group_size: int | None = None
    zero: ZeroPoint = ZeroPoint.NONE
    layout: Layout = field(default=PLAIN)

    def __post_init__(self) -> None:
        if self.dtype not in CODE_RANGE:
            raise FormatError(
                f"unknown element type {quoted(self.dtype)}; qcore knows {' and '.join(CODE_RANGE)}."
                f"{did_you_mean(str(self.dtype), CODE_RANGE)}"
            )
        g = self.group_size
        if g is not None and (type(g) is not int or g < 1):
            raise FormatError(f"group_size is {g!r}; it must be a positive integer, or None for per-channel.")
        if not isinstance(self.zero, ZeroPoint):
            raise FormatError(f"zero is {self.zero!r}; it must be a qcore.ZeroPoint.")
        if not isinstance(self.layout, Layout):
            raise FormatError(f"layout is {self.layout!r}; it must be a Layout such as qcore.PLAIN.")
        _codec(self.layout, self.dtype)

    @classmethod
    def parse(cls, text: str) -> Format:
        """Read what ``str(format)`` wrote. A missing ``/layout`` means ``/plain``."""
        match = match_text(_TEXT, text)
        if match is None:
            raise FormatError(
                f"cannot read the format {quoted(text)}.\n"
                f"It is written int4|int8[-gGROUP][-asym|-fzp][/layout], for example int4-g128-asym/plain."
            )
        zero = {None: ZeroPoint.NONE, "asym": ZeroPoint.INT, "fzp": ZeroPoint.FLOAT}[match["zero"]]
        group = None if match["group"] is None else int(match["group"])
        return cls(match["dtype"], group, zero, find_layout(match["layout"] or PLAIN.name))  # type: ignore[arg-type]

    def __str__(self) -> str:
        group = "" if self.group_size is None else f"-g{self.group_size}"
        return f"{self.dtype}{group}{_ZERO_SUFFIX[self.zero]}/{self.layout.name}"

    @property
    def bits(self) -> int:
        """Bits per code: 4 or 8."""
        return 4 if self.dtype == "int4" else 8

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code, both included."""
        return CODE_RANGE[self.dtype]

    @property
    def codec(self) -> Layout:
        """The layout specialised to this element type: what encodes and decodes; of third parties, guarded."""
        return _codec(self.layout, self.dtype)

    def group(self, k: int) -> int:
        """Codes per group along a K of ``k``: `group_size`, or all of them per channel or where K is shorter."""
        return max(k, 1) if self.group_size is None else min(self.group_size, max(k, 1))

    def groups(self, k: int) -> int:
        """G, the number of groups along a K of ``k``; the last one may be ragged."""
        return 1 if self.group_size is None else -(-k // self.group_size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickled bytes are input like any other: they go through the same checks.
        self.__init__(**state)  # type: ignore[misc]

    def with_layout(self, layout: Layout) -> Format:
        """The same codes in another layout."""
        return replace(self, layout=layout)


def grouped_int4(group_size: int, symmetric: bool = True, layout: Layout = PLAIN) -> Format:
    """Grouped int4: ``Format("int4", group_size)``, with an integer zero point unless ``symmetric``."""
    return Format("int4", group_size, ZeroPoint.NONE if symmetric else ZeroPoint.INT, layout)
