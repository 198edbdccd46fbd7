"""What others say, as plain text: the answers and errors of plugins, whose own methods may do anything."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

_T = TypeVar("_T")

_LONGEST = 2000
_MOST = 100


def plain(text: str) -> str:
    """Printable text of a sane length: an own copy, without surrogates and control characters."""
    copy = str.__str__(text)  # of a subclass too, whose methods are not asked
    cut = copy if len(copy) <= _LONGEST else f"{copy[:_LONGEST]} ... ({len(copy)} characters)"
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in cut)


def is_a(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Whether a value really is of a class; isinstance also asks its ``__class__``, which may answer anything."""
    return kind in type.__dict__["__mro__"].__get__(type(value))


def described(value: object) -> str:
    """``repr(value)`` where it has one, else its type."""
    try:
        return plain(repr(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - whatever it is, it must not matter
        return f"a {kind(value)} whose repr raises"


def kind(value: object) -> str:
    """The name of a value's type."""
    # Past a metaclass, which may answer anything.
    return plain(type.__dict__["__name__"].__get__(type(value)))


def of_error(error: BaseException) -> str:
    """An exception in words: its type, and what it says where it says anything."""
    return f"{kind(error)}: {message(error)}"


def message(error: BaseException) -> str:
    """What an exception says."""
    try:
        return plain(str(error)).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - as above
        return "(its text cannot be had)"


def value(found: Any, depth: int = 3) -> Any:
    """A plain copy: numbers, text, lists and dicts, each of a sane size; anything else as text."""
    if found is None or type(found) in (bool, float):
        return found
    if is_a(found, int):
        number = int.__int__(found)
        return number if abs(number) < 1 << 64 else f"a number of {number.bit_length()} bits"
    if is_a(found, str):
        return plain(found)
    if depth and type(found) in (list, tuple):
        return [value(item, depth - 1) for item in found[:_MOST]]
    if depth and type(found) is dict:
        return {str(value(key, 0)): value(found[key], depth - 1) for key in list(found)[:_MOST]}
    return _shown(found)


def _shown(found: object) -> str:
    try:
        return plain(str(found))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - as above
        return described(found)
