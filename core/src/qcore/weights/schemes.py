"""`Scheme`: the requested quantization, as a short text such as ``w4a16-g128-asym``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import FormatError, did_you_mean, first_line, quoted
from ..formats import PLAIN, Format, ScaleType, ZeroPoint, find_element, find_layout, match_text
from .activations import Activation, DynamicFP8, DynamicInt8, OutputInt8, StaticFP8, StaticInt8, without_parameters
from .quantizers import checked_quantizer, default_quantizer, needs_moments

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
"""The schemes with integer weights that the conformance kit runs, with and without zero points."""

TABLE_SCHEMES: tuple[str, ...] = (
    "wfp8a16",
    "wfp8a16-g128",
    "wfp8_e5m2a16",
    "wfp8a16-g32-e8m0",
    "wfp8afp8",
    "wfp8afp8-g128",
    "wfp8afp8-static",
    "wfp4a16-g32-e8m0",
    "wfp4a16-g16-e4m3",
    "wfp4a16-g16-e4m3d",
    "wnf4a16-g64",
    "wfp4_bnba16-g64",
)
"""The schemes with non-integer elements that the conformance kit runs."""

SHORT_NAMES: dict[str, str] = {
    "mxfp4": "wfp4a16-g32-e8m0",
    "mxfp8": "wfp8a16-g32-e8m0",
    "nvfp4": "wfp4a16-g16-e4m3",
    "nf4": "wnf4a16-g64",
}
"""The field's common names for schemes; options such as ``@mse`` may follow them."""

_GRAMMAR = (
    "w4|w8|wELEMENT a16|a8|afp8 [-gGROUP] [-asym|-fzp] [-e8m0|-e4m3|-e4m3d] "
    "[-aasym|-static[(SCALE,ZERO)]|-token] [-o8[(SCALE,ZERO)]|-o8t] [@QUANTIZER] [/LAYOUT]"
)
_EXAMPLES = ("w8a16", "w8a8", "w4a16-g128", "w4a16-g32-asym", "w4a8-g32", "w8a8-static", "wfp8afp8", *SHORT_NAMES)
_GROUPED = tuple(f"w{bits}a16-g{group}{zero}" for bits in (4, 8) for group in (32, 64, 128) for zero in ("", "-asym"))
_OTHER_WORDS = {
    **dict.fromkeys(("w4", "int4", "4bit", "4-bit"), "w4a16-g128"),
    **dict.fromkeys(("w8", "int8", "8bit", "8-bit"), "w8a16"),
    "fp8": "wfp8a16",
    "fp4": "mxfp4",
}
"""What people write for a scheme, and a scheme that they most likely mean."""
_NUMBERS = r"(\((?P<{0}_scale>[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)(,(?P<{0}_zero>-?[0-9]{{1,3}}))?\))?"
_TEXT = re.compile(
    r"w(?P<element>[a-z0-9_]+?)a(?P<abits>16|8|fp8)(?![a-z0-9_])(-g(?P<group>[0-9]{1,18}))?(-(?P<zero>asym|fzp))?"
    r"(-(?P<scale>e8m0|e4m3d?))?"
    r"(-(?P<activation>aasym|static|token)" + _NUMBERS.format("a") + r")?"
    r"(?P<output>-o8(?P<o_token>t)?" + _NUMBERS.format("o") + r")?"
    r"(@(?P<quantizer>\w+))?(/(?P<layout>\w+))?"
)
_SHORT = re.compile(rf"({'|'.join(SHORT_NAMES)})(?=$|[@/])")


