"""Formats of quantized layers in the metadata of a state dict: the tensors alone fit other formats, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import FormatError
from ..formats import Format
from ..weights.schemes import Scheme
from .parts import NOTE, described, place_of

_KEY = "qcore"


def describe(
    notes: dict[str, Any] | None,
    format: Format,
    shape: Sequence[int],
    quantizer: str | None,
    scheme: Scheme,
    *,
    has_order: bool,
) -> None:
    """Add the format, shape, quantizer and scheme of a layer to its metadata, for saving the dict without the model."""
    if notes is not None:
        described = {"format": str(format), "shape": list(shape), "quantizer": quantizer}
        order = {"order": True} if has_order else {}
        notes[_KEY] = {**described, **order, "scheme": str(scheme.blank())}


def check_whole(notes: Mapping[str, Any], layer: Any) -> None:
    """Raise `FormatError` if a whole layer is to take the part of a rank; cut layers check the rank themselves."""
    if notes.get(NOTE) is not None and place_of(layer) is None:
        raise FormatError(
            f"the state dict holds the part of {described(notes[NOTE])} only, and this layer is whole. "
            f"Load the checkpoint that the ranks were cut from."
        )


def check_format(notes: Mapping[str, Any], format: Format, k: int) -> None:
    """Raise `FormatError` if a layer cannot take the weight that its metadata describe; they may be missing.

    Codes of 4 bits have the same dtypes and shapes whatever they stand for.
    """
    described = notes.get(_KEY)
    given = described.get("format") if isinstance(described, Mapping) else None
    if not isinstance(given, str) or given == str(format) or _canonical(given, k) == _canonical(str(format), k):
        return
    raise FormatError(
        f"the state dict has a weight of the format {given[:100]!r}, and this layer {str(format)!r}. Quantize the "
        f"model as that one was, or save it with qcore.save and load it with qcore.load_."
    )


def _canonical(text: str, k: int) -> Format | None:
    """The format, without groups if a row of K columns is one group; None for an unknown format."""
    try:
        format = Format.parse(text)
    except FormatError:
        return None
    size = format.group_size
    return replace(format, group_size=None) if size is not None and size >= k else format
