"""`load`: a checkpoint of any tool as a pytree of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from qcore import FormatError
from qcore.plugin_api import Archive, open_checkpoint

from .weights import PackedWeight, array_of, pack

T = TypeVar("T")
TABLES = ("*embed*", "*wte*", "*wpe*", "*emb.weight", "*shared.weight")
"""Patterns of the names that embedding tables usually have."""


def load(
    path: str | PathLike[str],
    *,
    only: str | Iterable[str] = "*",
    tables: str | Iterable[str] = TABLES,
    groups: Mapping[str, int] | None = None,
    platform: str = "",
    plan: Mapping[str, str] | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
) -> dict[str, PackedWeight | jax.Array]:
    """Read a checkpoint into arrays on JAX's first device: quantized weights packed, other tensors as they are.

    **Arguments:**

    - ``path``: a file or directory of qcore, transformers, GPTQ, AWQ, compressed-tensors, a GGUF file...: of what
      `qcore.load_` reads. Files of float weights are read as well.
    - ``only``: patterns (``"model.layers.0.*"``) of the tensors to read.
    - ``tables``: patterns of quantized weights that `qcore_xla.embedding` looks up; all others are packed for products.
    - ``groups``: patterns of convolutions with channel groups, and their number.
    - ``platform``, ``mesh``, ``axis``: see `qcore_xla.pack`.
    - ``plan``: patterns of linear layers to ``"column"`` or ``"row"``: cut over the mesh.

    **Returns** a dictionary by the names in the checkpoint, which is a pytree: `PackedWeight` for quantized weights,
    `jax.Array` for the rest. A tied weight is packed once for lookups and once for products. Numbers of 64 bits get 32.

    Raises `CheckpointError` for a file that cannot be read, `OverflowError` for an integer that does not fit 32 bits,
    `FormatError` with the name of a weight that cannot be packed so, and for a pattern that matches no tensor.
    """
    wanted, table = _patterns(only), _patterns(tables)
    with open_checkpoint(Path(path)) as archive:
        names = dict.fromkeys([*archive.records, *archive.plain_names()])
        usual = {"tables": table} if tables is not TABLES else {}
        for what, patterns in {"only": wanted, **usual, "groups": groups or (), "plan": plan or ()}.items():
            _check_patterns(what, patterns, names, of=archive.path)
        found: dict[str, Any] = {}
        for name in _unique(archive.records, wanted):
            cut = _first(name, plan or {}, "")
            options = {"groups": _first(name, groups or {}, 1), "platform": platform, "mesh": mesh, "axis": axis}
            found[name] = _packed(archive, name, table=_any(name, table), cut=cut, **options)
        for name in _unique(archive.plain_names(), wanted):
            found[name] = array_of(archive.read(name))
    return found


def _first(name: str, rules: Mapping[str, T], default: T) -> T:
    return next((value for pattern, value in rules.items() if fnmatchcase(name, pattern)), default)


def _packed(archive: Archive, name: str, **options: Any) -> PackedWeight:
    try:
        return pack(archive.quantized(name), archive.scheme(name), **options)
    except FormatError as error:
        raise FormatError(f"{archive.path}: {name}: {error}") from error


def _patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check_patterns(what: str, patterns: Iterable[str], names: Iterable[str], *, of: Path) -> None:
    """Raises `FormatError` for a pattern that matches none of the names: most likely a typo."""
    known = list(names)
    for pattern in patterns:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in known):
            close = get_close_matches(pattern, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise FormatError(f"{of}: the pattern {pattern!r} of {what} matches no tensor.{hint}")


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unique(names: Iterable[str], wanted: tuple[str, ...]) -> Iterator[str]:
    yield from (name for name in dict.fromkeys(names) if _any(name, wanted))