@dataclass(frozen=True)
class Scheme:
    """Weight format + quantizer + activation + output.

    ``activation`` None means float activations. ``Scheme.parse(str(scheme)) == scheme``, numbers included.
    Raises `FormatError` for an invalid combination.
    """

    weight: Format
    quantizer: str = ""
    activation: Activation | None = None
    output: OutputInt8 | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantizer", self.quantizer or default_quantizer(self.weight))
        checked_quantizer(self.quantizer, self.weight)
        if self.output is not None and self.activation is None:
            raise FormatError("int8 output (-o8) needs int8 activations: write w8a8...-o8 or w4a8...-o8.")
        if isinstance(self.activation, (DynamicInt8, StaticInt8)) and not self.weight.element.is_integer:
            raise FormatError(
                f"int8 activations (a8) require integer weights; {self.weight.dtype} weights take a16 or afp8."
            )
        if self.output is not None and not isinstance(self.activation, (DynamicInt8, StaticInt8)):
            raise FormatError("int8 output (-o8) needs int8 activations: write w8a8...-o8 or w4a8...-o8.")
        if isinstance(self.activation, DynamicFP8) and self.activation.group not in (None, self.weight.group_size):
            raise FormatError("fp8 activations have one scale per token, or per group with the weight's group size.")

    @classmethod
    def parse(cls, text: str | Scheme) -> Scheme:
        """Parse a scheme's text; a `Scheme` is returned unchanged. Raises a `FormatError` that states the syntax."""
        if isinstance(text, Scheme):
            return text
        match = match_text(_TEXT, _written_out(text))
        if match is None:
            raise _unreadable(text)
        parts = match.groupdict()
        if parts["abits"] == "16" and (parts["activation"] or parts["output"]):
            raise _unreadable(text, "a16 means float activations; -aasym, -static, -token and -o8 require a8.")
        if parts["abits"] == "fp8" and (parts["activation"] == "aasym" or parts["output"]):
            raise _unreadable(text, "afp8 means fp8 activations; only -static and -token may follow.")
        if (parts["a_scale"] and (parts["a_zero"] is None) != (parts["abits"] == "fp8")) or (
            parts["o_scale"] and parts["o_zero"] is None
        ):
            raise _unreadable(
                text, "int8 parameters are (SCALE,ZERO); fp8 activations have only a scale: -static(SCALE)."
            )
        zero = {None: ZeroPoint.NONE, "asym": ZeroPoint.INT, "fzp": ZeroPoint.FLOAT}[parts["zero"]]
        group = None if parts["group"] is None else int(parts["group"])
        layout = find_layout(parts["layout"] or PLAIN.name)
        element = f"int{parts['element']}" if parts["element"].isdigit() else parts["element"]
        try:
            find_element(element)
        except FormatError as error:
            raise _unreadable(text, first_line(error)) from None
        weight = Format(element, group, zero, layout, ScaleType(parts["scale"] or "float"))
        return cls(weight, parts["quantizer"] or "", _activation(parts), _output(parts))

    def __str__(self) -> str:
        fmt = self.weight
        group = "" if fmt.group_size is None else f"-g{fmt.group_size}"
        zero = {ZeroPoint.NONE: "", ZeroPoint.INT: "-asym", ZeroPoint.FLOAT: "-fzp"}[fmt.zero]
        quantizer = "" if self.quantizer == default_quantizer(fmt) else f"@{self.quantizer}"
        layout = "" if fmt.layout == PLAIN else f"/{fmt.layout.name}"
        scale = "" if fmt.scale is ScaleType.FLOAT else f"-{fmt.scale.value}"
        element = str(fmt.bits) if fmt.dtype == f"int{fmt.bits}" else fmt.dtype
        head = f"w{element}a{self._activation_width()}{group}{zero}{scale}"
        return f"{head}{self._activation_text()}{self._output_text()}{quantizer}{layout}"

    def _activation_width(self) -> str:
        if self.activation is None:
            return "16"
        return "fp8" if isinstance(self.activation, (DynamicFP8, StaticFP8)) else "8"

    def _activation_text(self) -> str:
        if isinstance(self.activation, StaticFP8):
            return "-static" if self.activation.scale is None else f"-static({self.activation.scale!r})"
        if isinstance(self.activation, DynamicFP8):
            return "-token" if self.activation.group is None and self.weight.group_size is not None else ""
        if isinstance(self.activation, StaticInt8):
            return "-token" if self.activation.per_token else "-static" + _numbers(self.activation)
        return "-aasym" if self.activation == DynamicInt8(symmetric=False) else ""

    def _output_text(self) -> str:
        if self.output is None:
            return ""
        return "-o8t" if self.output.per_token else "-o8" + _numbers(self.output)

    @property
    def needs_calibration(self) -> bool:
        """Whether quantizing a float layer to this needs inputs of the layer, for parameters or the weight itself."""
        return self.needs_numbers or self.needs_moments

    @property
    def needs_moments(self) -> bool:
        """Whether the quantizer uses the layer's inputs. A weight that is already quantized needs none."""
        return needs_moments(self.quantizer)

    @property
    def needs_numbers(self) -> bool:
        """Whether the parameters of a static activation or an output are still missing."""
        activation = self.activation if isinstance(self.activation, (StaticInt8, StaticFP8)) else None
        return any(part is not None and not part.is_given for part in (activation, self.output))

    def blank(self) -> Scheme:
        """The scheme without calibrated parameters, as named in a checkpoint's metadata."""
        return replace(self, activation=without_parameters(self.activation), output=self.output and self.output.blank())


def _written_out(text: object) -> object:
    """The scheme that a short name stands for; any other text unchanged."""
    return _SHORT.sub(lambda found: SHORT_NAMES[found[0]], text, count=1) if isinstance(text, str) else text


def _numbers(part: StaticInt8 | OutputInt8) -> str:
    return "" if part.scale is None else f"({float(part.scale)!r},{part.zero_point})"


def _given(parts: dict[str, str | None], prefix: str) -> tuple[float | None, int]:
    scale, zero = parts[f"{prefix}_scale"], parts[f"{prefix}_zero"]
    return (None, 0) if scale is None or zero is None else (float(scale), int(zero))


def _activation(parts: dict[str, str | None]) -> Activation | None:
    if parts["abits"] == "16":
        return None
    if parts["abits"] == "fp8":
        if parts["activation"] == "static":
            return StaticFP8(None if parts["a_scale"] is None else float(parts["a_scale"]))
        shared = parts["group"] is not None and parts["activation"] is None
        return DynamicFP8(int(parts["group"] or 0) if shared else None)
    if parts["activation"] in (None, "aasym"):
        return DynamicInt8(symmetric=parts["activation"] is None)
    return StaticInt8(*_given(parts, "a"), per_token=parts["activation"] == "token")


def _output(parts: dict[str, str | None]) -> OutputInt8 | None:
    return OutputInt8(*_given(parts, "o"), per_token=bool(parts["o_token"])) if parts["output"] else None


def _unreadable(text: object, why: str = "") -> FormatError:
    return FormatError(
        f"cannot read the scheme {quoted(text)}.{_suggestion(text) if isinstance(text, str) else ''}\n"
        + (f"{why}\n" if why else "")
        + f"The syntax of a scheme is {_GRAMMAR} without spaces;\nfor example {', '.join(_EXAMPLES)}."
    )


def _suggestion(text: str) -> str:
    """The text as it would be spelled correctly, if it is a scheme then; else the most similar scheme."""
    word = text.strip().lower()
    for spelled in (_OTHER_WORDS.get(word, word), word.replace("_", "-")):
        if spelled != text and _is_readable(spelled):
            return f" Did you mean {spelled!r}?"
    return did_you_mean(word, (*SCHEMES, *_GROUPED, *TABLE_SCHEMES, *SHORT_NAMES))


def _is_readable(text: str) -> bool:
    try:
        Scheme.parse(text)
    except FormatError:
        return False
    return True
