"""Records about quantized tensors in the metadata of a checkpoint's files.

======================  =============================================================================================
``qcore``               the version of qcore that wrote the file
``qcore.schema``        the version of these records; a reader refuses a newer one
``qcore.tensors``       JSON: name to ``{"format", "shape", "quantizer", "scheme"}``, for each quantized weight, with
                        ``"order": true`` if its columns have an order
``qcore.save``          in a shard: the id of the save that it belongs to; the index contains it, too
``qcore.aliases``       JSON: name of a tied tensor or quantized weight to the one that is stored
======================  =============================================================================================

A weight ``encoder.0.weight`` is stored as ``encoder.0.weight.data``, ``.scale`` and, if it has them, ``.zero``,
``.order`` and ``.global_scale``. E weights of one format, of shape ``(E, N, K)``, are one weight in the file.

Schema 2 adds orders and three dimensions. A file that has neither is written with schema 1, which qcore 26.11 reads.
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
from ..discovery.registry import Guarded
from ..errors import FormatError, quoted
from ..formats import Format, UnknownLayoutError, ZeroPoint
from ..weights.qtensor import WEIGHT_TENSORS, QTensor
from ..weights.schemes import Scheme
from .header import Entry, TensorSpec, file_error, is_shape, parse_json

SCHEMA = 2
SAVE, PART = "qcore.save", "qcore.part"
IMPORT_FIRST = "import qcore.hf, which reads these weights"
"""The name of an empty tensor that transformers without qcore reports as unexpected."""
WRITE_CONFIG = "import qcore.hf, and write config.json with save_pretrained of the quantized model"
"""The same for what `qcore.save` wrote, beside which there may be no description of the weights."""
REMEDIES = (IMPORT_FIRST, WRITE_CONFIG)
CALIBRATED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
"""The names, after the layer's, of the scales and zero points that calibration found for it."""
_FIELDS = {"format", "shape", "quantizer", "scheme"}
_ORDER = "order"
_UPGRADE = "Upgrade qcore, or write the checkpoint again with this version."
_INSTALL = "Install that plugin here, or convert the checkpoint to 'plain' on a machine that has it."
_REWRITE = "The metadata is damaged or was edited: write the checkpoint again with qcore.save."


@dataclass(frozen=True)
class Record:
    """One quantized weight.

    **Fields:** ``name``; ``format``; ``shape``: logical, ``(N, K)`` or ``(E, N, K)``; ``quantizer``; ``scheme``:
    without calibrated values; ``order``: whether its columns have an order.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    quantizer: str | None
    scheme: Scheme
    order: bool = False

    @classmethod
    def of(cls, name: str, weight: QTensor, scheme: Scheme | None = None) -> Record:
        """Return the record of a quantized tensor."""
        wanted = (scheme or Scheme(weight.format)).blank()
        return cls(name, weight.format, tuple(weight.shape), weight.quantizer, wanted, weight.order is not None)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names under which the weight's tensors are stored."""
        return tuple(f"{self.name}.{part}" for part in tensor_parts(self.format, self.order))

    @property
    def parameter(self) -> str:
        """The name of the float weight: that of experts is the parameter itself."""
        return self.name.removesuffix(".weight") if len(self.shape) == 3 else self.name

    @property
    def other_names(self) -> tuple[str, ...]:
        """Names that would belong to the weight if it were float or in another format; a file must not hold them."""
        parts = tensor_parts(self.format, self.order)
        return self.name, *(f"{self.name}.{part}" for part in WEIGHT_TENSORS if part not in parts)

    @property
    def schema(self) -> int:
        """The first version of the records that can describe the weight."""
        return 2 if self.order or len(self.shape) == 3 else 1

    def same_weight(self, other: Record) -> bool:
        """Whether two records can describe one weight with two names."""
        mine = (self.format, self.shape, self.quantizer, self.order)
        return mine == (other.format, other.shape, other.quantizer, other.order)

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the name as plain values for JSON."""
        return {
            "format": str(self.format),
            "shape": list(self.shape),
            "quantizer": self.quantizer,
            "scheme": str(self.scheme),
            **({_ORDER: True} if self.order else {}),
        }

    def check(self, stored: Iterable[TensorSpec | Entry], path: Path) -> None:
        """Raise `CheckpointError` unless dtypes and shapes of the stored tensors match the format and logical shape."""
        held: Any = {p.name.rpartition(".")[2]: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in stored}
        try:
            weight = QTensor.from_tensors(held, self.shape, self.format, self.quantizer)
            _check_as_stored(weight, held)
        except FormatError as error:
            raise file_error(path, str(error).replace("\n", " "), _REWRITE, self.name) from None
        except Guarded as error:  # a third-party layout
            what = f"layout {self.format.layout.name!r} raised {type(error).__name__}: {error}"
            raise file_error(path, what.replace("\n", " "), _REWRITE, self.name) from error


def _check_as_stored(weight: QTensor, held: dict[str, torch.Tensor]) -> None:
    """Raise `FormatError` unless dtypes and shapes are those that qcore writes: `QTensor` accepts some others."""
    for part, tensor in weight.tensors().items():
        stored = held[part]
        if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
            raise FormatError(
                f"{part} has dtype {stored.dtype} and shape {tuple(stored.shape)}; a checkpoint stores it as "
                f"{tensor.dtype} {tuple(tensor.shape)}."
            )


def tensor_parts(format: Format, order: bool) -> tuple[str, ...]:
    """Return the names of a weight's tensors, in the order of `QTensor.tensors`."""
    has = {"zero": format.zero is not ZeroPoint.NONE, "order": order, "global_scale": format.scale.has_global}
    return tuple(part for part in WEIGHT_TENSORS if has.get(part, True))


