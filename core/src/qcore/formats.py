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
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import FormatError, did_you_mean, quoted

ElementType = Literal["int4", "int8"]

_CODE_RANGE: dict[str, tuple[int, int]] = {"int4": (-8, 7), "int8": (-128, 127)}


class ZeroPoint(enum.Enum):
    """How a group's zero point enters the weight ``w``, given its code ``q`` and scale ``s``."""

    NONE = "none"
    """``w = q * s``"""
    INT = "int"
    """``w = (q - z) * s``, z int8 in the domain of the codes"""
    FLOAT = "float"
    """``w = q * s + z``, z in the scale's dtype"""


_ZERO_SUFFIX = {ZeroPoint.NONE: "", ZeroPoint.INT: "-asym", ZeroPoint.FLOAT: "-fzp"}


class Layout(ABC):
    """How the codes of one weight become one tensor, and back.

    A third party subclasses this, sets ``name`` and ``dtypes``, and returns an instance from ``qcore_formats``.
    ``decode(encode(codes), k)`` must equal ``codes`` bit for bit, on every device, and both must work on ``meta``.
    """

    name: str
    """How the layout is spelled behind the slash of a format: lower case, digits, underscores."""
    dtypes: tuple[str, ...] = ("int4",)
    """The element types it can hold."""

    def for_dtype(self, dtype: str) -> Layout:
        """The layout that holds ``dtype``; raises `FormatError` where there is none."""
        if dtype not in self.dtypes:
            raise FormatError(
                f"layout {self.name!r} cannot hold {dtype} codes; it holds {', '.join(self.dtypes)}.\n"
                f"Use layout 'plain', which holds every element type."
            )
        return self

    @abstractmethod
    def encode(self, codes: Tensor) -> Tensor:
        """Pack signed int8 codes of shape ``(N, K)``; the result's first dimension is N."""

    @abstractmethod
    def decode(self, data: Tensor, k: int) -> Tensor:
        """Unpack to signed int8 codes of shape ``(N, k)``."""

    @abstractmethod
    def check(self, data: Tensor, n: int, k: int) -> None:
        """Raise `FormatError` unless dtype and shape of ``data`` can hold ``(n, k)`` codes."""

    def encode_zero(self, zero: Tensor) -> Tensor:
        """Store an integer zero point; default: as it is. ``(G, N)`` int8 to ``(G, N)`` int8."""
        return zero

    def decode_zero(self, zero: Tensor) -> Tensor:
        """The inverse of `encode_zero`."""
        return zero

    def __repr__(self) -> str:
        return f"<Layout {self.name}>"

    def __eq__(self, other: object) -> bool:
        # A plugin may make a new instance each time it is asked; formats that name it must still be equal.
        return type(other) is type(self) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Callable[[str], Layout], tuple[str]]:
        # A layout is pickled by name, so that a format read back compares equal to the registered one.
        return find_layout, (self.name,)


def _expect(data: Tensor, dtype: torch.dtype, shape: tuple[int, int], layout: str) -> None:
    if data.dtype != dtype or tuple(data.shape) != shape:
        raise FormatError(
            f"data has dtype {data.dtype} and shape {tuple(data.shape)};\n"
            f"layout {layout!r} needs {dtype} and {shape} for this weight."
        )


def _pad_columns(codes: Tensor, multiple: int) -> Tensor:
    missing = -codes.shape[1] % multiple
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes


def pack_nibbles(low: Tensor, high: Tensor) -> Tensor:
    """Two integer tensors into uint8: ``low`` in bits 0-3, ``high`` in bits 4-7. Only their low four bits count."""
    return ((low & 15) | ((high & 15) << 4)).to(torch.uint8)


def unpack_nibbles(data: Tensor) -> tuple[Tensor, Tensor]:
    """The (low, high) nibbles of a uint8 tensor, sign-extended from four bits to int8."""
    signed = data.view(torch.int8)
    return _shifted(signed << 4), _shifted(signed)


def _shifted(signed: Tensor) -> Tensor:
    # On XLA tensors >> of a negative number divides, towards zero; this function shifts, but its result is wider.
    return torch.bitwise_right_shift(signed, 4).to(torch.int8)


def interleave(even: Tensor, odd: Tensor) -> Tensor:
    """``(N, J)`` and ``(N, J)`` to ``(N, 2J)``: columns even[0], odd[0], even[1], ..."""
    return torch.stack((even, odd), dim=-1).flatten(-2)


