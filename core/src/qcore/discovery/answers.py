"""Validates the return values of plugin hooks once, on entry, and copies them into core's own types.

A plugin's objects are not read again later, except that kernels pack, unpack and run: an attribute may raise, change
between reads, or block forever. Call these functions inside a guard; invalid values raise `StepError`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from ..formats import Element
from ..runtime import plain_text
from ..runtime.guard import StepError
from ..runtime.plain_text import is_a
from ..weights.qtensor import QTensor
from ..weights.registered_quantizers import Quantizer
from .kernels import FALLBACK, NATIVE, Available, Kernel, Offer, Refusal, Unavailable

_MOST = 1000
"""Limit on the offers or layouts read from one plugin: an iterator may be infinite."""

_TIER = FALLBACK
_named: dict[int, tuple[weakref.ref[Kernel], str, str]] = {}

_T = TypeVar("_T")


def probed(answer: Any) -> Available | Unavailable:
    """Validate the return value of ``qcore_probe``."""
    if is_a(answer, Available):
        return _available(answer)
    if is_a(answer, Unavailable):
        reason = _text("its probe's reason", answer.reason)
        if reason:
            return Unavailable(reason, _flag("its probe's 'broken'", answer.broken))
    raise StepError(f"its probe returned {plain_text.described(answer)} instead of Available or Unavailable(reason).")


def _available(answer: Available) -> Available:
    details = answer.details
    if details is not None and not isinstance(details, Mapping):
        raise StepError(f"its probe's details are {plain_text.described(details)}; they must be a mapping.")
    pairs = _listed((details or {}).items(), "its probe's details")
    found = {_text("a key of its probe's details", key): plain_text.value(value) for key, value in pairs}
    return Available(_text("its probe's device", answer.device), _text("its probe's driver", answer.driver), found)


def offered(hook: str, answer: Any) -> Refusal | list[Offer]:
    """Validate the return value of a contract's hook: a refusal with a reason, or offers."""
    if is_a(answer, Refusal):
        reason = _text("the reason of its Refusal", answer.reason)
        if reason:
            return Refusal(reason)
    is_sequence = is_a(answer, list) or is_a(answer, tuple)
    answers = _listed(answer, hook) if is_sequence else [answer]
    if not answers or not all(_is_offer(each) for each in answers):
        raise StepError(f"{hook} returned {plain_text.described(answer)}, not an Offer(kernel) or Refusal(reason)")
    return [_offer(each) for each in answers]


def _is_offer(answer: Any) -> bool:
    if not is_a(answer, Offer) or not is_a(answer.kernel, Kernel):  # type: ignore[type-abstract]
        return False
    return is_a(getattr(answer.kernel, "name", None), str)


def _offer(answer: Any) -> Offer:
    kernel, note = answer.kernel, answer.note
    name_of(kernel)
    return Offer(kernel, _rank(answer.rank), "" if note is None else _text("the note of its Offer", note))


def _rank(rank: object) -> int:
    if not is_a(rank, int) or is_a(rank, bool):
        raise StepError(f"the rank of its Offer is {plain_text.described(rank)}; it must be a Rank, plus a small int.")
    plain = int.__int__(rank)
    if not -_TIER // 2 <= plain < NATIVE + _TIER // 2:
        shown = str(plain) if abs(plain) < 1 << 64 else "out of range"
        raise StepError(f"the rank of its Offer is {shown}; it must be a Rank, plus or minus less than {_TIER // 2}.")
    return plain


def name_of(kernel: Kernel) -> str:
    """The name of a kernel, cached at the first read."""
    return _identity(kernel)[0]


def packing_of(kernel: Kernel) -> str:
    """The packing of a kernel, cached at the first read."""
    return _identity(kernel)[1]


def _identity(kernel: Kernel) -> tuple[str, str]:
    known = _named.get(id(kernel))
    if known is None or known[0]() is not kernel:
        name, packing = _text("the name of its kernel", kernel.name), _text("the packing of its kernel", kernel.packing)
        if not name or not packing:
            raise StepError("its kernel has an empty name or packing.")
        here = id(kernel)
        known = _named[here] = (weakref.ref(kernel, lambda _: _named.pop(here, None)), name, packing)
    return known[1:]


def packed(answer: object) -> dict[str, Tensor]:
    """Validate the return value of `Kernel.pack`."""
    if not isinstance(answer, Mapping):
        raise StepError(f"pack returned {plain_text.kind(answer)} instead of a dict of tensors")
    found = {}
    for key, value in _listed(answer.items(), "pack"):
        name = _text("a name in the result of pack", key)
        if not name.replace("_", "a").isalnum():
            raise StepError(f"pack named a tensor {name!r}; names consist of letters, digits and underscores")
        if not is_a(value, Tensor):
            raise StepError(f"pack returned {name}={plain_text.described(value)}, which is not a tensor")
        found[name] = value
    return found


def unpacked(answer: object) -> QTensor:
    """Validate the return value of `Kernel.unpack`."""
    if not is_a(answer, QTensor):
        raise StepError(f"unpack returned {plain_text.described(answer)} instead of a QTensor")
    return answer


def size(answer: object) -> int:
    """Validate the return value of `Kernel.nbytes`."""
    if not is_a(answer, int) or not 0 <= (plain := int.__int__(answer)) < 1 << 62:
        raise StepError(f"nbytes returned {plain_text.described(answer)}, which is not a number of bytes")
    return plain


def result(answer: object) -> Tensor:
    """Validate the result of a kernel call."""
    if not is_a(answer, Tensor):
        raise StepError(f"it returned {plain_text.described(answer)} instead of a tensor")
    return answer


def layouts(answers: Iterable[Any]) -> list[Any]:
    """The layouts from a plugin's ``qcore_formats`` implementations; pluggy collects their results in a list."""
    return [layout for answer in answers for layout in _listed(answer, "qcore_formats")]


def elements(answers: Iterable[Any]) -> list[Element]:
    """The elements in the answers of a plugin's ``qcore_elements``, as plain copies."""
    found = [each for answer in answers for each in _listed(answer, "qcore_elements")]
    for each in found:
        if not is_a(each, Element):
            raise StepError(f"qcore_elements returned {plain_text.described(each)}, which is not a qcore.Element")
    return [Element(each.name, each.bits, each.values) for each in found]


def quantizers(answers: Iterable[Any]) -> list[Quantizer]:
    """The quantizers in the answers of a plugin's ``qcore_quantizers``, as plain copies."""
    found = [each for answer in answers for each in _listed(answer, "qcore_quantizers")]
    for each in found:
        if not is_a(each, Quantizer):
            raise StepError(f"qcore_quantizers returned {plain_text.described(each)}, which is not a qcore Quantizer")
    return [Quantizer(q.name, q.function, q.zeros, q.elements, q.needs_moments) for q in found]


def _listed(answers: Iterable[_T], what: str) -> list[_T]:
    found = list(itertools.islice(answers, _MOST + 1))
    if len(found) > _MOST:
        raise StepError(f"{what} returned over {_MOST} items")
    return found


def _text(what: str, value: object) -> str:
    if not is_a(value, str):
        raise StepError(f"{what} is {plain_text.described(value)}; it must be text.")
    return plain_text.plain(value)


def _flag(what: str, value: object) -> bool:
    if not is_a(value, bool):
        raise StepError(f"{what} is {plain_text.described(value)}; it must be True or False.")
    return value
