"""`quantize_checkpoint`: quantize the weights of a checkpoint on disk, one tensor in memory at a time.

All sizes follow from shapes alone, so the shards are planned and their headers written before a value is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, FormatError, QcoreWarning, did_you_mean
from ..formats import FLOAT_SCALES
from ..model.report import EXCLUDED, QUANTIZED, REFUSED, Skipped
from ..model.selection import Choice, Patterns, Selection, matches
from ..nn.grouped_linear import quantize_experts
from ..runtime.progress import Progress, ProgressChoice, shown
from ..weights.parts import parts
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .archive import Archive
from .header import Entry, TensorSpec, file_error
from .header import shown as shown_name
from .imported import ImportedArchive
from .model_config import CONFIG, model_config, settings_for, write_config
from .opening import imported
from .records import Record
from .staging import save_id_of
from .stored_experts import StoredExperts, stored_experts
from .values import rounded
from .writing import Aliases, Unit, guards, plan_shards, shard_limit, translate_os_errors, write_directory, write_file

COPIED = "copied"

_SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WEIGHT_FILES = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", ".pkl"),
    *(".onnx", ".onnx_data", ".data", ".gguf", ".ot", ".tflite"),
}
_WITH_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
_CONV1D = re.compile(r"(^|\.)(c_attn|q_attn|c_proj|c_fc)\.weight$")
"""Models of transformers with transposed linear layers, whose float weights are (K, N), and the names of these."""
_ASSUMED = "taken as (N, K): without the model's config.json, nothing tells it from a Conv1D's (K, N)"
"""Of square weights: the shapes of others say, when they are loaded, whether they fit."""
_SIDE_FILE = re.compile(
    r".*\.(json|jinja|model|tiktoken|spm|bpe|vocab|codes|png|jpe?g|svg|webp|gif|pyc)|(merges|vocab|special_tokens|dict)\.txt"
    r"|(README|LICEN[SC]E|NOTICE|COPYING|CITATION|MODEL_CARD|USE_POLICY|THIRD_PARTY|\w*TERMS).*"
    r"|(modeling|configuration|tokenization|(image_|video_)?processing|feature_extraction)_\w+\.py|\w*generation_utils\.py"
    r"|(quantization|cpp_kernels|handler|zero_to_fp32)\.py|(config|recipe)\.yaml|quant_log\.csv|Modelfile|latest"
    r"|events\.out\.tfevents.*",
    re.IGNORECASE,
)
"""Names of files that checkpoints have beside their weights."""
_HIDDEN = {".gitattributes", ".gitignore", ".cache", ".huggingface", ".locks", ".DS_Store", ".msc", ".mv", ".mdl"}
"""What downloads leave beside a checkpoint."""


@dataclass(frozen=True)
class TensorReport:
    """The outcome for one tensor.

    **Fields:** ``name``; ``shape``; ``action``: ``quantized``, ``copied`` (not a weight that qcore quantizes),
    ``excluded`` (by pattern) or ``refused``; ``reason``: the scheme, or why the tensor is not quantized;
    ``bytes_before``, ``bytes_after``.
    """

    name: str
    shape: tuple[int, ...]
    action: str
    reason: str
    bytes_before: int
    bytes_after: int = 0


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    scheme: str | Scheme | Mapping[str, str | Scheme],
    *,
    include: Patterns | None = None,
    exclude: Patterns = (),
    progress: ProgressChoice = None,
    max_shard_size: int | str | None = "5GB",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> list[TensorReport]:
    """Quantize a float safetensors file or sharded directory into another one, one tensor in memory at a time.

    Every floating-point ``*.weight`` with two dimensions (linear layers, embeddings, ``lm_head``) or four
    (convolutions) is quantized, and so are fused experts. As by `quantize_`, routers of experts and tables of positions
    (``embed_positions``) stay float unless a pattern other than ``*`` names them. Biases, norms and all other tensors
    are copied, and so are the other files of the directory (configuration, tokenizer). The classes of the model's
    layers are unknown here: `load_` dequantizes weights that no layer can use quantized.

    **Arguments:**

    - ``source``, ``target``: a ``.safetensors`` file or a directory; ``target`` appears once it is complete.
    - ``scheme``: e.g. ``"w4a16-g128"``, or a mapping from patterns to schemes; the first pattern that matches decides.
    - ``include``, ``exclude``: patterns of layer or tensor names, as for `quantize_`.
    - ``progress``: a bar on a terminal (None), a bar anywhere (True), nothing (False), or a function that is called
      with (bytes read, total bytes, name) after each tensor.
    - ``max_shard_size``: of the files of a directory, in bytes or as a text such as ``"5GB"``.
    - ``dtype``: of scales and of float tensors that are copied; default unchanged.
    - ``overwrite``: replace an existing target; not a directory with files that checkpoints do not have.

    Returns a report of every tensor. Raises `CheckpointError`, also for a weight with NaN or Inf, naming it; in that
    case nothing is left behind.
    """
    selection = Selection.of(scheme, include, exclude)
    source, target = Path(source), Path(os.path.realpath(target))
    limit = shard_limit(max_shard_size)
    with translate_os_errors(target):
        check_target(source, target, overwrite=overwrite)
    bar = shown(progress, "quantizing", "bytes")
    with Archive.open(source) as archive, translate_os_errors(target), bar as tell:
        _check_float(archive)
        config = model_config(source)
        tied = {*archive.aliases, *archive.aliases.values()}
        experts = stored_experts({n: entry for n, entry in archive.entries.items() if n not in tied}, config)
        plan = _CheckpointPlan(selection.within(archive.entries), experts, dtype)
        plan.warn_about_patterns([*archive.entries, *archive.aliases, *(e.layer for e in experts.values())])
        run = _QuantizeRun(archive, plan, tell, _has_conv1d(config))
        units = [run.unit(archive.entries[name]) for name in archive.entries]
        aliases = _aliases(archive, units)
        if target.suffix == ".safetensors":
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, units, aliases, run.advance, overwrite=overwrite)
        else:
            _into_directory(source, target, plan_shards(units, limit), aliases, run, overwrite=overwrite)
        return run.rows


def _has_conv1d(config: Mapping[str, Any]) -> bool | None:
    """Whether a model of transformers, or a part of it, has transposed linear layers; None without a configuration."""
    if not config:
        return None
    parts = (config, *(value for value in config.values() if isinstance(value, dict)))
    return any(str(part.get("model_type")) in _WITH_CONV1D for part in parts)


def _check_float(archive: Archive) -> None:
    """Raise `CheckpointError` for a checkpoint that is quantized, by qcore or another tool."""
    found = archive if archive.records else imported(archive)
    if found.records:
        tool = f" by {found.method}" if isinstance(found, ImportedArchive) else ""
        remedy = "Quantize the float checkpoint it was created from, or convert it: qcore convert."
        raise file_error(archive.path, f"it is already quantized{tool}.", remedy)


def _aliases(archive: Archive, units: Iterable[Unit]) -> Aliases:
    """Return the aliases of the target: tensors that are tied in the source stay tied, quantized or not."""
    records = {unit.name: unit.record for unit in units if unit.record is not None}
    tied = {n: replace(records[target], name=n) for n, target in archive.aliases.items() if target in records}
    return Aliases(archive.aliases, tied)


class _CheckpointPlan:
    """Decides which tensors are quantized, and with which scheme; ``experts``: by the names of their weights."""

    def __init__(self, selection: Selection, experts: Mapping[str, StoredExperts], dtype: torch.dtype | None) -> None:
        self.selection, self.experts, self.dtype = selection, experts, dtype
        for _, scheme in selection.rules:
            _check_scheme(scheme)
        if dtype is not None and dtype not in FLOAT_SCALES:
            raise FormatError(f"dtype is {dtype}; it must be float32, bfloat16 or float16.")

    def decide(self, entry: Entry, names: Sequence[str]) -> Scheme | Skipped:
        """Return the scheme of a tensor with these names, or why it is not quantized."""
        experts = self.experts.get(entry.name)
        reason = _not_a_weight(entry, is_experts=experts is not None)
        if reason:
            return Skipped(COPIED, reason)
        choice = self._choice(names if experts is None else experts.names)
        if choice.scheme is None:
            return Skipped(EXCLUDED, choice.reason)
        reason = _why_refused(entry, experts)
        return Skipped(REFUSED, reason) if reason else choice.scheme

    def _choice(self, names: Sequence[str]) -> Choice:
        """Patterns match names of layers and of their tensors."""
        return self.selection.choose([*names, *(name.removesuffix(".weight") for name in names)])

    def warn_about_patterns(self, names: Iterable[str]) -> None:
        """Warn about patterns that match no tensor, which are most likely typos."""
        known = list(names)
        for pattern in self.selection.patterns:
            if not any(matches(name, pattern) or matches(name.removesuffix(".weight"), pattern) for name in known):
                hint = did_you_mean(pattern, [name.removesuffix(".weight") for name in known])
                warnings.warn(f"pattern {pattern!r} matches no tensor.{hint}", QcoreWarning, stacklevel=3)

    def copied_dtype(self, entry: Entry) -> torch.dtype:
        """Return the dtype in which a tensor is copied: integers and 8-bit floats keep theirs."""
        return self.dtype if self.dtype is not None and entry.dtype in _SOURCES else entry.dtype


def _check_scheme(scheme: Scheme) -> None:
    if scheme.needs_calibration or scheme.output is not None or getattr(scheme.activation, "per_token", False):
        raise FormatError(
            f"scheme {str(scheme)!r} needs inputs from running the model, which a checkpoint alone cannot provide.\n"
            f"Use qcore.quantize_(model, scheme, calibration=batches) and qcore.save."
        )


def _not_a_weight(entry: Entry, *, is_experts: bool) -> str:
    if not entry.dtype.is_floating_point:
        return f"dtype {str(entry.dtype).removeprefix('torch.')}"
    if is_experts:
        return ""
    if entry.name.rpartition(".")[2] != "weight":
        return "not named *.weight"
    if len(entry.shape) not in (2, 4):
        return f"{len(entry.shape)}-D; linear, embedding and convolution weights have 2 or 4 dimensions"
    return ""


def _why_refused(entry: Entry, experts: StoredExperts | None) -> str:
    if experts is not None and experts.transposed is None:
        return "its sizes do not say which dimension its inputs run along; load the model and call qcore.quantize_"
    if entry.dtype not in _SOURCES:
        return f"{str(entry.dtype).removeprefix('torch.')} values are meaningless without their scales"
    return "" if all(entry.shape) else "it is empty"


def _may_be_conv1d(entry: Entry) -> bool:
    """Whether neither shape nor name excludes a Conv1D; a layer that is the whole model has no name."""
    square = len(entry.shape) == 2 and entry.shape[0] == entry.shape[1]
    return square and (entry.name == "weight" or _CONV1D.search(entry.name) is not None)


class _QuantizeRun:
    """One run of `quantize_checkpoint`: creates the units, collects the report and reports progress."""

    def __init__(self, archive: Archive, plan: _CheckpointPlan, tell: Progress, conv1d: bool | None) -> None:
        self.archive, self.plan, self.tell, self.conv1d = archive, plan, tell, conv1d
        self.rows: list[TensorReport] = []
        self.sizes: dict[str, int] = {}
        self.total = sum(entry.nbytes for entry in archive.entries.values())
        self.done = 0
        self.tied: dict[str, list[str]] = {}
        for name, target in archive.aliases.items():
            self.tied.setdefault(target, []).append(name)

    def unit(self, entry: Entry) -> Unit:
        """Return the unit to write for a tensor, and add the tensor to the report."""
        decided = self.plan.decide(entry, [entry.name, *self.tied.get(entry.name, ())])
        if isinstance(decided, Skipped):
            unit, action, reason = self._copied(entry), decided.state, decided.reason
        else:
            made = self._experts(entry, decided) if entry.name in self.plan.experts else self._quantized(entry, decided)
            unit, action, reason = made, QUANTIZED, str(decided)
            if self.conv1d is None and _may_be_conv1d(entry):
                reason = f"{reason}; {_ASSUMED}"
        self.sizes[unit.name] = entry.nbytes
        self.rows.append(TensorReport(entry.name, entry.shape, action, reason, entry.nbytes, unit.nbytes))
        return unit

    def _copied(self, entry: Entry) -> Unit:
        dtype = self.plan.copied_dtype(entry)
        specs = (TensorSpec(self._written(entry.name), dtype, entry.shape),)
        return Unit(entry.name, specs, lambda: [rounded(self._read(entry), dtype, entry.name)])

    def _written(self, name: str) -> str:
        """The name of a tensor in the new file: biases of experts are called as their layers in `qcore.nn` do."""
        weight = name.removesuffix("_bias")
        entry = self.archive.entries.get(weight) if weight in self.plan.experts and weight != name else None
        quantized = entry is not None and isinstance(self.plan.decide(entry, [weight]), Scheme)
        return f"{weight}.bias" if quantized else name

    def _experts(self, entry: Entry, scheme: Scheme) -> Unit:
        transposed, name = self.plan.experts[entry.name].transposed, f"{entry.name}.weight"
        e, *sizes = entry.shape
        n, k = reversed(sizes) if transposed else sizes
        specs = tuple(
            TensorSpec(f"{name}.{part.name}", part.dtype, (e, *part.shape))
            for part in parts(scheme.weight, n, k, self._scale_dtype(entry))
        )

        def fetch() -> Sequence[Tensor]:
            value = self._read(entry)
            dense = value.transpose(1, 2) if transposed else value
            with self._named(entry.name):
                made = quantize_experts(dense, scheme, entry.name, scale_dtype=self.plan.dtype)
            return list(made.tensors().values())

        return Unit(name, specs, fetch, Record(name, scheme.weight, (e, n, k), scheme.quantizer, scheme.blank()))

    def _scale_dtype(self, entry: Entry) -> torch.dtype:
        return self.plan.dtype or (entry.dtype if entry.dtype in FLOAT_SCALES else torch.float32)

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Have errors say which file they are about."""
        try:
            yield
        except FormatError as error:
            raise CheckpointError(f"{self.archive.shards[name]}: {error}") from error

    def _quantized(self, entry: Entry, scheme: Scheme) -> Unit:
        transposed = self.conv1d and _CONV1D.search(entry.name) is not None and len(entry.shape) == 2
        n, k = entry.shape[::-1] if transposed else (entry.shape[0], math.prod(entry.shape[1:]))
        described = parts(scheme.weight, n, k, self._scale_dtype(entry))
        specs = tuple(TensorSpec(f"{entry.name}.{part.name}", part.dtype, part.shape) for part in described)
        record = Record(entry.name, scheme.weight, (n, k), scheme.quantizer, scheme.blank())

        def fetch() -> Sequence[Tensor]:
            value = self._read(entry)
            dense = value.t().contiguous() if transposed else value
            return list(self._quantize(dense, scheme, entry.name).tensors().values())

        return Unit(entry.name, specs, fetch, record)

    def _read(self, entry: Entry) -> Tensor:
        return self.archive.read(entry.name)

    def _quantize(self, weight: Tensor, scheme: Scheme, name: str) -> QTensor:
        flat = weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)
        with self._named(name):
            return quantize(flat, scheme.weight, scheme.quantizer, scale_dtype=self.plan.dtype, name=name)

    def advance(self, unit: Unit) -> None:
        """Report progress after a unit was written."""
        self.done += self.sizes.get(unit.name, 0)
        self.tell(self.done, self.total, unit.name)


