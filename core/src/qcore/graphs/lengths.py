"""Buckets for dynamic lengths: pad an input to one of a few sizes, so that few programs are compiled."""

from __future__ import annotations


def bucket(length: int, least: int = 16, most: int | None = None) -> int:
    """The size to pad ``length`` to: the next power of two, at least ``least`` and at most ``most``.

    Raises `ValueError` for a length that is not positive, or above ``most``.
    """
    if length < 1 or (most is not None and length > most):
        limit = "" if most is None else f" and at most {most}"
        raise ValueError(f"length is {length}; it must be positive{limit}.")
    size = max(least, 1 << (length - 1).bit_length())
    return size if most is None else min(size, most)
