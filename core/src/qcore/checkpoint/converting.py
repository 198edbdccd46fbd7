"""`convert`: write a quantized checkpoint of any tool in qcore's format, or in that of another tool.

One weight is in memory at a time: all sizes follow from the headers, so the shards are planned before a value is read.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, QcoreWarning, did_you_mean, dtype_name
from ..formats import FLOAT_SCALES, PLAIN, ScaleType, ZeroPoint
from ..runtime.progress import Progress, ProgressChoice, shown
from ..weights.qtensor import QTensor
from .archive import Archive
from .exporters import EXPORTERS
from .exporters.base import Exporter, Layer, noting_refusal
from .exporters.gguf import SUFFIX as GGUF_SUFFIX
from .exporters.gguf import GGUFSource, write_gguf
from .exporters.onnx import SUFFIX as ONNX_SUFFIX
from .exporters.onnx import write_onnx
from .gguf_archive import METADATA, describe_gguf, description_bytes
from .header import TensorSpec, file_error
from .header import shown as shown_name
from .imported import ImportedArchive
from .importers.base import LayerRefused
from .model_config import CONFIG, folder_of, model_config, read_json, settings_for, write_config
from .opening import open_checkpoint
from .records import CALIBRATED, Record
from .streaming import check_target, side_files_of
from .values import rounded
from .writing import Aliases, Unit, guards, plan_shards, shard_limit, translate_os_errors, write_directory, write_file

OWN, GGUF = "qcore", "gguf"
ONNX = {"onnx": False, "onnx-qdq": True}
"""ONNX targets, and whether each uses operators of the standard only."""
_OTHER_SETTINGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quanto_qmap.json")
"""Side files in which other tools keep settings of the source; they do not describe the target."""

_MOST_LOSS = 0.01
"""The part of the largest scale of a weight that rounding may take without a warning: bfloat16 takes 0.004."""


def target_names() -> list[str]:
    """The names of the formats that `convert` writes."""
    return [OWN, *EXPORTERS, GGUF, *ONNX]


@dataclass(frozen=True)
class Conversion:
    """The outcome of `convert`. ``weights``: names of the quantized weights; ``method``: the importer, or empty."""

    method: str
    to: str
    weights: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str = OWN,
    *,
    dtype: torch.dtype | None = None,
    progress: ProgressChoice = None,
    max_shard_size: int | str | None = "5GB",
    overwrite: bool = False,
) -> Conversion:
    """Write a quantized checkpoint, of qcore or another tool, in the format of a different tool, weight by weight.

    Codes, zero points and scales keep their values: nothing is quantized again.

    **Arguments:**

    - ``source``: a ``.safetensors`` file or a directory that `load_` reads.
    - ``target``: a directory, for qcore also a ``.safetensors`` file, for onnx also a ``.onnx`` file, for gguf a
      ``.gguf`` file; it appears once it is complete. The other files of the source's directory are copied;
      ``quantization_config`` in ``config.json`` is replaced, and omitted for onnx. A GGUF file contains the description
      of the model, from the source's configuration and tokenizer.
    - ``to``: ``"qcore"``, ``"gptq"``, ``"awq"``, ``"compressed-tensors"``, ``"gguf"``, ``"onnx"`` (with operators of
      onnxruntime) or ``"onnx-qdq"`` (with those of the standard only).
    - ``dtype``: float32, bfloat16 or float16: rounds float scales and float tensors to it. Default: unchanged; ONNX is
      in float32.
    - ``progress``: a bar on a terminal (None), a bar anywhere (True), nothing (False), or a function that is called
      with (bytes written, total bytes, name) after each tensor; for ONNX (steps done, all steps, step).
    - ``max_shard_size``: of the files of a directory, in bytes or as a text such as ``"5GB"``; GGUF and ONNX are never
      split.
    - ``overwrite``: replace an existing target; not a directory with files that checkpoints do not have.

    Raises `CheckpointError` for a source that is not quantized, and for layers that the format cannot represent
    exactly, naming them; in that case nothing is left behind.
    """
    source, target = Path(source), Path(os.path.realpath(target))
    _check_form(target, to, dtype)
    limit = shard_limit(max_shard_size)
    single = target.suffix == ".safetensors"
    with translate_os_errors(target):
        check_target(source, target, overwrite=overwrite)
    with open_checkpoint(source) as archive, translate_os_errors(target):
        if not archive.records:
            raise file_error(
                source, "it is not quantized.", "Quantize it: qcore quantize, or qcore.checkpoint.quantize_checkpoint."
            )
        method = archive.method if isinstance(archive, ImportedArchive) else ""
        before = sum(entry.nbytes for entry in archive.entries.values())
        run = _Run(archive, EXPORTERS[to]() if to in EXPORTERS else None, dtype)
        if to == GGUF:
            with shown(progress, "converting", "bytes") as tell:
                written = write_gguf(run.for_gguf(), target, tell, overwrite=overwrite)
            return Conversion(method, to, tuple(archive.records), before, written)
        if to in ONNX:
            written = _to_onnx(source, target, run, to, progress, overwrite=overwrite)
            return Conversion(method, to, tuple(archive.records), before, written)
        units = run.units(to)
        if not single and to == OWN and model_config(source):
            units += guards(units)
        with shown(progress, "converting", "bytes") as tell:
            done = _Counter(units, tell)
            _write(source, target, units, run, done, limit, overwrite=overwrite)
        return Conversion(method, to, tuple(archive.records), before, done.total)


def _check_form(target: Path, to: str, dtype: torch.dtype | None) -> None:
    """Raise `CheckpointError` if format, kind of target and dtype cannot be combined."""
    if to not in target_names():
        hint = did_you_mean(str(to)[:64], target_names())
        raise CheckpointError(f"to is {str(to)[:64]!r}; it must be one of {', '.join(target_names())}.{hint}")
    if dtype is not None and dtype not in FLOAT_SCALES:
        raise CheckpointError(f"dtype is {dtype}; it must be float32, bfloat16 or float16.")
    if to == GGUF and target.suffix != GGUF_SUFFIX:
        name = f"{target.name}{GGUF_SUFFIX}"
        raise file_error(target, "GGUF is written as one file, whose name ends in .gguf.", f"Pass {name!r}.")
    if target.suffix == GGUF_SUFFIX and to != GGUF:
        raise file_error(target, f"it is named like a GGUF file, and to is {to!r}.", "Pass another name, or to='gguf'.")
    if target.suffix == ONNX_SUFFIX and to not in ONNX:
        raise file_error(target, f"to is {to!r}.", "A target that ends in .onnx requires to='onnx' or 'onnx-qdq'.")
    if to in ONNX and dtype not in (None, torch.float32):
        what = f"dtype is {dtype}; ONNX is written in float32, which holds the scales exactly."
        raise CheckpointError(f"{what}\nLeave dtype (--dtype) out.")
    if target.suffix == ".safetensors" and to != OWN:
        raise file_error(target, f"a checkpoint for {to} needs a config.json next to it.", "Pass a directory.")


def _to_onnx(source: Path, target: Path, run: _Run, to: str, progress: ProgressChoice, *, overwrite: bool) -> int:
    """Write ONNX. Returns the bytes written."""
    with tempfile.TemporaryDirectory(prefix="qcore-") as folder, shown(progress, "converting", "steps") as tell:
        files = {} if target.suffix == ONNX_SUFFIX else _side_files(source, Path(folder), None)
        return write_onnx(
            source, target, tell, is_gguf=run.is_gguf, standard=ONNX[to], side_files=files, overwrite=overwrite
        )


def _write(
    source: Path,
    target: Path,
    units: Sequence[Unit],
    run: _Run,
    done: _Counter,
    limit: int | None,
    *,
    overwrite: bool,
) -> None:
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, units, run.aliases, done, overwrite=overwrite)
        return
    with tempfile.TemporaryDirectory(prefix="qcore-") as folder:
        files = _side_files(source, Path(folder), run.settings())
        files |= _gguf_metadata(run.archive, Path(folder))
        shards = plan_shards(units, limit)
        write_directory(target, shards, run.aliases, done, side_files=files, exclusive=True, overwrite=overwrite)


class _Counter:
    """Calls ``progress`` after each unit."""

    def __init__(self, units: Sequence[Unit], tell: Progress) -> None:
        self.total, self.done, self.tell = sum(unit.nbytes for unit in units), 0, tell

    def __call__(self, unit: Unit) -> None:
        self.done += unit.nbytes
        self.tell(self.done, self.total, unit.name)


class _Run:
    """One conversion: the units to write. ``exporter``: None for qcore's own format."""

    def __init__(self, archive: Archive, exporter: Exporter | None, dtype: torch.dtype | None) -> None:
        self.archive, self.exporter, self.dtype = archive, exporter, dtype
        self.warned: set[str] = set()
        weights = set(archive.records)
        if exporter is None:
            tied = {name: record for name, record in archive.records.items() if name in archive.aliases}
            self.aliases = Aliases(archive.aliases, tied)
        else:  # other tools do not support several names for one quantized weight: each layer gets its own copy
            self.aliases = Aliases({n: t for n, t in archive.aliases.items() if n not in weights}, {})

    def units(self, to: str) -> list[Unit]:
        """All tensors, sorted by name. Raises `CheckpointError` for layers that the format cannot represent."""
        archive = self.archive
        if self.exporter is None:
            weights = [self._own(record) for name, record in archive.records.items() if name not in archive.aliases]
        else:
            weights = self._exported(self.exporter, to)
        plain = [self._plain(name) for name in archive.plain_names() if name not in archive.aliases]
        return sorted([*weights, *plain], key=lambda unit: unit.name)

    @property
    def is_gguf(self) -> bool:
        """Whether the source is GGUF."""
        return isinstance(self.archive, ImportedArchive) and self.archive.method == GGUF

    def for_gguf(self) -> GGUFSource:
        """The source of a GGUF file."""
        archive = self.archive
        plain = {name: self._plain(name) for name in archive.plain_names()}
        return GGUFSource(
            archive.path,
            self.is_gguf,
            archive.records,
            {name: (unit.specs[0].dtype, unit.specs[0].shape) for name, unit in plain.items()},
            archive.aliases,
            lambda name: self._read(archive.records[name], self._scale_dtype(archive.records[name])),
            lambda name: plain[name].fetch()[0],
        )

    def settings(self) -> dict[str, object]:
        """The ``quantization_config`` of the target."""
        if self.exporter is None:
            return settings_for((record, self._scale_dtype(record)) for record in self.archive.records.values())
        matrices = [
            name.removesuffix(".weight")
            for name in self.archive.plain_names()
            if name.endswith(".weight") and len(self.archive.entry(name).shape) == 2
        ]
        return self.exporter.settings(sorted(matrices))

    def _plain(self, name: str) -> Unit:
        entry = self.archive.entry(name)
        # float8 tensors and integers are codes or indices, which must keep their dtype.
        wide = entry.dtype in (*FLOAT_SCALES, torch.float64)
        keep = not wide or self.dtype is None or name in self._calibrated
        dtype = entry.dtype if keep or self.dtype is None else self.dtype
        specs = (TensorSpec(name, dtype, entry.shape),)
        return Unit(name, specs, lambda: [rounded(self.archive.read(name), dtype, name)])

    @property
    def _calibrated(self) -> frozenset[str]:
        return frozenset(name for record in self.archive.records.values() for name in _static_names(record))

    def _scale_dtype(self, record: Record) -> torch.dtype:
        stored = self.archive.entries[f"{self.archive.aliases.get(record.name, record.name)}.scale"].dtype
        return self.dtype if self.dtype is not None and record.format.scale is ScaleType.FLOAT else stored

    def _own(self, record: Record) -> Unit:
        scale = self._scale_dtype(record)
        entries = [self.archive.entries[name] for name in record.tensor_names]
        changed = {"scale": scale, **({"zero": scale} if record.format.zero is ZeroPoint.FLOAT else {})}
        specs = [TensorSpec(e.name, changed.get(e.name.rpartition(".")[2], e.dtype), e.shape) for e in entries]
        return Unit(record.name, tuple(specs), lambda: list(self._read(record, scale).tensors().values()), record)

    def _read(self, record: Record, scale: torch.dtype) -> QTensor:
        """The weight with its float scales in another dtype."""
        weight = self.archive.quantized(self.archive.aliases.get(record.name, record.name))
        if weight.scale.dtype == scale:
            return weight
        zero = weight.zero if weight.zero is None or weight.zero.dtype == torch.int8 else weight.zero.to(scale)
        found = weight.scale.to(scale)
        for part, old, new in (("scales", weight.scale, found), ("zero points", weight.zero, zero)):
            if old is not None and new is not None and not bool(torch.isfinite(new.float()).all()):
                what = f"its {part} are not finite in {scale}; the largest is {float(old.abs().max()):g}."
                raise file_error(self.archive.path, what, "Choose another dtype.", record.name)
        if record.name not in self.warned:
            self._warn_of_loss(record.name, weight.scale.float(), found.float())
        return replace(weight, scale=found, zero=zero)

    def _warn_of_loss(self, name: str, exact: Tensor, found: Tensor) -> None:
        """Warn if the largest scales of a weight are too small for their new dtype."""
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        lost = float((found - exact).abs().max()) / largest if largest else 0.0
        if lost > _MOST_LOSS:
            self.warned.add(name)
            what = (
                f"rounding changes the scales of {shown_name(name)!r} by up to {lost:.0%}: the largest is {largest:g}."
            )
            warnings.warn(f"{self.archive.path}: {what}\nChoose another dtype.", QcoreWarning, stacklevel=2)

    def _exported(self, exporter: Exporter, to: str) -> list[Unit]:
        units: list[Unit] = []
        refused: dict[str, str] = {}
        for name, record in self.archive.records.items():
            with noting_refusal(name, refused):
                units.append(self._exported_unit(exporter, record))
        if refused:
            lines = "\n".join(f"  {name}: {reason}." for name, reason in refused.items())
            raise CheckpointError(
                f"{self.archive.path}: {len(refused)} of {len(self.archive.records)} weights cannot be written as {to} "
                f"exactly:\n{lines}\nConvert to another format, or pass a dtype to round scales to it (--dtype fp16)."
            )
        return units

    def _exported_unit(self, exporter: Exporter, record: Record) -> Unit:
        name, _, attribute = record.name.rpartition(".")
        if attribute != "weight" or not name:
            raise LayerRefused("it is not the 'weight' of a named layer")
        read = self._scale_dtype(record)
        written = exporter.add(Layer(name, record, read, lambda: self._zero(record)))
        wanted = exporter.scales or read
        if read != wanted:
            self._check_scales(record, read, wanted)

        def fetch() -> Sequence[Tensor]:
            weight = self._read(record, read)
            return list(written.pack(replace(weight.convert(PLAIN), scale=weight.scale.to(wanted))))

        return Unit(record.name, written.specs, fetch)

    def _zero(self, record: Record) -> Tensor | None:
        """The zero points of a weight; of a file of another tool they are known once the weight is made."""
        if record.format.zero is ZeroPoint.NONE:
            return None
        stored = self.archive.aliases.get(record.name, record.name)
        archive = self.archive
        return archive.read(f"{stored}.zero") if archive.has_plain_bytes else archive.quantized(stored).zero

    def _check_scales(self, record: Record, read: torch.dtype, wanted: torch.dtype) -> None:
        scale = self._read(record, read).scale
        if not torch.equal(scale.to(wanted).to(scale.dtype), scale):
            raise LayerRefused(f"its {dtype_name(read)} scales are not exact in {dtype_name(wanted)}")