def check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise `CheckpointError` if the target overlaps the source, already exists, or is not a checkpoint to replace."""
    origin = Path(os.path.realpath(source))
    if target == origin or target in origin.parents or (origin.is_dir() and origin in target.parents):
        raise file_error(target, f"it is, contains or is inside the source {source}.", "Choose another target.")
    if not target.exists():
        return
    if not overwrite:
        raise file_error(target, "it already exists.", "Choose another target, or pass overwrite=True (--overwrite).")
    if target.is_dir() != (target.suffix not in (".safetensors", ".gguf", ".onnx")):
        raise file_error(target, "it exists, but one is a file and the other a directory.", "Choose another target.")
    held = {path.suffix for path in target.iterdir()} if target.is_dir() else set()
    if held and not held & {".safetensors", ".onnx"}:
        # A typo in the path must not replace a directory of documents by a checkpoint.
        raise file_error(
            target, "it exists and is not a checkpoint, so it is not overwritten.", "Choose another target."
        )
    other = _other_contents(target) if target.is_dir() else None
    if other is not None:
        what = f"it holds more than one checkpoint ({shown_name(other)}), so it is not overwritten."
        raise file_error(target, what, "Choose another target, or remove it yourself.")
    others = _others_in(target, source) if target.is_dir() else []
    if others:
        shown = ", ".join(map(shown_name, others[:3])) + (" and more" if len(others) > 3 else "")
        what = f"it holds files that are not of a checkpoint ({shown}), so it is not overwritten."
        raise file_error(target, what, "Choose another target, or move them away.")


def _others_in(target: Path, source: Path) -> list[str]:
    """The names of files in a directory that neither a checkpoint nor the new one in its place has."""
    new = {file.relative_to(source) for file in side_files_of(source)} if source.is_dir() else set()
    files = (path.relative_to(target) for path in sorted(target.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [str(file) for file in files if file not in new and not _is_usual(file)]


def _is_usual(file: Path) -> bool:
    """Whether checkpoints have files with this name, relative to their directory, or saves leave them there."""
    usual = file.suffix in _WEIGHT_FILES or _SIDE_FILE.fullmatch(file.name) is not None
    return usual or file.parts[0] in _HIDDEN or save_id_of(Path(file.parts[0])) is not None


def _other_contents(directory: Path) -> str | None:
    """The name of a repository or of further weights in a directory: replacing a checkpoint must not delete them."""
    for folder, folders, files in os.walk(directory):
        place = Path(folder)
        if ".git" in (*folders, *files):
            return str((place / ".git").relative_to(directory))
        weights = next((file for file in files if Path(file).suffix in _WEIGHT_FILES), None)
        if place != directory and weights is not None:
            return str((place / weights).relative_to(directory))
        if place == directory:  # those of a save that is running, or has died, are not the user's
            folders[:] = [name for name in folders if save_id_of(place / name) is None]
    return None


def _into_directory(
    source: Path,
    target: Path,
    shards: Sequence[Sequence[Unit]],
    aliases: Aliases,
    run: _QuantizeRun,
    *,
    overwrite: bool,
) -> None:
    """Write a directory, replacing an existing one; readers find the old checkpoint until the new one is complete."""
    files = side_files_of(source) if source.is_dir() else ()
    side_files = {str(file.relative_to(source)): file for file in files}
    with tempfile.TemporaryDirectory(prefix="qcore-") as scratch:
        config = model_config(source)
        if config:  # transformers has to know that the weights are quantized
            units = [unit for shard in shards for unit in shard]
            shards = [*shards[:-1], [*shards[-1], *guards(units)]]
            weights = [(unit.record, _scale_dtype(unit)) for unit in units if unit.record]
            side_files[CONFIG] = write_config(Path(scratch), config, settings_for(weights))
        write_directory(
            target, shards, aliases, run.advance, side_files=side_files, exclusive=True, overwrite=overwrite
        )


def _scale_dtype(unit: Unit) -> torch.dtype:
    """The dtype of the scales of a quantized weight."""
    return next(spec.dtype for spec in unit.specs if spec.name.endswith(".scale"))


def side_files_of(directory: Path) -> Iterator[Path]:
    """Yield the files of a directory that are neither weights nor hidden: configuration, tokenizer and the like."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from side_files_of(path)
        elif path.is_file() and path.suffix not in _WEIGHT_FILES and not path.name.endswith(".index.json"):
            yield path
