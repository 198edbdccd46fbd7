"""What a checkpoint says about its quantized tensors: the records in the metadata of its files.

======================  =============================================================================================
``qcore``               the version of qcore that wrote the file
``qcore.schema``        the version of these records; a reader refuses a newer one
``qcore.tensors``       JSON: name to ``{"format", "shape", "quantizer", "scheme"}``, for each quantized weight
``qcore.aliases``       JSON: name of a tied tensor or quantized weight to the one that is stored
======================  =============================================================================================

A weight ``encoder.0.weight`` is stored as ``encoder.0.weight.data``, ``.scale`` and, where it has one, ``.zero``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import FormatError
from ..formats import Format, ZeroPoint
from ..qtensor import QTensor
from ..schemes import Scheme
from .header import Part, is_shape, parse_json, problem

SCHEMA = 1
_FIELDS = {"format", "shape", "quantizer", "scheme"}
_UPGRADE = "Upgrade qcore, or write the checkpoint again with this version."
_REWRITE = "The metadata is damaged or was edited: write the checkpoint again with qcore.save."


@dataclass(frozen=True)
class Record:
    """One quantized weight: its name, and what its tensors mean. ``scheme`` carries no calibrated numbers."""

    name: str
    format: Format
    shape: tuple[int, int]
    quantizer: str | None
    scheme: Scheme

    @classmethod
    def of(cls, name: str, weight: QTensor, scheme: Scheme | None = None) -> Record:
        """The record of a quantized tensor."""
        n, k = weight.shape
        wanted = (scheme or Scheme(weight.format)).blank()
        return cls(name, weight.format, (n, k), weight.quantizer, wanted)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names under which its tensors are stored."""
        parts = ("data", "scale") if self.format.zero is ZeroPoint.NONE else ("data", "scale", "zero")
        return tuple(f"{self.name}.{part}" for part in parts)

    def same_weight(self, other: Record) -> bool:
        """Whether two records can be names of one weight."""
        return (self.format, self.shape, self.quantizer) == (other.format, other.shape, other.quantizer)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "format": str(self.format),
            "shape": list(self.shape),
            "quantizer": self.quantizer,
            "scheme": str(self.scheme),
        }

    def check(self, parts: Iterable[Part], path: Path) -> None:
        """Raise `CheckpointError` unless dtypes and shapes of the stored tensors fit the format and logical shape."""
        held = {p.name.rpartition(".")[2]: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parts}
        try:
            QTensor(held["data"], held["scale"], held.get("zero"), self.shape, self.format, self.quantizer)
        except FormatError as error:
            raise problem(path, str(error).replace("\n", " "), _REWRITE, self.name) from None


@dataclass(frozen=True)
class Notes:
    """The metadata of one file. ``version``: of the qcore that wrote it, empty for a foreign file."""

    version: str
    records: dict[str, Record]
    aliases: dict[str, str]


def write_notes(records: Iterable[Record], aliases: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file that holds these weights."""
    tree = {record.name: record.to_json() for record in records}
    notes = {
        "format": "pt",  # transformers refuses a file that does not say which framework wrote it
        "qcore": __version__,
        "qcore.schema": str(SCHEMA),
        "qcore.tensors": json.dumps(tree, separators=(",", ":")),
    }
    return {**notes, "qcore.aliases": json.dumps(dict(aliases), separators=(",", ":"))} if aliases else notes


def read_notes(metadata: Mapping[str, str], path: Path) -> Notes:
    """Read the metadata of a file. Raises `CheckpointError` for what it cannot mean."""
    version = metadata.get("qcore", "")
    if not version and not any(key.startswith("qcore") for key in metadata):
        return Notes("", {}, {})
    schema = metadata.get("qcore.schema", "")
    if not re.fullmatch(r"[1-9][0-9]{0,5}", schema) or not re.fullmatch(r"[0-9A-Za-z.+!-]{1,64}", version):
        raise problem(path, f"its metadata names qcore {version[:64]!r} and schema {schema[:64]!r}.", _REWRITE)
    if int(schema) > SCHEMA:
        raise problem(path, f"written by qcore {version} with schema {schema}; {__version__} reads {SCHEMA}.", _UPGRADE)
    tensors = parse_json(metadata.get("qcore.tensors", "{}").encode(errors="replace"), path, "metadata 'qcore.tensors'")
    aliases = parse_json(metadata.get("qcore.aliases", "{}").encode(errors="replace"), path, "metadata 'qcore.aliases'")
    for name, target in aliases.items():
        if not isinstance(target, str):
            raise problem(path, f"its alias {str(target)[:80]} is no name.", _REWRITE, name)
    return Notes(version, {name: _record(name, value, path) for name, value in tensors.items()}, aliases)


def _record(name: str, value: Any, path: Path) -> Record:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise problem(path, f"its record must hold {', '.join(sorted(_FIELDS))}.", _REWRITE, name)
    shape, quantizer = value["shape"], value["quantizer"]
    if not is_shape(shape) or len(shape) != 2:
        raise problem(path, f"logical shape {str(shape)[:80]} is impossible.", _REWRITE, name)
    if quantizer is not None and not (isinstance(quantizer, str) and re.fullmatch(r"[\w.-]{1,64}", quantizer)):
        raise problem(path, f"quantizer {str(quantizer)[:80]!r} is no name.", _REWRITE, name)
    try:
        format, scheme = Format.parse(value["format"]), Scheme.parse(value["scheme"])
    except FormatError as error:
        raise problem(path, str(error), _UPGRADE, name) from None
    if scheme.weight != format or scheme != scheme.blank():
        raise problem(path, f"scheme {value['scheme']!r} does not go with format {format}.", _REWRITE, name)
    return Record(name, format, (shape[0], shape[1]), quantizer, scheme)
