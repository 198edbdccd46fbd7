"""The parts of the ``config.json`` of transformers' models that qcore reads and writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import dtype_name
from ..formats import Format
from ..weights.schemes import Scheme
from .header import MAX_HEADER, file_error, parse_json, readable
from .records import Record

CONFIG = "config.json"


def folder_of(path: Path) -> Path:
    """The directory of a checkpoint, which may be one file in it."""
    return path if path.is_dir() else path.parent


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file. Raises `CheckpointError` for a damaged one."""
    with readable(path):
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            text = file.read(MAX_HEADER + 1)
    if len(text) > MAX_HEADER:
        raise file_error(path, f"it is longer than {MAX_HEADER} bytes.")
    return parse_json(text, path, path.name, constants=True)


def write_config(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any] | None) -> Path:
    """Write ``config.json`` with these settings as its ``quantization_config``, None for none. Returns its path."""
    file = folder / CONFIG
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    text = json.dumps(rest if settings is None else {**rest, "quantization_config": dict(settings)}, indent=2)
    file.write_text(f"{text}\n", encoding="utf-8")
    return file


def model_config(path: Path) -> dict[str, Any]:
    """The configuration of a checkpoint of transformers, empty for any other."""
    found = read_json(folder_of(path) / CONFIG)
    return found if "model_type" in found else {}


def layer_settings(format: Format, scheme: Scheme, scale_dtype: torch.dtype) -> dict[str, str]:
    """The description of one layer in ``quantization_config``."""
    return {"format": str(format), "scheme": str(scheme.blank()), "scale_dtype": dtype_name(scale_dtype)}


def settings_for(weights: Iterable[tuple[Record, torch.dtype]]) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint, for `qcore.hf.QcoreConfig`.

    ``weights``: the record of each quantized weight, and the dtype of its scales.
    """
    layers = {r.name.removesuffix(".weight"): layer_settings(r.format, r.scheme, dtype) for r, dtype in weights}
    return {"quant_method": "qcore", "version": __version__, "scheme": None, "exclude": [], "layers": layers}