def _static_names(record: Record) -> list[str]:
    """Names of the calibrated tensors of a weight's layer, whether or not its scheme uses them."""
    layer = record.name.rpartition(".")[0]
    return [f"{layer}.{kind}" if layer else kind for kind in CALIBRATED]


def _gguf_metadata(archive: Archive, folder: Path) -> dict[str, Path]:
    """The metadata of a GGUF file, as a side file from which GGUF can be written again."""
    if not isinstance(archive, ImportedArchive) or archive.method != GGUF:
        kept = folder_of(archive.path) / METADATA
        return {METADATA: kept} if kept.is_file() else {}
    file = folder / METADATA
    file.write_bytes(description_bytes(describe_gguf(archive.path)))
    return {METADATA: file}


def _side_files(source: Path, folder: Path, settings: Mapping[str, object] | None) -> dict[str, Path]:
    """The other files of the source, and a ``config.json`` with these settings (None: without), in ``folder``."""
    files: Iterator[Path] | Sequence[Path] = side_files_of(source) if source.is_dir() else ()
    found = {str(file.relative_to(source)): file for file in files}
    for name in _OTHER_SETTINGS:
        found.pop(name, None)
    config = read_json(folder_of(source) / CONFIG)
    config.pop("compression_config", None)
    if isinstance(config.get("text_config"), dict):
        for key in ("quantization_config", "compression_config"):
            config["text_config"].pop(key, None)
    return {**found, CONFIG: write_config(folder, config, settings)}