def has_values(tensor: Tensor) -> bool:
    """Whether the numbers of ``tensor`` can be looked at: not meta, not fake, not under a trace."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or torch.compiler.is_compiling())


class _PlainInt8(Layout):
    name = "plain"
    dtypes = ("int8",)

    def encode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.int8).contiguous()

    def decode(self, data: Tensor, k: int) -> Tensor:
        return data[:, :k]

    def check(self, data: Tensor, n: int, k: int) -> None:
        _expect(data, torch.int8, (n, k), self.name)


class _Plain(Layout):
    """int8: int8 ``(N, K)``. int4: uint8 ``(N, ceil(K/2))``, two's complement, low nibble = even k, pad code 0."""

    name = "plain"
    dtypes = ("int4", "int8")
    _int8 = _PlainInt8()

    def for_dtype(self, dtype: str) -> Layout:
        return self._int8 if dtype == "int8" else super().for_dtype(dtype)

    def encode(self, codes: Tensor) -> Tensor:
        codes = _pad_columns(codes, 2)
        return pack_nibbles(codes[:, 0::2], codes[:, 1::2])

    def decode(self, data: Tensor, k: int) -> Tensor:
        return interleave(*unpack_nibbles(data))[:, :k]

    def check(self, data: Tensor, n: int, k: int) -> None:
        _expect(data, torch.uint8, (n, (k + 1) // 2), self.name)


class _PlainInt32(Layout):
    """int4 only: int32 ``(N, ceil(K/8))``, eight unsigned codes q+8, lowest bits = lowest k, pad code 8."""

    name = "plain_int32"
    dtypes = ("int4",)

    def encode(self, codes: Tensor) -> Tensor:
        unsigned = _pad_columns(codes, 8) + 8
        if not codes.shape[1]:
            return unsigned.to(torch.int32)
        # Little-endian: four bytes of two nibbles each are, bit for bit, one word with the lowest k lowest.
        return pack_nibbles(unsigned[:, 0::2], unsigned[:, 1::2]).contiguous().view(torch.int32)

    def decode(self, data: Tensor, k: int) -> Tensor:
        # Flipping the top bit of each nibble turns offset binary (q + 8) into two's complement.
        return interleave(*unpack_nibbles(data.contiguous().view(torch.uint8) ^ 0x88))[:, :k]

    def check(self, data: Tensor, n: int, k: int) -> None:
        _expect(data, torch.int32, (n, (k + 7) // 8), self.name)

    def encode_zero(self, zero: Tensor) -> Tensor:
        return zero + 8

    def decode_zero(self, zero: Tensor) -> Tensor:
        return zero - 8


PLAIN: Layout = _Plain()
PLAIN_INT32: Layout = _PlainInt32()

_LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (PLAIN, PLAIN_INT32)}

load_plugin_layouts: Callable[[], object] | None = None
"""Set by `qcore.plugins`: an unknown layout name is looked for in installed plugins before it is an error."""


_OWN = (_PlainInt8, _Plain, _PlainInt32)
_OWNERS: dict[str, str] = {}
"""The plugin that registered a layout, by the layout's name."""


class BrokenLayoutError(FormatError):
    """A third party's layout raised, lost codes or gave something else than promised; the text names its plugin."""


class GuardedLayout(Layout):
    """A third party's layout as everybody in qcore calls it: no accident of its code passes, and no wrong result.

    What it raises becomes a `FormatError` that names the layout and its plugin, and so does a result of another kind,
    dtype or shape. What `encode` makes is decoded again and compared, each time: a layout that loses codes would lose
    them in people's checkpoints.
    """

    def __init__(self, layout: Layout, dtype: str) -> None:
        self.layout, self.dtype = layout, dtype
        self.name, self.dtypes = layout.name, (dtype,)

    def for_dtype(self, dtype: str) -> Layout:
        return self if dtype == self.dtype else super().for_dtype(dtype)

    def encode(self, codes: Tensor) -> Tensor:
        data = self._call("encode", codes)
        if not isinstance(data, Tensor) or data.dim() < 1 or data.shape[0] != codes.shape[0]:
            raise self._broken("encode", f"gave {_kind(data)} for codes {tuple(codes.shape)}; its rows must be N")
        if has_values(codes) and not torch.equal(self.decode(data, codes.shape[1]), codes):
            raise self._broken("encode", f"loses {self.dtype} codes of shape {tuple(codes.shape)}: decode gives others")
        return data

    def decode(self, data: Tensor, k: int) -> Tensor:
        if torch.compiler.is_compiling():
            return self.layout.decode(data, k)
        codes: Any = self._call("decode", data, k)
        if not isinstance(codes, Tensor) or codes.dtype != torch.int8 or tuple(codes.shape) != (data.shape[0], k):
            raise self._broken("decode", f"gave {_kind(codes)} instead of int8 codes {(data.shape[0], k)}")
        return codes

    def check(self, data: Tensor, n: int, k: int) -> None:
        self._call("check", data, n, k)

    def encode_zero(self, zero: Tensor) -> Tensor:
        stored: Tensor = self._call("encode_zero", zero)
        if has_values(zero) and not torch.equal(self.decode_zero(stored), zero):
            raise self._broken("encode_zero", "loses zero points: decode_zero gives others")
        return stored

    def decode_zero(self, zero: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.layout.decode_zero(zero)
        found: Any = self._call("decode_zero", zero)
        if not isinstance(found, Tensor) or found.dtype != torch.int8 or found.shape != zero.shape:
            raise self._broken("decode_zero", f"gave {_kind(found)} instead of int8 {tuple(zero.shape)}")
        return found

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.layout, method)(*arguments)
        except (FormatError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            raise self._broken(method, f"raised {type(error).__name__}: {_said(error)}") from error

    def _broken(self, method: str, what: str) -> BrokenLayoutError:
        return BrokenLayoutError(
            f"layout {self.name!r} of {layout_origin(self.layout)} is broken: its {method} {what}.\n"
            f"Upgrade or remove what brought it; weights in qcore's own layouts are not affected."
        )


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _said(error: BaseException, most: int = 200) -> str:
    try:
        return str(error)[:most]
    except Exception:  # noqa: BLE001 - a third party's exception may fail at this, too
        return "(without words)"


def layout_origin(layout: Layout) -> str:
    """Who brought a layout: its plugin, or where it was given directly the class."""
    plugin = _OWNERS.get(layout.name)
    return f"plugin {plugin!r}" if plugin else f"{type(layout).__module__}.{type(layout).__qualname__}"


def registered_layouts() -> dict[str, tuple[Layout, str]]:
    """Every layout that is known so far, by name, with the plugin that brought it (empty: qcore, or nobody said)."""
    return {name: (layout, _OWNERS.get(name, "")) for name, layout in _LAYOUTS.items()}


def _codec(layout: Layout, dtype: str) -> Layout:
    """``layout`` specialised to an element type; a third party's is guarded."""
    if type(layout) in _OWN or torch.compiler.is_compiling():
        return layout.for_dtype(dtype)
    if isinstance(layout, GuardedLayout):
        layout = layout.layout
    guarded = GuardedLayout(layout, dtype)
    found = guarded._call("for_dtype", dtype)  # noqa: SLF001 - of this module
    if not isinstance(found, Layout):
        raise guarded._broken("for_dtype", f"gave {_kind(found)} instead of a Layout")  # noqa: SLF001
    guarded.layout = found
    return guarded


def register_layout(layout: Layout, plugin: str = "") -> None:
    """Make ``layout`` known by its name; ``plugin``: who brings it, for errors.

    Raises `FormatError` for anything but a `Layout`, a bad name, one that another layout holds, or element types that
    qcore does not know.
    """
    if not isinstance(layout, Layout):
        raise FormatError(f"{layout!r} is no layout: subclass qcore.Layout and register an instance of it.")
    name = getattr(layout, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise FormatError(f"layout name {name!r} must be lower-case letters, digits and underscores.")
    dtypes: Any = layout.dtypes
    if not isinstance(dtypes, (tuple, list)) or not dtypes or not all(dtype in tuple(_CODE_RANGE) for dtype in dtypes):
        raise FormatError(f"layout {name!r} holds {dtypes!r}; dtypes is a tuple of {' and '.join(_CODE_RANGE)}.")
    if _LAYOUTS.setdefault(name, layout) != layout:
        raise FormatError(f"layout name {name!r} is taken by {type(_LAYOUTS[name]).__qualname__}; choose another.")
    if plugin:
        _OWNERS.setdefault(name, plugin)


class UnknownLayoutError(FormatError):
    """A layout that neither qcore nor an installed plugin has."""


def find_layout(name: str) -> Layout:
    """The registered layout called ``name``; looks into installed plugins before it raises `FormatError`."""
    if name not in _LAYOUTS and load_plugin_layouts is not None:
        load_plugin_layouts()
    if name not in _LAYOUTS:
        raise UnknownLayoutError(
            f"unknown layout {quoted(name)}; known: {', '.join(sorted(_LAYOUTS))}.{did_you_mean(name, _LAYOUTS)}\n"
            f"A third-party layout needs its plugin installed."
        )
    return _LAYOUTS[name]


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
        if self.dtype not in _CODE_RANGE:
            raise FormatError(
                f"unknown element type {quoted(self.dtype)}; qcore knows {' and '.join(_CODE_RANGE)}."
                f"{did_you_mean(str(self.dtype), _CODE_RANGE)}"
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
        return _CODE_RANGE[self.dtype]

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
