"""ONNX files for onnxruntime: a whole model of transformers with its quantized weights.

torch's exporter traces the model; quantized layers are traced as the operators of `onnx_weights`. The model has to fit
in memory with its quantized weights.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...runtime.progress import Progress
from ..exchanging import exchange, make_alike
from ..header import file_error
from ..loading import load_
from ..staging import appeared_error, clean, new_id, remove, replace_atomically, short_stem, staging
from .onnx_layers import replace_layers
from .onnx_model import Traced, empty_model, traced

SUFFIX = ".onnx"
MODEL_FILE = "model.onnx"
_OPSET = 21
"""The first version with int4 and with blocks in DequantizeLinear."""
_MOST_BYTES = 2**31 - 2**24
"""Limit for a file without external data: a protobuf message must be smaller than 2 GiB."""


def write_onnx(
    source: Path,
    target: Path,
    tell: Progress,
    *,
    is_gguf: bool,
    standard: bool,
    side_files: Mapping[str, Path],
    overwrite: bool,
) -> int:
    """Write a checkpoint's model to a ``.onnx`` file, or to a directory as ``model.onnx`` and ``model.onnx.data``.

    ``standard``: operators of ONNX only; ``side_files``: copied to a directory, by their names there; ``tell``: called
    with steps done, all steps and the current step; ``overwrite``: whether ``target`` may exist. Returns the bytes
    written. Raises `CheckpointError` for models that cannot be built or traced, and for layers that ONNX cannot
    represent, naming them.
    """
    steps = ("loading the weights", "tracing", "writing")
    tell(0, len(steps), steps[0])
    model = empty_model(source, is_gguf=is_gguf)
    load_(model, source, progress=False)
    packed, refused = replace_layers(model, standard=standard)
    if refused:
        lines = "\n".join(f"  {name}: {reason}." for name, reason in refused.items())
        raise CheckpointError(f"{source}: {len(refused)} layers cannot be written as onnx:\n{lines}")
    tell(1, len(steps), steps[1])
    program = _exported(traced(model, source), source)
    _set_int4(program, {f"model.{name}": shape for name, shape in packed.items()})
    tell(2, len(steps), steps[2])
    written = _write(program, target, side_files, overwrite=overwrite)
    tell(3, len(steps), target.name)
    return written


def _exported(what: Traced, source: Path) -> Any:
    """Trace a model. Raises `CheckpointError`."""
    try:
        with torch.no_grad(), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")  # about torch's own code
            return torch.onnx.export(
                what.module, what.arguments, dynamo=True, opset_version=_OPSET, dynamic_shapes=what.axes,
                input_names=list(what.inputs), output_names=list(what.outputs), verbose=False,
            )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        kind = type(getattr(what.module, "model", what.module)).__name__
        hint = "If torch.onnx.export of the float model fails, too, the model's own code must be changed."
        raise file_error(source, f"torch cannot export {kind} to ONNX: {error.__cause__ or error}.", hint) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's warnings about optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _set_int4(program: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Convert initializers that hold two codes per byte to int4 tensors: torch has no such dtype."""
    import onnx_ir  # type: ignore[import-not-found, unused-ignore]

    for name, shape in shapes.items():
        value = program.model.graph.initializers.get(name)
        if value is None:  # tied layers share one, under the name of the first
            continue
        raw = value.const_value.numpy()[: -(-math.prod(shape) // 2)]
        value.const_value = onnx_ir.PackedTensor(raw, onnx_ir.DataType.INT4, shape=onnx_ir.Shape(shape), name=name)
        value.dtype, value.shape = onnx_ir.DataType.INT4, onnx_ir.Shape(shape)


def _write(program: Any, target: Path, side_files: Mapping[str, Path], *, overwrite: bool) -> int:
    if target.suffix == SUFFIX:
        nbytes = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
        if nbytes > _MOST_BYTES:
            raise file_error(target, f"its weights take {nbytes:,} bytes; the limit is 2 GiB.", "Pass a directory.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(target, overwrite=overwrite) as file:
            return file.write(program.model_proto.SerializeToString())
    clean(target.parent, target.name)
    save = new_id()
    with staging(target, save) as stage:
        for name, path in side_files.items():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, stage / name)
        program.save(stage / MODEL_FILE, external_data=True)
        written = sum(path.stat().st_size for path in stage.glob(f"{MODEL_FILE}*"))
        if not overwrite and target.exists():
            raise appeared_error(target)
        _publish(stage, target, save)
    return written


def _publish(stage: Path, target: Path, save: str) -> None:
    """Rename a complete directory into place.

    It is exchanged for the one that it replaces; if that is impossible, that one is moved aside first, and back if the
    rename fails.
    """
    if not target.exists():
        stage.rename(target)
        return
    if make_alike(stage, target) and exchange(stage, target):
        return
    aside = target.with_name(f".{short_stem(target.name)}.{save}.replaced")
    target.rename(aside)
    try:
        stage.rename(target)
    except OSError:
        aside.rename(target)
        raise
    remove(aside)
