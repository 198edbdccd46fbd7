"""The ``config.json`` of transformers' models, as far as qcore reads and writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._version import __version__
from .header import MAX_HEADER, file_error, parse_json
from .records import Record

CONFIG = "config.json"


def folder_of(path: Path) -> Path:
    """The directory of a checkpoint, which may be one file in it."""
    return path if path.is_dir() else path.parent


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file. Raises `CheckpointError` for a damaged one."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        text = file.read(MAX_HEADER + 1)
    if len(text) > MAX_HEADER:
        raise file_error(path, f"it is longer than {MAX_HEADER} bytes.")
    return parse_json(text, path, path.name)


def model_config(path: Path) -> dict[str, Any]:
    """The configuration of a checkpoint of transformers, empty for any other."""
    found = read_json(folder_of(path) / CONFIG)
    return found if "model_type" in found else {}


def settings_for(records: Iterable[Record]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint with these weights, as `qcore.hf.QcoreConfig` reads it."""
    layers = {
        record.name.removesuffix(".weight"): {"format": str(record.format), "scheme": str(record.scheme)}
        for record in records
    }
    return {"quant_method": "qcore", "version": __version__, "scheme": None, "exclude": [], "layers": layers}
