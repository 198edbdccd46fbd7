"""The fused experts of a model, and the names under which a file stores them individually."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..nn.experts import QuantizedExperts, expert_weights
from .archive import Archive

FUSED = "gate_up_proj"
OLD_BLOCK, _BLOCK = "block_sparse_moe", "mlp"
"""The name of the block of experts and router in files, and its name in transformers 5."""
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("fc1", "fc3", "fc2"))
"""The names of the projections of one expert in models: gate, up and down."""
_MOST_DIGITS = 6

Numbered = dict[str, dict[int, str]]
"""The part of a name after an expert's number (``"w1.weight"``), to the full names by that number."""
Rows = list[list[str]]
"""For each expert the names of its weights, which are joined along their rows."""


@dataclass(frozen=True)
class Experts:
    """A module of fused experts in the model.

    **Fields:** ``name``; ``weights``: the names of its two weights; ``biased``; ``transposed``: a float weight is
    (E, K, N); ``alternating``: rows of gate and up alternate; ``quantized``: the module is already quantized.
    """

    name: str
    weights: tuple[str, ...]
    biased: bool
    transposed: bool
    alternating: bool
    quantized: bool

    @classmethod
    def of(cls, name: str, module: nn.Module) -> Experts | None:
        """Describe ``module``; None if it is another kind of module."""
        if isinstance(module, QuantizedExperts):
            projections = module.projections()
            biased = any(layer.bias is not None for layer in projections.values())
            mixed = not getattr(module.gate, "is_concatenated", True)
            return cls(name, tuple(projections), biased, False, mixed, True)
        weights = expert_weights(module)
        if not weights:
            return None
        biased = any(module._parameters.get(f"{weight}_bias") is not None for weight in weights)  # noqa: SLF001
        transposed = bool(getattr(module, "is_transposed", False))
        return cls(name, weights, biased, transposed, not getattr(module, "is_concatenated", True), False)

    @property
    def block(self) -> str:
        """The name of the module that holds the experts and their router."""
        return self.name.rpartition(".")[0]

    @property
    def old_block(self) -> str:
        """Its alternative name in files, or an empty string."""
        parent, _, last = self.block.rpartition(".")
        return f"{parent}.{OLD_BLOCK}" if parent and last == _BLOCK else ""

    def bases(self) -> Iterator[str]:
        """Yield the names that the module can have in a file."""
        yield self.name
        if self.old_block:
            yield self.old_block + self.name.removeprefix(self.block)

    def spellings(self) -> Iterator[dict[str, tuple[str, ...]]]:
        """Yield the possible names of the parts of each weight."""
        first, second = self.weights
        for gate, up, down in _NAMES:
            yield {first: (gate, up) if first == FUSED else (up,), second: (down,)}


def index_of(archive: Archive, bases: set[str]) -> dict[str, Numbered]:
    """Find the tensors of single experts, in one pass: a file has a hundred thousand names."""
    found: dict[str, Numbered] = {}
    for name in itertools.chain(archive.records, archive.plain_names()):
        base, *rest = name.rsplit(".", 3)
        if base in bases and len(rest) == 3:
            number, part, attribute = rest
            if len(number) <= _MOST_DIGITS and number.isdecimal() and str(int(number)) == number:
                found.setdefault(base, {}).setdefault(f"{part}.{attribute}", {})[int(number)] = name
    return found


def rows_of(found: Numbered, parts: tuple[str, ...], attribute: str) -> Rows:
    """The names of one tensor of each expert, empty unless experts 0, 1, 2, ... all have it."""
    columns = [found.get(f"{part}.{attribute}", {}) for part in parts]
    count = len(columns[0])
    if any(column.keys() != set(range(count)) for column in columns):
        return []
    return [[column[number] for column in columns] for number in range(count)]
