"""Maps each tensor of a GGUF file to the tensors of a model, by the names in the package gguf.

In GGUF the experts of a layer are one tensor per projection; models have gate and up joined, and checkpoints may store
them separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError
from ..importers.gguf import PERMUTED

_NUMBERED = re.compile(
    r"(?P<layer>model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d{1,6})"
    r"\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_FUSED = re.compile(
    r"(?P<layer>model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<part>gate_up_proj|down_proj)(?:\.weight)?"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_COMPUTED = re.compile(r"(?:.*\.)?rotary_emb\.inv_freq")
"""Buffers in old checkpoints that models compute."""
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor of the model: part ``half`` of ``halves``, or the rows of all experts in it."""

    source: str
    half: int = 0
    halves: int = 1


@dataclass
class Target:
    """A tensor of the file.

    **Fields:** ``name``; ``pieces``: by the number of the expert, 0 for other tensors; ``stacked``: it holds experts;
    ``heads``: number of heads whose rows are permuted, 0 for none; ``shift``: added to its values.
    """

    name: str
    pieces: dict[int, Piece] = field(default_factory=dict)
    stacked: bool = False
    heads: int = 0
    shift: float = 0.0

    @property
    def sources(self) -> list[str]:
        """The tensors of the model, in order."""
        return [self.pieces[number].source for number in sorted(self.pieces)]


def gguf_package() -> Any:
    """The package gguf, which llama.cpp's own converter uses. Raises `CheckpointError` if it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"Writing GGUF needs the package gguf, which cannot be imported: {error}.\nInstall it: "
            f"pip install 'qcore[gguf]'"
        ) from error
    return gguf


def plan_targets(
    names: Iterable[str], arch: str, layers: int, heads: Mapping[str, int]
) -> tuple[list[Target], dict[str, str]]:
    """The tensors of a file, in the order of its layers, and the reasons why others cannot be written, by name.

    ``heads``: the number of heads of ``attn_q`` and ``attn_k``.
    """
    found: dict[str, Target] = {}
    refused: dict[str, str] = {}
    name_of = _names(arch, layers)
    for name in names:
        if _COMPUTED.fullmatch(name):
            continue
        for module, number, piece in _pieces(name):
            target = name_of(module)
            if target is None:
                refused[name] = f"GGUF has no name for it in models of the architecture {arch}"
                continue
            made = found.setdefault(target, Target(target, stacked=".mlp.experts." in module))
            if made.pieces.setdefault(number or 0, piece) is not piece:
                refused[name] = f"{made.pieces[number or 0].source} maps to {target}, too"
            part = target.split(".")[-2]
            made.heads = heads.get(part, 0) if arch in PERMUTED else 0
            made.shift = 1.0 if arch.startswith("gemma") and target.endswith("norm.weight") else 0.0
    for made in found.values():
        if sorted(made.pieces) != list(range(len(made.pieces))):
            refused[made.sources[0]] = f"of its {max(made.pieces) + 1} experts only {len(made.pieces)} are present"
    return sorted(found.values(), key=lambda target: _place(target.name)), refused


def _pieces(name: str) -> Iterator[tuple[str, int | None, Piece]]:
    """For each target of a model's tensor: the tensor's name in gguf's map, the expert, and the part."""
    if match := _NUMBERED.fullmatch(name):
        part = _PARTS.get(match["part"], match["part"])
        yield f"{match['layer']}.mlp.experts.{part}.weight", int(match["expert"]), Piece(name)
    elif match := _FUSED.fullmatch(name):
        halves = _HALVES[match["part"]]
        for place, half in enumerate(halves):
            yield f"{match['layer']}.mlp.experts.{half}.weight", None, Piece(name, place, len(halves))
    else:
        yield name, None, Piece(name)


def _names(arch: str, layers: int) -> Callable[[str], str | None]:
    gguf = gguf_package()
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(known["llama" if arch == "mistral" else arch], layers)

    def name_of(name: str) -> str | None:
        found: str | None = table.get_name(name, try_suffixes=(".weight", ".bias"))
        return found if name.endswith((".weight", ".bias")) else None

    return name_of


def _place(name: str) -> tuple[int, int, str]:
    match = re.match(r"blk\.(\d+)\.", name)
    return (1, int(match[1]), name) if match else (0 if name.startswith("token_embd") else 2, 0, name)
