"""`Scheme`: what a user asks for, as a short text such as ``w4a16-g128-asym``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import FormatError, did_you_mean, quoted
from ..formats import PLAIN, Format, ZeroPoint, find_layout, match_text
from .activations import Activation, DynamicInt8, OutputInt8, StaticInt8
from .quantizers import NEEDS_MOMENTS, check_quantizer, default_quantizer

SCHEMES: tuple[str, ...] = (
    "w8a16",
    "w8a16-asym",
    "w8a16-g32",
    "w8a16-g32-asym",
    "w4a16",
    "w4a16-asym",
    "w4a16-g128",
    "w4a16-g128-asym",
    "w4a16-g32-fzp",
    "w8a8",
    "w8a8-asym",
    "w8a8-g64",
    "w8a8-g64-asym",
    "w8a8-aasym",
    "w4a8",
    "w4a8-asym",
    "w4a8-g32",
    "w4a8-g32-asym",
    "w4a8-g32-asym-aasym",
    "w8a8-static",
    "w4a8-g32-static",
    "w8a8-o8",
    "w8a8-static-o8",
    "w4a8-g32-o8",
)
"""The schemes that the conformance kit runs: every row of the table in the design, with and without zero points."""

_GRAMMAR = (
    "w4|w8 a16|a8 [-gGROUP] [-asym|-fzp] [-aasym|-static[(SCALE,ZERO)]|-token] [-o8[(SCALE,ZERO)]|-o8t] "
    "[@QUANTIZER] [/LAYOUT]"
)
_NUMBERS = r"(\((?P<{0}_scale>[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?),(?P<{0}_zero>-?[0-9]{{1,3}})\))?"
_TEXT = re.compile(
    r"w(?P<bits>4|8)a(?P<abits>16|8)(-g(?P<group>[0-9]{1,18}))?(-(?P<zero>asym|fzp))?"
    r"(-(?P<activation>aasym|static|token)" + _NUMBERS.format("a") + r")?"
    r"(?P<output>-o8(?P<o_token>t)?" + _NUMBERS.format("o") + r")?"
    r"(@(?P<quantizer>\w+))?(/(?P<layout>\w+))?"
)


@dataclass(frozen=True)
class Scheme:
    """Weight format + quantizer + activation + output.

    ``activation`` None means float activations. ``Scheme.parse(str(scheme)) == scheme``, numbers included.
    Raises `FormatError` for a combination that means nothing.
    """

    weight: Format
    quantizer: str = ""
    activation: Activation | None = None
    output: OutputInt8 | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantizer", self.quantizer or default_quantizer(self.weight))
        check_quantizer(self.quantizer, self.weight)
        if self.output is not None and self.activation is None:
            raise FormatError("int8 output (-o8) needs int8 activations: write w8a8...-o8 or w4a8...-o8.")

    @classmethod
    def parse(cls, text: str | Scheme) -> Scheme:
        """Read a scheme's text; a `Scheme` passes through. Raises `FormatError` that lists what is possible."""
        if isinstance(text, Scheme):
            return text
        match = match_text(_TEXT, text)
        if match is None:
            raise _unreadable(text)
        parts = match.groupdict()
        if parts["abits"] == "16" and (parts["activation"] or parts["output"]):
            raise _unreadable(text, "a16 means float activations; -aasym, -static, -token and -o8 go with a8.")
        zero = {None: ZeroPoint.NONE, "asym": ZeroPoint.INT, "fzp": ZeroPoint.FLOAT}[parts["zero"]]
        group = None if parts["group"] is None else int(parts["group"])
        layout = find_layout(parts["layout"] or PLAIN.name)
        weight = Format("int4" if parts["bits"] == "4" else "int8", group, zero, layout)
        return cls(weight, parts["quantizer"] or "", _activation(parts), _output(parts))

    def __str__(self) -> str:
        fmt = self.weight
        group = "" if fmt.group_size is None else f"-g{fmt.group_size}"
        zero = {ZeroPoint.NONE: "", ZeroPoint.INT: "-asym", ZeroPoint.FLOAT: "-fzp"}[fmt.zero]
        quantizer = "" if self.quantizer == default_quantizer(fmt) else f"@{self.quantizer}"
        layout = "" if fmt.layout == PLAIN else f"/{fmt.layout.name}"
        bits = 16 if self.activation is None else 8
        return f"w{fmt.bits}a{bits}{group}{zero}{self._activation_text()}{self._output_text()}{quantizer}{layout}"

    def _activation_text(self) -> str:
        if isinstance(self.activation, StaticInt8):
            return "-token" if self.activation.per_token else "-static" + _numbers(self.activation)
        return "-aasym" if self.activation == DynamicInt8(symmetric=False) else ""

    def _output_text(self) -> str:
        if self.output is None:
            return ""
        return "-o8t" if self.output.per_token else "-o8" + _numbers(self.output)

    @property
    def needs_calibration(self) -> bool:
        """Whether quantizing a float layer to this takes inputs of the layer: for numbers, or for the weight itself."""
        return self.needs_numbers or self.needs_moments

    @property
    def needs_moments(self) -> bool:
        """Whether the quantizer learns from the layer's inputs. A weight that is quantized already needs nothing."""
        return self.quantizer in NEEDS_MOMENTS

    @property
    def needs_numbers(self) -> bool:
        """Whether the numbers of a static activation or an output are still missing."""
        activation = self.activation if isinstance(self.activation, StaticInt8) else None
        return any(part is not None and not part.is_given for part in (activation, self.output))

    def blank(self) -> Scheme:
        """The scheme without calibrated numbers: what a checkpoint's metadata names."""
        activation = self.activation.blank() if isinstance(self.activation, StaticInt8) else self.activation
        return replace(self, activation=activation, output=self.output and self.output.blank())


def _numbers(part: StaticInt8 | OutputInt8) -> str:
    return "" if part.scale is None else f"({float(part.scale)!r},{part.zero_point})"


def _given(parts: dict[str, str | None], prefix: str) -> tuple[float | None, int]:
    scale, zero = parts[f"{prefix}_scale"], parts[f"{prefix}_zero"]
    return (None, 0) if scale is None or zero is None else (float(scale), int(zero))


def _activation(parts: dict[str, str | None]) -> Activation | None:
    if parts["abits"] == "16":
        return None
    if parts["activation"] in (None, "aasym"):
        return DynamicInt8(symmetric=parts["activation"] is None)
    return StaticInt8(*_given(parts, "a"), per_token=parts["activation"] == "token")


def _output(parts: dict[str, str | None]) -> OutputInt8 | None:
    return OutputInt8(*_given(parts, "o"), per_token=bool(parts["o_token"])) if parts["output"] else None


def _unreadable(text: object, why: str = "") -> FormatError:
    hint = did_you_mean(text, SCHEMES) if isinstance(text, str) else ""
    return FormatError(
        f"cannot read the scheme {quoted(text)}.{hint}\n"
        + (f"{why}\n" if why else "")
        + f"A scheme is written {_GRAMMAR} without spaces;\nfor example {', '.join(SCHEMES)}."
    )
