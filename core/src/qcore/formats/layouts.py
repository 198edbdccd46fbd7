"""Layouts, which convert the codes of a weight to one tensor and back: the built-in ones and those of plugins.

`PLAIN` and `PLAIN_INT32` are built in; plugins add more through the hook ``qcore_formats``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, did_you_mean, dtype_name, message_of, quoted
from .bits import has_values, pack_columns, pad_columns, unpack_columns
from .elements import Element, find_element, registered_elements


class Layout(ABC):
    """Converts the codes of one weight to one tensor, and back.

    To add one, subclass this, set ``name`` and ``dtypes``, and return an instance from ``qcore_formats``.
    ``decode(encode(codes), k)`` must equal ``codes`` bit for bit, on every device, and both must work on ``meta``.
    """

    name: str
    """The name of the layout after the slash of a format: lower case, digits, underscores."""
    dtypes: tuple[str, ...] = ("int4",)
    """The element types it can hold."""

    def for_dtype(self, dtype: str) -> Layout:
        """The layout for ``dtype``; raises `FormatError` if there is none."""
        if dtype not in self.dtypes:
            raise FormatError(
                f"layout {self.name!r} cannot hold {dtype} codes; it holds {', '.join(self.dtypes)}.\n"
                f"Use layout 'plain', which holds every element type."
            )
        return self

    @abstractmethod
    def encode(self, codes: Tensor) -> Tensor:
        """Pack codes ``(N, K)``, int8 of integer elements or uint8 of tables; the result's first dimension is N."""

    @abstractmethod
    def decode(self, data: Tensor, k: int) -> Tensor:
        """Unpack to codes of shape ``(N, k)``: int8 for integer elements, uint8 for tables."""

    @abstractmethod
    def check(self, data: Tensor, n: int, k: int) -> None:
        """Raise `FormatError` unless dtype and shape of ``data`` can hold ``(n, k)`` codes."""

    def encode_zero(self, zero: Tensor) -> Tensor:
        """Encode an integer zero point, ``(G, N)`` int8 to ``(G, N)`` int8; default: unchanged."""
        return zero

    def decode_zero(self, zero: Tensor) -> Tensor:
        """The inverse of `encode_zero`."""
        return zero

    def __repr__(self) -> str:
        return f"<Layout {self.name}>"

    def __eq__(self, other: object) -> bool:
        # A plugin may create a new instance at each call of its hook; formats that name it must still be equal.
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


_NIBBLE = 4


class _PlainBytes(Layout):
    """One code per byte: int8 ``(N, K)`` for integers, uint8 for tables."""

    name = "plain"

    def __init__(self, element: Element) -> None:
        self.dtypes, self.stored = (element.name,), element.code_dtype

    def for_dtype(self, dtype: str) -> Layout:
        return self if dtype in self.dtypes else PLAIN.for_dtype(dtype)

    def encode(self, codes: Tensor) -> Tensor:
        return codes.to(self.stored).contiguous()

    def decode(self, data: Tensor, k: int) -> Tensor:
        return data[:, :k]

    def check(self, data: Tensor, n: int, k: int) -> None:
        _expect(data, self.stored, (n, k), self.name)


