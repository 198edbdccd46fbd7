"""Open a checkpoint of any tool: qcore's own, float, or another tool's through its importer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import QcoreWarning, dtype_name, quoted
from ..nn.parts import described, place_in
from .archive import Archive
from .gguf_archive import gguf_file_of, open_gguf
from .header import Entry, file_error, readable, shown
from .imported import ImportedArchive
from .importers.base import Plan, Source, tensor_name
from .importers.configured_shapes import TEXT_CONFIGS
from .importers.registered import importer_names, plan_import
from .model_config import CONFIG, folder_of, read_json
from .records import PART
from .renaming import renamed
from .values import FLOAT_CODES

_OWN = "qcore"
_MLX, _WORDS = torch.uint32, torch.int32
_SHARD = re.compile(r"-[0-9]+-of-([0-9]{1,9})\.safetensors$")
_INTEGER_CODES = (torch.uint8, torch.int8, torch.int16, torch.int32)
_SETTINGS, _MOST_MODELS = ("quantization_config", "compression_config"), 32
_CODES = ("weight", "qweight", "weight_packed", "W_q", "_data")
"""The last parts of the names under which tools store codes."""


@contextmanager
def open_checkpoint(path: Path, model: nn.Module | None = None, *, any_part: bool = False) -> Iterator[Archive]:
    """Open a checkpoint as an `Archive`. Raises `CheckpointError`, also for a tool that no importer supports.

    ``model``: the one to be loaded, whose names the tensors get where transformers renames them. ``any_part``: also
    open what one rank of several has saved, which is otherwise for the same rank of a model that is cut already.
    """
    with readable(path):
        gguf = gguf_file_of(path)
    if gguf is not None:
        with ExitStack() as stack:
            with readable(gguf):
                opened = open_gguf(gguf, stack)
            yield opened
        return
    with Archive.open(path) as stored:
        if not any_part:
            _check_part(stored, model)
        archive = stored if model is None else renamed(stored, model)
        yield archive if archive.records else imported(archive)


def _check_part(archive: Archive, model: nn.Module | None) -> None:
    """Raise if the file holds one rank's part of a model, unless ``model`` is cut and this is that rank."""
    given, place = archive.metadata.get(PART, ""), None if model is None else place_in(model)
    if not given or (place is not None and given == described(place)):
        return
    what = f"it holds the part of {quoted(given)} of a model that qcore.parallel has cut"
    wanted = ", and this model is whole." if place is None else f", and this is {described(place)}."
    remedy = "Load the whole checkpoint, then shard_; or save and load one file per rank, on as many ranks."
    raise file_error(archive.path, what + wanted, remedy)


def imported(archive: Archive) -> Archive:
    """The tensors of another tool's checkpoint, or ``archive`` itself if it is not quantized.

    Raises `CheckpointError` for a tool that no importer supports.
    """
    config = read_json(folder_of(archive.path) / CONFIG)
    settings = _settings(config)
    source = Source(archive.path, config, settings, archive.entries, archive.metadata, archive.read)
    found = plan_import(source)
    if found is not None:
        _refuse_codes(archive, found[1])
        _refuse_one_shard(archive, found[1])
        _warn(archive.path, found[1])
        return ImportedArchive.of(archive, *found)
    if source.method and source.method != _OWN:
        what = f"its quantization_config names {source.method[:64]!r}, which qcore does not read."
        raise file_error(archive.path, what, f"It reads: qcore, {', '.join(importer_names())}.")
    _refuse_unnamed(source)
    return archive


def _refuse_one_shard(archive: Archive, plan: Plan) -> None:
    """Raise if layers may not be read because the rest of them is in other files."""
    number = _SHARD.search(archive.path.name) if archive.path.is_file() else None
    if plan.refused and number is not None and int(number[1]) > 1:
        layer, reason = next(iter(plan.refused.items()))
        what = f"it is one of several files of a checkpoint, and {quoted(layer)} cannot be read from it: {reason}."
        raise file_error(archive.path, what, "Pass the directory, if the rest of the layer is in another file.")


def _refuse_unnamed(source: Source) -> None:
    """Raise for codes of a tool that no settings name: a model would miss their weights."""
    if source.method:
        return
    for layer in source.layers("weight", "scales"):
        if source.entries[tensor_name(layer, "weight")].dtype != _MLX:
            continue
        what = f"it is quantized by MLX ({shown(layer)!r} has codes in words of uint32), which qcore does not read."
        raise file_error(source.path, what, f"It reads: qcore, {', '.join(importer_names())}.")
    for layer in source.layers("qweight", "scales"):
        if source.entries[tensor_name(layer, "qweight")].dtype != _WORDS:
            continue
        what = f"{shown(layer)!r} has codes as GPTQ and AWQ store them, but its config.json names no tool."
        remedy = 'Put the config.json of the checkpoint beside it: its quantization_config has a "quant_method".'
        raise file_error(source.path, what, remedy)


def _refuse_codes(archive: Archive, plan: Plan) -> None:
    """Refuse codes that the plan does not use, whose scales are missing: a model would take them for weights."""
    if plan.refused:  # with reasons that say more
        return
    used = plan.used
    left = [entry for name, entry in archive.entries.items() if name not in used]
    codes = [entry for entry in left if _is_code(entry, every=not plan.weights)]
    reason = "and belongs to no weight in a layout that qcore reads"
    plan.refused = {entry.name: f"it is {dtype_name(entry.dtype)} {reason}" for entry in codes}


def _is_code(entry: Entry, *, every: bool) -> bool:
    """Whether a tensor holds codes, by its dtype and name; ``every``: any integer matrix does, except causal masks."""
    if entry.dtype in FLOAT_CODES:
        return True
    last = entry.name.rpartition(".")[2]
    named = last in _CODES or last.endswith(("_qdata", "_blocks"))
    unnamed = every and entry.shape[:2] != (1, 1)  # masks in old files of GPT-2 are uint8 (1, 1, L, L)
    return entry.dtype in _INTEGER_CODES and len(entry.shape) > 1 and (unnamed or named)


def _warn(path: Path, plan: Plan) -> None:
    """Warn about differences between qcore and the tool, once per reason."""
    for reason in dict.fromkeys(plan.notes.values()):
        layers = [layer for layer, note in plan.notes.items() if note == reason]
        first = f"{shown(layers[0])!r}" + (f" and {len(layers) - 1} other layers" if len(layers) > 1 else "")
        warnings.warn(f"{path}: {first}: {reason}.", QcoreWarning, stacklevel=2)


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``quantization_config`` of a model, or of the text model in a model of several modalities."""
    places: list[Any] = [config]
    for place in places:  # the configuration itself, then those of text in it, then theirs
        inner = (place.get(name) for name in TEXT_CONFIGS if isinstance(place, dict))
        places += [one for one in inner if isinstance(one, dict)][: _MOST_MODELS - len(places)]
    found = (place.get(key) for place in places for key in _SETTINGS)
    return next((settings for settings in found if settings and isinstance(settings, dict)), {})
