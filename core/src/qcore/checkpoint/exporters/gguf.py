"""GGUF files, for llama.cpp and transformers: one file with weights, configuration and vocabulary.

A quantized weight is stored in the smallest block type that represents it exactly (see `gguf_blocks`). Of the other
tensors, vectors are stored in float32 and the rest in their own dtype. Names and metadata come from the package gguf; a
source that was GGUF keeps its own.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...formats import PLAIN
from ...runtime.progress import Progress
from ...weights.qtensor import QTensor
from ..gguf_archive import METADATA, Description, describe_gguf
from ..gguf_header import GGUFPairs, GGUFSpec, build_gguf_header, padding, read_gguf_header
from ..header import file_error
from ..importers.base import LayerRefused
from ..importers.gguf import PERMUTED, PLAIN_KINDS, TYPE_NAMES
from ..importers.gguf_blocks import BLOCK_TYPES
from ..model_config import CONFIG, folder_of, read_json
from ..records import Record
from ..staging import replace_atomically
from ..values import as_bytes, storable
from .base import noting_refusal
from .gguf_blocks import block_type, pack
from .gguf_model import Model, describe_model
from .gguf_names import Piece, Target, gguf_package, plan_targets
from .gguf_tokenizer import add_vocabulary

SUFFIX = ".gguf"
_KINDS = {name: kind for kind, name in TYPE_NAMES.items()}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18,
    "MXFP4": 38,
}  # fmt: skip
"""The ``general.file_type`` of a file, by the type of most of its weights."""
_BLOCK_VERSION = 2


@dataclass(frozen=True)
class GGUFSource:
    """The model to write.

    **Fields:** ``path``: of the checkpoint; ``is_gguf``; ``records``: of the quantized weights; ``plain``: dtype and
    shape of other tensors; ``aliases``: tied name to stored name; ``weight``, ``tensor``: read one.
    """

    path: Path
    is_gguf: bool
    records: Mapping[str, Record]
    plain: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    aliases: Mapping[str, str]
    weight: Callable[[str], QTensor]
    tensor: Callable[[str], Tensor]


@dataclass(frozen=True)
class _Planned:
    """A tensor of the file; ``data``: its bytes in pieces, computed when they are written."""

    spec: GGUFSpec
    data: Callable[[], Iterator[Tensor]]


def write_gguf(source: GGUFSource, target: Path, tell: Progress, *, overwrite: bool) -> int:
    """Write a GGUF file atomically. Returns the bytes of its tensors.

    ``tell``: called after each tensor with the bytes written, the total bytes and a name; ``overwrite``: whether there
    may be a file. Raises `CheckpointError` if there is nevertheless, for weights that no block type represents exactly
    and for models that GGUF cannot describe.
    """
    model = _Described.of(source)
    planned = _plan(source, model)
    computed = [_computed(name, tensor) for name, tensor in model.tensors.items()]
    tensors = [*planned, *computed]
    pairs = model.pairs(planned)
    total, done = sum(one.spec.nbytes for one in tensors), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(target, overwrite=overwrite) as file:
        file.write(build_gguf_header(pairs, [one.spec for one in tensors]))
        for one in tensors:
            written = 0
            for piece in one.data():
                found = storable(piece)
                written += file.write(as_bytes(found))
            assert written == one.spec.nbytes, one.spec
            file.write(bytes(padding(written, pairs.alignment)))
            done += written
            tell(done, total, one.spec.name)
    return total


@dataclass(frozen=True)
class _Described:
    """A model, described by its ``config.json`` or by the metadata of its original GGUF file."""

    source: GGUFSource
    arch: str
    layers: int
    heads: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    described: Description | Model

    @classmethod
    def of(cls, source: GGUFSource) -> _Described:
        folder = folder_of(source.path)
        place = source.path if source.is_gguf else folder / METADATA
        if place.is_file():
            found = describe_gguf(place)
            return cls(source, *_sizes(found.metadata, place), found.computed, found)
        config = read_json(folder / CONFIG)
        if not config:
            what = f"it has no {CONFIG} and no {METADATA}, from which a GGUF file takes the description of the model."
            raise file_error(folder, what, "Copy the model's config.json and tokenizer files to it.")
        text = config.get("text_config")
        model = describe_model(text if isinstance(text, dict) and "model_type" in text else config, folder)
        if not model.tied and not {_HEAD} & {*source.records, *source.plain, *source.aliases}:
            raise file_error(source.path, "it has no lm_head, and its config.json does not tie one to the embedding.")
        return cls(source, model.arch, model.layers, model.heads, model.tensors, model)

    def pairs(self, planned: Sequence[_Planned]) -> GGUFPairs:
        """The metadata."""
        if isinstance(self.described, Description):
            return self.described.pairs
        gguf, folder = gguf_package(), folder_of(self.source.path)
        writer = gguf.GGUFWriter(None, self.arch)
        writer.add_name(folder.resolve().name)
        writer.add_quantization_version(_BLOCK_VERSION)
        kinds = Counter(TYPE_NAMES[one.spec.kind] for one in planned if one.spec.kind in TYPE_NAMES)
        writer.add_file_type(_FILE_TYPES[kinds.most_common(1)[0][0]])
        for key, value in self.described.values.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{self.arch}.{key}", value)
        add_vocabulary(writer, folder, self.described.vocabulary)
        return _encoded(writer)


def _sizes(metadata: Mapping[str, Any], path: Path) -> tuple[str, int, dict[str, int]]:
    """Architecture, number of layers, and heads of q and k."""
    arch = metadata.get("general.architecture")
    layers, heads = (metadata.get(f"{arch}.{key}") for key in ("block_count", "attention.head_count"))
    every = metadata.get(f"{arch}.attention.head_count_kv", heads)
    if type(arch) is not str or type(layers) is not int:
        raise file_error(path, "its metadata lacks the architecture or the number of layers.")
    if arch in PERMUTED and (type(heads) is not int or type(every) is not int):
        raise file_error(path, "its metadata lacks the number of attention heads.")
    return arch, layers, {"attn_q": heads, "attn_k": every} if arch in PERMUTED else {}


def _encoded(writer: Any) -> GGUFPairs:
    """The encoded metadata of a `gguf.GGUFWriter`."""
    with tempfile.TemporaryDirectory(prefix="qcore-") as folder:
        file = Path(folder) / METADATA
        try:
            writer.write_header_to_file(file)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        with file.open("rb") as written:
            start, end, count = read_gguf_header(written, file).pairs
            written.seek(start)
            return GGUFPairs(written.read(end - start), count)


def _plan(source: GGUFSource, model: _Described) -> list[_Planned]:
    """Describe all tensors but the computed ones. Raises a `CheckpointError` that names those that are unsupported."""
    tied = source.aliases.get(_HEAD) == _EMBEDDING or source.aliases.get(_EMBEDDING) == _HEAD
    names = [name for name in (*source.records, *source.plain) if not (tied and name == _HEAD)]
    targets, refused = plan_targets(names, model.arch, model.layers, model.heads)
    planned = []
    for target in targets:
        with noting_refusal(target.sources[0], refused):
            planned.append(_Job(source, target).planned())
    if refused:
        lines = "\n".join(f"  {name}: {reason}." for name, reason in refused.items())
        raise CheckpointError(
            f"{source.path}: {len(refused)} of {len(names)} tensors cannot be written as gguf exactly:\n{lines}"
        )
    if not any(one.spec.kind in TYPE_NAMES for one in planned):
        raise file_error(source.path, "none of its quantized weights is part of the model.")
    return planned


@dataclass(frozen=True)
class _Job:
    """Plans one tensor of the file."""

    source: GGUFSource
    target: Target

    def planned(self) -> _Planned:
        """Describe it. Raises `LayerRefused`."""
        quantized = [name in self.source.records for name in self.target.sources]
        if all(quantized):
            return self._blocks()
        if any(quantized):
            raise LayerRefused("some of its experts are quantized and others are not")
        return self._plain()

    def _blocks(self) -> _Planned:
        records = [self.source.records[name] for name in self.target.sources]
        for record in records:
            if record.scheme.activation is not None or record.scheme.output is not None:
                raise LayerRefused(f"its scheme {record.scheme} quantizes activations; GGUF has weights only")
            if not record.name.endswith(".weight") or self.target.shift:
                raise LayerRefused("it is quantized, but not the 'weight' of a linear layer or embedding")
        name = block_type(self._weights)
        shape = self._shape([record.shape for record in records])
        kind = BLOCK_TYPES[name]
        nbytes = math.prod(shape) // kind.columns * kind.nbytes
        return _Planned(
            GGUFSpec(self.target.name, shape, _KINDS[name], nbytes),
            lambda: (self._arranged(pack(weight, name)) for weight in self._weights()),
        )

    def _plain(self) -> _Planned:
        found = [self.source.plain[name] for name in self.target.sources]
        dtypes, shape = {dtype for dtype, _ in found}, self._shape([shape for _, shape in found])
        dtype = dtypes.pop()
        if dtypes or dtype not in _FLOATS:
            raise LayerRefused(f"its dtype is {dtype}; GGUF has float32, float16 and bfloat16")
        # llama.cpp adds and multiplies vectors, and computes routers, in float32.
        if len(shape) == 1 or self.target.name.endswith("ffn_gate_inp.weight"):
            dtype = torch.float32
        nbytes = math.prod(shape) * dtype.itemsize

        def data() -> Iterator[Tensor]:
            for _, piece in sorted(self.target.pieces.items()):
                value = self._half(self.source.tensor(piece.source), piece).to(dtype)
                yield self._arranged(value + self.target.shift if self.target.shift else value)

        return _Planned(GGUFSpec(self.target.name, shape, PLAIN_KINDS[dtype], nbytes), data)

    def _weights(self) -> Iterator[QTensor]:
        """The weights, (N, K) each, in the order of the file."""
        for _, piece in sorted(self.target.pieces.items()):
            weight = self.source.weight(piece.source).convert(PLAIN)
            for one in [weight] if weight.dim() == 2 else (weight[expert] for expert in range(len(weight))):
                rows = one.shape[0] // piece.halves
                yield one if piece.halves == 1 else one.narrow(0, piece.half * rows, rows)

    @staticmethod
    def _half(value: Tensor, piece: Piece) -> Tensor:
        return value if piece.halves == 1 else value.chunk(piece.halves, dim=-2)[piece.half]

    def _shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The shape in the file, from those of its pieces. Raises `LayerRefused`."""
        first, halves = tuple(shapes[0]), self.target.pieces[0].halves
        if any(tuple(shape) != first for shape in shapes):
            raise LayerRefused("its experts have different shapes")
        fused = self.target.stacked and len(first) == 3
        if len(first) > 2 and not fused:
            raise LayerRefused(f"its shape is {first}")
        if self.target.heads and first[0] % (2 * self.target.heads):
            raise LayerRefused(f"its {first[0]} rows do not match {self.target.heads} heads")
        if halves > 1:
            first = (*first[:-2], first[-2] // halves, first[-1])
        return (len(shapes), *first) if self.target.stacked and not fused else first

    def _arranged(self, value: Tensor) -> Tensor:
        """Rows of q and k in llama.cpp's order: it rotates neighbouring rows, transformers the halves of a head."""
        heads = self.target.heads
        if not heads:
            return value
        return value.reshape(heads, 2, value.shape[0] // heads // 2, -1).transpose(1, 2).reshape(value.shape)


def _computed(name: str, tensor: Tensor) -> _Planned:
    return _Planned(
        GGUFSpec(name, tuple(tensor.shape), PLAIN_KINDS[tensor.dtype], tensor.nbytes), lambda: iter([tensor])
    )
