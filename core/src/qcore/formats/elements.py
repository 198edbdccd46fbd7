"""Elements: the data types of the codes of a weight.

An integer element decodes a signed code to itself; a table element decodes an unsigned code to one of ``2**bits``
numbers. Built in: ``int4``, ``int8``; ``fp8`` (e4m3fn) and ``fp8_e5m2`` (OCP 8-bit floating point, revision 1.0);
``fp4`` (e2m1 of the OCP microscaling formats, revision 1.0); ``nf4`` (QLoRA, arXiv 2305.14314, appendix E) and
``fp4_bnb``, the two tables of bitsandbytes. Plugins add more with the hook ``qcore_elements``.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, did_you_mean, quoted

ElementType = str
"""The name of a registered `Element`."""

_NIBBLE, _MOST_BITS = 4, 8
# By the number of bits. Looked up: torch 2.9 traces numbers of bits as symbols, and cannot shift by one.
_INTEGERS = tuple((-(1 << max(bits - 1, 0)), (1 << max(bits - 1, 0)) - 1) for bits in range(_MOST_BITS + 1))
_INDICES = tuple((0, (1 << bits) - 1) for bits in range(_MOST_BITS + 1))


@dataclass(frozen=True, eq=False)
class Element:
    """The data type of a code of ``bits`` bits.

    **Fields:** ``name``: lower case, as in the text of formats; ``bits``: 1 to 8; ``values``: None for signed integers
    in two's complement, else the ``2**bits`` numbers that the codes 0, 1, ... decode to. NaN and Inf mark codes that a
    weight must not hold. Raises `FormatError` for an invalid name, number of bits or table.
    """

    name: str
    bits: int
    values: tuple[float, ...] | None = None
    _text: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", self.name):
            raise FormatError(f"element name {quoted(self.name)} must be lower-case letters, digits and underscores.")
        if type(self.bits) is not int or not 1 <= self.bits <= _MOST_BITS:
            raise FormatError(f"element {self.name!r} has {self.bits!r} bits; an element has 1 to {_MOST_BITS}.")
        if self.values is None:
            return
        try:
            values = tuple(float(value) for value in self.values)
        except (TypeError, ValueError) as error:
            raise FormatError(f"the table of element {self.name!r} must hold numbers: {error}.") from error
        if len(values) != 1 << self.bits:
            raise FormatError(
                f"the table of element {self.name!r} has {len(values)} values; {self.bits} bits need {1 << self.bits}."
            )
        finite = [value for value in values if math.isfinite(value)]
        if not finite or any(value != _float32(value) for value in finite):
            raise FormatError(f"the table of element {self.name!r} must hold finite float32 numbers.")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "_text", " ".join(map(repr, values)))

    def _key(self) -> tuple[str, int, bytes]:
        # Bytes, because NaN is not equal to itself.
        values = self.values or ()
        return self.name, self.bits, struct.pack(f"{len(values)}d", *values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and (self is other or self._key() == other._key())

    def __hash__(self) -> int:
        return hash((self.name, self.bits))

    @classmethod
    def integer(cls, bits: int) -> Element:
        """Signed integers of ``bits`` bits, called ``int<bits>``."""
        return cls(f"int{bits}", bits)

    @classmethod
    def table(cls, name: str, values: tuple[float, ...] | list[float]) -> Element:
        """A table of ``2**bits`` numbers, indexed by the raw code."""
        return cls(name, max(1, len(values) - 1).bit_length(), tuple(values))

    @property
    def is_integer(self) -> bool:
        """Whether codes are signed integers; otherwise they index `values`."""
        return self.values is None

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code, inclusive."""
        return (_INTEGERS if self.is_integer else _INDICES)[self.bits]

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of raw codes: int8 for integers, uint8 for tables."""
        return torch.int8 if self.is_integer else torch.uint8

    @property
    def container_bits(self) -> int:
        """Bits that a code takes in the layout PLAIN: 4 for up to four bits, else 8."""
        return _NIBBLE if self.bits <= _NIBBLE else 8

    @property
    def value_range(self) -> tuple[float, float]:
        """Smallest and largest finite value."""
        if self.values is None:
            low, high = self.code_range
            return float(low), float(high)
        finite = [value for value in self.values if math.isfinite(value)]
        return min(finite), max(finite)

    @property
    def zero_code(self) -> int | None:
        """The first code whose value is 0; None if there is none."""
        if self.values is None:
            return 0
        return next((code for code, value in enumerate(self.values) if value == 0), None)

    @property
    def has_invalid_codes(self) -> bool:
        """Whether some codes decode to NaN or Inf."""
        return self.values is not None and not all(map(math.isfinite, self.values))

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode raw codes of any shape to values in ``dtype``: exact in float32 and float64, else rounded once."""
        if self.values is None:
            return codes.to(dtype)
        native = _NATIVE.get(self.name)
        if native is not None and codes.device.type != "xla":
            return codes.contiguous().view(native).to(dtype)
        table = self.lookup(codes.device, dtype)
        return table.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)

    def lookup(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """The table ``(2**bits,)`` on ``device``."""
        assert self.values is not None
        # A table created under a trace belongs to the trace.
        if torch.compiler.is_compiling() or device.type in ("meta", "xla") or _is_faked():
            # From text: Dynamo takes the floats of an object for inputs of a graph whose sizes are dynamic.
            values = [float(word) for word in self._text.split()]
            return torch.tensor(values, dtype=torch.float32, device=device).to(dtype)
        return _cached_lookup(self, device, dtype)

    def nearest(self, values: Tensor) -> Tensor:
        """The codes nearest to float32 ``values`` of any shape, uint8 (tables) or int8; beyond the range they saturate.

        Integers round half to even. In a table, a value half-way between two neighbours gets the code whose lowest bit
        is 0, which for floating-point elements is the even mantissa (IEEE 754); among codes of equal value the first is
        used. A table's negative zero is used if the value is negative, or -0.0, and rounds to zero.
        """
        if self.values is None:
            return values.round().clamp(*self.code_range).to(torch.int8)
        native = _NATIVE.get(self.name)
        if native is not None:
            low, high = self.value_range
            return values.clamp(low, high).to(native).view(torch.uint8)
        borders, codes, negative = _rounding(self)
        # A float64 border lies exactly between two float32 neighbours; float32 values compare with it exactly.
        device = values.device
        place = torch.bucketize(values.double().contiguous(), torch.tensor(borders, dtype=torch.float64, device=device))
        found = torch.tensor(codes, dtype=torch.uint8, device=device)[place]
        if negative is not None:
            zero, minus = negative
            found = torch.where((found == zero) & torch.signbit(values), minus, found).to(torch.uint8)
        return found


def _is_faked() -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@lru_cache(maxsize=64)
def _cached_lookup(element: Element, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(element.values, dtype=torch.float32, device=device).to(dtype)


@lru_cache(maxsize=64)
def _rounding(element: Element) -> tuple[list[float], list[int], tuple[int, int] | None]:
    """Borders between neighbouring values, the codes between them, and the codes of +0 and -0 if the table has both.

    `torch.bucketize` puts a value on a border below it; a border whose tie must round up moves down by one step.
    """
    assert element.values is not None
    first: dict[float, int] = {}
    for code, value in enumerate(element.values):
        if math.isfinite(value):
            first.setdefault(value, code)  # 0.0 and -0.0 are one key
    ordered = sorted(first)
    borders = []
    for low, high in itertools.pairwise(ordered):
        middle = (low + high) / 2
        upward = first[low] & 1 and not first[high] & 1
        borders.append(math.nextafter(middle, -math.inf) if upward else middle)
    zeros = [code for code, value in enumerate(element.values) if value == 0]
    signed = [code for code in zeros if math.copysign(1.0, element.values[code]) < 0]
    plain = [code for code in zeros if code not in signed]
    return borders, [first[value] for value in ordered], (plain[0], signed[0]) if signed and plain else None


def _floating(exponent: int, mantissa: int, *, finite: bool) -> tuple[float, ...]:
    """Every value of a float with one sign bit; ``finite``: the largest exponent holds numbers, only all ones is NaN.

    OCP 8-bit floating point specification, section 5: e4m3fn keeps the largest exponent for numbers, e5m2 follows
    IEEE 754.
    """
    bias, values = (1 << (exponent - 1)) - 1, []
    for code in range(1 << (exponent + mantissa)):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        scale = 2.0 ** (max(e, 1) - bias - mantissa)
        value = scale * (m + ((1 << mantissa) if e else 0))
        if exponent + mantissa == _MOST_BITS - 1 and e == (1 << exponent) - 1:
            if finite and m == (1 << mantissa) - 1:
                value = math.nan
            elif not finite:
                value = math.nan if m else math.inf
        values.append(value)
    return (*values, *(-value for value in values))


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""bitsandbytes' table of NormalFloat4, as float32."""

_FP4_BNB = tuple(
    _float32(sign * value / 12.0) + 0.0
    for sign in (1.0, -1.0)
    for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
)
"""bitsandbytes' FP4: a sign and magnitudes in its own order, divided by the largest, 12."""

INT4, INT8 = Element.integer(4), Element.integer(8)
FP8, FP8_E5M2 = Element("fp8", 8, _floating(4, 3, finite=True)), Element("fp8_e5m2", 8, _floating(5, 2, finite=False))
FP4 = Element("fp4", 4, _floating(2, 1, finite=True))
NF4, FP4_BNB = Element("nf4", 4, _NF4), Element("fp4_bnb", 4, _FP4_BNB)

_NATIVE: dict[str, torch.dtype] = {FP8.name: torch.float8_e4m3fn, FP8_E5M2.name: torch.float8_e5m2}
"""torch's own dtypes for the codes of an element."""

_ELEMENTS: dict[str, Element] = {e.name: e for e in (INT4, INT8, FP8, FP8_E5M2, FP4, NF4, FP4_BNB)}
_OWNERS: dict[str, str] = {}

load_plugin_elements: Callable[[], object] | None = None
"""Set by the plugin registry: collects the elements of installed plugins before an unknown name raises an error."""


def register_element(element: Element, plugin: str = "") -> None:
    """Register ``element`` under its name; ``plugin``: the plugin that provides it, for errors.

    Raises `FormatError` for anything but an `Element`, and for a name that another element has.
    """
    if not isinstance(element, Element):
        raise FormatError(f"{element!r} is not an element: pass a qcore.Element, such as Element.table(name, values).")
    known = _ELEMENTS.setdefault(element.name, element)
    if known != element:
        owner = _OWNERS.get(element.name, "")
        raise FormatError(
            f"element name {element.name!r}{f' of plugin {plugin!r}' if plugin else ''} is taken by "
            f"{f'plugin {owner!r}' if owner else 'qcore'}, with other values; choose another."
        )
    if plugin and known is element:
        _OWNERS.setdefault(element.name, plugin)


def forget_elements(names: Iterable[str], plugin: str) -> None:
    """Unregister elements of a plugin whose registration failed."""
    for name in names:
        if _OWNERS.get(name) == plugin:
            del _ELEMENTS[name], _OWNERS[name]


def find_element(name: Any) -> Element:
    """The registered element called ``name``; loads installed plugins before it raises `FormatError`."""
    found = _ELEMENTS.get(name) if isinstance(name, str) else None
    if found is None and load_plugin_elements is not None:
        load_plugin_elements()
        found = _ELEMENTS.get(name) if isinstance(name, str) else None
    if found is None:
        scheme = str(name)[:1] == "w"  # of all element types, none starts like a scheme
        remedy = "A scheme such as 'w8a16' contains one: Scheme.parse(text).weight is its format."
        raise FormatError(
            f"unknown element type {quoted(name)}; known: {', '.join(_ELEMENTS)}."
            f"{did_you_mean(str(name), _ELEMENTS)}\n"
            f"{remedy if scheme else 'A third-party element needs its plugin installed.'}"
        )
    return found


def registered_elements() -> dict[str, tuple[Element, str]]:
    """Every element registered so far, by name, with the plugin that provides it (empty: qcore)."""
    return {name: (element, _OWNERS.get(name, "")) for name, element in _ELEMENTS.items()}
