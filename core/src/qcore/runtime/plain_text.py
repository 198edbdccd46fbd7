"""Plain-text copies of plugins' values and errors, without trusting their methods."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

_T = TypeVar("_T")

_MAX_LENGTH = 2000
_MAX_ITEMS = 100


def plain(text: str) -> str:
    """A printable copy of at most about 2000 characters, without surrogates and control characters."""
    copy = str.__str__(text)  # bypasses the methods of a subclass
    cut = copy if len(copy) <= _MAX_LENGTH else f"{copy[:_MAX_LENGTH]} ... ({len(copy)} characters)"
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in cut)


def is_a(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Whether a value is an instance of ``kind``; isinstance would also trust its ``__class__``."""
    return kind in type.__dict__["__mro__"].__get__(type(value))


def described(value: object) -> str:
    """``repr(value)``, or the type if that raises."""
    try:
        return plain(repr(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - no exception may escape from here
        return f"a {kind(value)} whose repr raises"


def kind(value: object) -> str:
    """The name of a value's type."""
    # Bypasses a metaclass, which could override __name__.
    return plain(type.__dict__["__name__"].__get__(type(value)))


def of_error(error: BaseException) -> str:
    """An exception as text: its type and message."""
    return f"{kind(error)}: {message(error)}"


def message(error: BaseException) -> str:
    """The message of an exception."""
    try:
        return plain(str(error)).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - as above
        return "(its message is unavailable)"


def value(found: Any, depth: int = 3) -> Any:
    """A plain copy: numbers, text, lists and dicts, each of bounded size; anything else as text."""
    if found is None or type(found) in (bool, float):
        return found
    if is_a(found, int):
        number = int.__int__(found)
        return number if abs(number) < 1 << 64 else f"a number of {number.bit_length()} bits"
    if is_a(found, str):
        return plain(found)
    if depth and type(found) in (list, tuple):
        return [value(item, depth - 1) for item in found[:_MAX_ITEMS]]
    if depth and type(found) is dict:
        return {str(value(key, 0)): value(found[key], depth - 1) for key in list(found)[:_MAX_ITEMS]}
    return _shown(found)


def _shown(found: object) -> str:
    try:
        return plain(str(found))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - as above
        return described(found)