@dataclass(frozen=True)
class Notes:
    """The metadata of one file.

    **Fields:** ``version``: of the qcore that wrote it, empty for other tools; ``save``: the id of the save that the
    shard belongs to, empty for a single file.
    """

    version: str
    records: dict[str, Record]
    aliases: dict[str, str]
    save: str


def write_notes(
    records: Iterable[Record], aliases: Mapping[str, str], save: str = "", part: str = ""
) -> dict[str, str]:
    """Build the metadata of a file with these weights.

    ``save``: the id of the save that the shard belongs to; ``part``: as in `Aliases`.
    """
    held = list(records)
    tree = {record.name: record.to_json() for record in held}
    notes = {
        "format": "pt",  # transformers refuses a file without the name of a framework
        "qcore": __version__,
        "qcore.schema": str(max((record.schema for record in held), default=1)),
        **({SAVE: save} if save else {}),
        **({PART: part} if part else {}),
        "qcore.tensors": json.dumps(tree, separators=(",", ":")),
    }
    return {**notes, "qcore.aliases": json.dumps(dict(aliases), separators=(",", ":"))} if aliases else notes


def read_notes(metadata: Mapping[str, str], path: Path) -> Notes:
    """Parse the metadata of a file. Raises `CheckpointError` for invalid metadata."""
    version = metadata.get("qcore", "")
    if not version and not any(key.startswith("qcore") for key in metadata):
        return Notes("", {}, {}, "")
    schema = metadata.get("qcore.schema", "")
    if not re.fullmatch(r"[1-9][0-9]{0,5}", schema) or not re.fullmatch(r"[0-9A-Za-z.+!-]{1,64}", version):
        raise file_error(path, f"its metadata names qcore {version[:64]!r} and schema {schema[:64]!r}.", _REWRITE)
    if int(schema) > SCHEMA:
        raise file_error(
            path, f"written by qcore {version} with schema {schema}; {__version__} reads {SCHEMA}.", _UPGRADE
        )
    tensors = parse_json(metadata.get("qcore.tensors", "{}").encode(errors="replace"), path, "metadata 'qcore.tensors'")
    aliases = parse_json(metadata.get("qcore.aliases", "{}").encode(errors="replace"), path, "metadata 'qcore.aliases'")
    for name, target in aliases.items():
        if not isinstance(target, str):
            raise file_error(path, f"its alias {quoted(target)} is not a name.", _REWRITE, name)
    known: dict[Any, _Parsed] = {}
    records = {name: _record(name, value, path, known) for name, value in tensors.items()}
    return Notes(version, records, aliases, metadata.get(SAVE, ""))


_Parsed = tuple[Format, Scheme]


def _record(name: str, value: Any, path: Path, known: dict[Any, _Parsed]) -> Record:
    if not isinstance(value, dict) or value.keys() - {_ORDER} != _FIELDS:
        raise file_error(path, f"its record must hold {', '.join(sorted(_FIELDS))}.", _REWRITE, name)
    shape, quantizer = value["shape"], value["quantizer"]
    if not is_shape(shape) or len(shape) not in (2, 3):
        raise file_error(path, f"logical shape {quoted(shape)} is impossible.", _REWRITE, name)
    if quantizer is not None and not (isinstance(quantizer, str) and re.fullmatch(r"[\w.-]{1,64}", quantizer)):
        raise file_error(path, f"quantizer {quoted(quantizer)} is not a name.", _REWRITE, name)
    format, scheme = _parse_texts(name, value["format"], value["scheme"], path, known)
    order = value.get(_ORDER, False)
    if type(order) is not bool:
        raise file_error(path, f"order is {quoted(order)}; it must be true or omitted.", _REWRITE, name)
    return Record(name, format, tuple(shape), quantizer, scheme, order)


def _parse_texts(name: str, format: Any, scheme: Any, path: Path, known: dict[Any, _Parsed]) -> _Parsed:
    """Parse the format and the scheme of a record, cached: thousands of weights share a few of them."""
    key = (format, scheme) if isinstance(format, str) and isinstance(scheme, str) else None
    if key in known:
        return known[key]
    try:
        found = Format.parse(format), Scheme.parse(scheme)
    except UnknownLayoutError as error:
        raise file_error(path, str(error), _INSTALL, name) from None  # no advice to upgrade: layouts come from plugins
    except FormatError as error:
        raise file_error(path, str(error), _UPGRADE, name) from None
    if found[1].weight != found[0] or found[1] != found[1].blank():
        what = f"scheme {quoted(scheme)} does not match format {found[0]}."
        raise file_error(path, what, _REWRITE, name)
    known[key] = found
    return found