class _PlainNibbles(Layout):
    """Two codes per byte: uint8 ``(N, ceil(K/2))``, low nibble = even k, pad code 0; integers in two's complement."""

    name = "plain"

    def __init__(self, element: Element) -> None:
        self.dtypes = (element.name,)
        self.signed = element.is_integer

    def for_dtype(self, dtype: str) -> Layout:
        return self if dtype in self.dtypes else PLAIN.for_dtype(dtype)

    def encode(self, codes: Tensor) -> Tensor:
        return pack_columns(pad_columns(codes, 2))

    def decode(self, data: Tensor, k: int) -> Tensor:
        return unpack_columns(data, signed=self.signed)[:, :k]

    def check(self, data: Tensor, n: int, k: int) -> None:
        _expect(data, torch.uint8, (n, (k + 1) // 2), self.name)


class _Plain(Layout):
    """Every element type: codes of up to four bits as nibbles, others as bytes.

    ``for_dtype`` gives the codec of an element; called directly, the layout packs int4.
    """

    name = "plain"

    @property
    def dtypes(self) -> tuple[str, ...]:  # type: ignore[override]  # every element, also those registered later
        return tuple(registered_elements())

    def for_dtype(self, dtype: str) -> Layout:
        return _plain_codec(dtype)

    def encode(self, codes: Tensor) -> Tensor:
        return _plain_codec("int4").encode(codes)

    def decode(self, data: Tensor, k: int) -> Tensor:
        return _plain_codec("int4").decode(data, k)

    def check(self, data: Tensor, n: int, k: int) -> None:
        _plain_codec("int4").check(data, n, k)


_PLAIN_CODECS: dict[str, Layout] = {}


def _plain_codec(dtype: str) -> Layout:
    # A plain dictionary, which Dynamo can trace; elements are never replaced.
    if dtype not in _PLAIN_CODECS:
        element = find_element(dtype)
        _PLAIN_CODECS[dtype] = (_PlainNibbles if element.container_bits == _NIBBLE else _PlainBytes)(element)
    return _PLAIN_CODECS[dtype]


for _built_in in registered_elements():
    _plain_codec(_built_in)


class _PlainInt32(Layout):
    """int4 only: int32 ``(N, ceil(K/8))``, eight unsigned codes q+8, lowest bits = lowest k, pad code 8."""

    name = "plain_int32"
    dtypes = ("int4",)

    def encode(self, codes: Tensor) -> Tensor:
        unsigned = pad_columns(codes, 8) + 8
        if not codes.shape[1]:
            return unsigned.to(torch.int32)
        # Little-endian: four bytes of two nibbles each are, bit for bit, one word with the lowest k lowest.
        return pack_columns(unsigned).contiguous().view(torch.int32)

    def decode(self, data: Tensor, k: int) -> Tensor:
        # Flipping the top bit of each nibble turns offset binary (q + 8) into two's complement.
        return unpack_columns(data.contiguous().view(torch.uint8) ^ 0x88, signed=True)[:, :k]

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
"""Set by the plugin registry: looks for an unknown name in installed plugins before it raises an error."""


_OWN = (_PlainBytes, _PlainNibbles, _Plain, _PlainInt32)
_OWNERS: dict[str, str] = {}
"""The plugin that registered a layout, by the layout's name."""


class BrokenLayoutError(FormatError):
    """A third party's layout raised, lost codes or returned an invalid value; the message names its plugin."""


class GuardedLayout(Layout):
    """Wraps a third party's layout, so that neither its exceptions nor its wrong results reach the rest of qcore.

    Its exceptions become a `FormatError` that names the layout and its plugin, and so does a result of another type,
    dtype or shape. The result of every `encode` is decoded and compared, because a layout that loses codes would lose
    them in users' checkpoints.
    """

    def __init__(self, layout: Layout, dtype: str) -> None:
        self.layout, self.dtype = layout, dtype
        self.name, self.dtypes = layout.name, (dtype,)

    def for_dtype(self, dtype: str) -> Layout:
        return self if dtype == self.dtype else super().for_dtype(dtype)

    def encode(self, codes: Tensor) -> Tensor:
        data = self._call("encode", codes)
        if not isinstance(data, Tensor) or data.dim() < 1 or data.shape[0] != codes.shape[0]:
            raise self._broken("encode", f"returned {_kind(data)} for codes {tuple(codes.shape)}; its rows must be N")
        if has_values(codes) and not torch.equal(self.decode(data, codes.shape[1]), codes):
            lost = f"loses {self.dtype} codes of shape {tuple(codes.shape)}: decode returns others"
            raise self._broken("encode", lost)
        return data

    def decode(self, data: Tensor, k: int) -> Tensor:
        if torch.compiler.is_compiling():
            return self.layout.decode(data, k)
        codes: Any = self._call("decode", data, k)
        dtype = find_element(self.dtype).code_dtype
        if not isinstance(codes, Tensor) or codes.dtype != dtype or tuple(codes.shape) != (data.shape[0], k):
            kind = dtype_name(dtype)
            raise self._broken("decode", f"returned {_kind(codes)} instead of {kind} codes {(data.shape[0], k)}")
        return codes

    def check(self, data: Tensor, n: int, k: int) -> None:
        self._call("check", data, n, k)

    def encode_zero(self, zero: Tensor) -> Tensor:
        stored: Tensor = self._call("encode_zero", zero)
        if has_values(zero) and not torch.equal(self.decode_zero(stored), zero):
            raise self._broken("encode_zero", "loses zero points: decode_zero returns others")
        return stored

    def decode_zero(self, zero: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.layout.decode_zero(zero)
        found: Any = self._call("decode_zero", zero)
        if not isinstance(found, Tensor) or found.dtype != torch.int8 or found.shape != zero.shape:
            raise self._broken("decode_zero", f"returned {_kind(found)} instead of int8 {tuple(zero.shape)}")
        return found

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.layout, method)(*arguments)
        except (FormatError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            raise self._broken(method, f"raised {type(error).__name__}: {message_of(error)[:200]}") from error

    def _broken(self, method: str, what: str) -> BrokenLayoutError:
        return BrokenLayoutError(
            f"layout {self.name!r} of {layout_origin(self.layout)} is broken: its {method} {what}.\n"
            f"Upgrade or remove the package that provides it; weights in qcore's own layouts are not affected."
        )


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def layout_origin(layout: Layout) -> str:
    """The origin of a layout: its plugin, or its class if it was passed directly."""
    plugin = _OWNERS.get(layout.name)
    return f"plugin {plugin!r}" if plugin else f"{type(layout).__module__}.{type(layout).__qualname__}"


def registered_layouts() -> dict[str, tuple[Layout, str]]:
    """Every layout registered so far, by name, with the plugin that provides it (empty: qcore, or unknown)."""
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
        raise guarded._broken("for_dtype", f"returned {_kind(found)} instead of a Layout")  # noqa: SLF001
    guarded.layout = found
    return guarded


def register_layout(layout: Layout, plugin: str = "") -> None:
    """Register ``layout`` under its name; ``plugin``: the plugin that provides it, for errors.

    Raises `FormatError` for anything but a `Layout`, for an invalid name, for a name that another layout has, and for
    unknown element types.
    """
    if not isinstance(layout, Layout):
        raise FormatError(f"{layout!r} is not a layout: subclass qcore.Layout and register an instance of it.")
    name = getattr(layout, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise FormatError(f"layout name {name!r} must be lower-case letters, digits and underscores.")
    dtypes: Any = layout.dtypes
    if not isinstance(dtypes, (tuple, list)) or not dtypes or not all(isinstance(dtype, str) for dtype in dtypes):
        raise FormatError(f"layout {name!r} has dtypes={dtypes!r}; it must be a tuple of element names, such as int4.")
    for dtype in dtypes:
        find_element(dtype)
    if _LAYOUTS.setdefault(name, layout) != layout:
        raise FormatError(f"layout name {name!r} is taken by {_holder(name)}; choose another.")
    if plugin:
        _OWNERS.setdefault(name, plugin)


def _holder(name: str) -> str:
    owner = f" of plugin {_OWNERS[name]!r}" if name in _OWNERS else ""
    return f"{type(_LAYOUTS[name]).__qualname__}{owner}"


def forget_layouts(names: Iterable[str], plugin: str) -> None:
    """Unregister layouts of a plugin whose registration failed."""
    for name in names:
        if _OWNERS.get(name) == plugin:
            del _LAYOUTS[name], _OWNERS[name]


class UnknownLayoutError(FormatError):
    """A layout that neither qcore nor any installed plugin provides."""


def find_layout(name: str) -> Layout:
    """The registered layout called ``name``; loads installed plugins before it raises `FormatError`."""
    if name not in _LAYOUTS and load_plugin_layouts is not None:
        load_plugin_layouts()
    if name not in _LAYOUTS:
        raise UnknownLayoutError(
            f"unknown layout {quoted(name)}; known: {', '.join(sorted(_LAYOUTS))}.{did_you_mean(name, _LAYOUTS)}\n"
            f"A third-party layout needs its plugin installed."
        )
    return _LAYOUTS[name]
