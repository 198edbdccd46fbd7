"""Choices of kernels measured on this machine, stored in qcore's cache directory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from qcore.plugin_api import read_record, write_record

from .description import Description
from .native import folders

_KIND = "vulkan-kernels"

T = TypeVar("T")


def keep(description: Description, problem: Any, kernel: Any) -> bool:
    """Store the kernel for a problem (both dataclasses) and for those of about as many rows; whether that worked."""
    written = write_record(_KIND, _key(description, problem), kernel=repr(kernel))
    recall.cache_clear()
    return written


def first(description: Description, problem: Any, kernels: Iterable[T]) -> T | None:
    """Of ``kernels``, which support the problem, the stored one, else the first one."""
    wanted = recall(_key(description, problem))
    if wanted is None:
        return next(iter(kernels), None)
    found = list(kernels)
    return next((kernel for kernel in found if repr(kernel) == wanted), found[0] if found else None)


@lru_cache(maxsize=4096)
def recall(key: str) -> str | None:
    """The ``repr`` of the kernel stored under a key."""
    record = read_record(_KIND, key) or {}
    kernel = record.get("kernel")
    return kernel if isinstance(kernel, str) else None


def _key(description: Description, problem: Any) -> str:
    """Row counts share a choice up to the next power of two."""
    rows = replace(problem, m=1 << (problem.m - 1).bit_length())
    return f"{description.name} {description.driver_uuid} {_version()} {rows!r}"


@lru_cache(maxsize=1)
def _version() -> str:
    """A hash of the sources of kernels: measurements of other versions are ignored."""
    digest = hashlib.sha256()
    for folder in folders():
        for path in sorted([*folder.glob("steps/*.py"), *folder.glob("spirv/*.spv")]):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
