"""Stored tensors under the names that a model of transformers has for them.

transformers renames tensors of many architectures while it loads: files of multimodal models have
``language_model.model.layers.0...``, for example, where the model has ``model.language_model.layers.0...``, and files
of a model with a head have a prefix that the base model lacks. Its own table of renames is used here, for the tensors
of a quantized weight as for a float one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .archive import Archive

_WEIGHT = ".weight"

Rename = Callable[[str], str]


def renamed(archive: Archive, model: nn.Module) -> Archive:
    """The archive under the model's names; itself if the model is not one of transformers, or has the file's names."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        return archive
    names = _Names(model)
    changed = names.changes(archive)
    return replace(archive.with_names(changed), metadata=names.described(archive.metadata)) if changed else archive


class _Names:
    """The names in one model."""

    def __init__(self, model: Any) -> None:
        self.rename = _table(model)
        self.prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
        places = (model.named_modules, model.named_parameters, model.named_buffers)
        self.known = {name for place in places for name, _ in place(remove_duplicate=False)}

    def changes(self, archive: Archive) -> dict[str, str]:
        """The names of stored tensors and quantized weights that change, and their new ones."""
        owners = {part: record.name for record in archive.records.values() for part in record.tensor_names}
        # Sorted, because some renames of transformers apply only if another name came before.
        weights = {name: self._found(name) for name in sorted(archive.records)}
        found = dict(weights)
        for name in sorted({*archive.entries, *archive.aliases} - weights.keys()):
            owner = owners.get(name)
            found[name] = self._found(name) if owner is None else weights[owner] + name.removeprefix(owner)
        taken = {name for name, new in found.items() if name == new}
        changed = {}
        for name, new in found.items():
            if new not in taken:  # of two names for one tensor the second stays, so that a load lists it
                changed[name] = new
                taken.add(new)
        return changed

    def described(self, metadata: Mapping[str, str]) -> dict[str, str]:
        """Texts about tensors, which may have the names of the file or those of a model, under the latter."""
        return {**{self._found(name): text for name, text in metadata.items()}, **metadata}

    def _found(self, name: str) -> str:
        """The name in the model that goes deepest into its modules; the given one if no other goes deeper."""
        others = [other for other in self._candidates(name) if other != name]
        return max((name, *others), key=self._depth) if others else name

    def _candidates(self, name: str) -> Iterator[str]:
        new = self.rename(name)
        if new == name:  # some renames are for weights only, whose parts have other names
            start, weight, rest = name.partition(f"{_WEIGHT}.")
            layer, _, attribute = (start, weight, f"weight.{rest}") if weight else name.rpartition(".")
            own = self.rename(f"{layer}{_WEIGHT}")
            new = f"{own.removesuffix(_WEIGHT)}.{attribute}" if own.endswith(_WEIGHT) else name
        yield from (new, new.removeprefix(self.prefix))
        longer = f"{self.prefix}{new}"
        if self._depth(longer) > self.prefix.count("."):
            yield longer

    def _depth(self, name: str) -> int:
        """The number of leading parts of a name that the model has."""
        depth, end = 0, name.find(".")
        while (name if end < 0 else name[:end]) in self.known:
            depth += 1
            if end < 0:
                break
            end = name.find(".", end + 1)
        return depth


def _table(model: Any) -> Rename:
    """The renames of transformers for a model, as one function."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # a version without this table
        return lambda name: name
    steps = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]

    def rename(name: str) -> str:
        for step in steps:
            name, _ = step.rename_source_key(name)
        return name

    return rename
