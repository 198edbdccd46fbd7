"""``tp_plan`` of transformers for quantized layers: each rank reads its part of a weight and runs it by itself.

transformers cuts parameters, as DTensors, by the rules of a plan. A quantized weight is several tensors whose cuts
belong together, and a packed one cannot be cut. So qcore takes the rules for the layers that it quantizes out of the
plan, and applies them itself, as `qcore.parallel.shard_` does; transformers distributes the rest of the model.
"""

# ruff: noqa: SLF001 - attributes that transformers keeps in a model

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from ..checkpoint.archive import Archive
from ..checkpoint.matching import Swap
from ..checkpoint.slices import StoredWeight
from ..errors import UnsupportedError
from ..nn.base import QuantizedModule, adopt_hooks
from ..nn.embedding import QuantizedEmbedding
from ..nn.experts import QuantizedExperts
from ..nn.linear import QuantizedLinear
from ..nn.scaled_embedding import QuantizedScaledEmbedding
from ..parallel.cutting import Cut
from ..parallel.linear import ColumnParallelLinear, RowParallelLinear, column_arguments
from ..parallel.plans import structures, units_for
from ..parallel.ranks import Ranks
from ..parallel.sharding import localize, shard_, warn_if_different
from ..weights.schemes import Scheme

_KINDS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gather",
    "colwise_rep": "gather",
    "packed_colwise": "column",
    "embedding_rowwise": "vocab",
}
_WHOLE = ("rowwise_split_input", "rowwise_rep", "embedding_colwise", "replicate", "replicated_with_grad_allreduce")
"""Styles whose input and output are whole on every rank: the layer stays whole, too."""
_EXPERTS = ("moe_tp_experts",)


class TensorParallel:
    """The rules for the layers of one model that qcore quantizes."""

    def __init__(self, model: Any, size: int) -> None:
        self.model, self.size = model, size
        self.rules: dict[str, str] = {}
        self.cuts: dict[str, Cut] = {}
        self.done: set[str] = set()
        self._found = list(structures(model))
        self._known = units_for(model, size)
        self._ranks: Ranks | None = None

    @classmethod
    def of(cls, model: Any) -> TensorParallel | None:
        """For a model that is loaded with tensor parallelism; None for others. Refuses expert parallelism."""
        config = getattr(model.config, "distributed_config", None)
        if getattr(config, "ep_size", 1) > 1:
            raise UnsupportedError(
                "qcore does not load models under transformers' expert parallelism (ep_size).\n"
                "Use tp_plan, which cuts quantized experts, or load the model and call qcore.parallel.shard_."
            )
        size = getattr(config, "tp_size", 1) or 1
        return cls(model, size) if size > 1 else None

    def take_rules(self, plan: dict[str, str], parameters: Iterable[str]) -> None:
        """Move the rules for the layers of ``parameters`` out of ``plan``. Raises for a rule that cannot be applied."""
        layers = {name.rpartition(".")[0] for name in parameters}
        shared = {replace_layer_number_by_wildcard(layer) for layer in layers}
        # Layers that are left float under a rule that others are quantized under are cut by qcore, too.
        named = self.model.named_modules()
        floats = {
            name for name, m in named if isinstance(m, nn.Linear) and replace_layer_number_by_wildcard(name) in shared
        }
        taken: set[str] = set()
        for layer in sorted(layers | floats):
            generic = replace_layer_number_by_wildcard(layer)
            style = plan.get(layer, plan.get(generic))
            taken |= {key for key in plan if key in (layer, generic) or key.startswith((f"{layer}.", f"{generic}."))}
            if style is not None:
                self._add(layer, style)
        self.rules |= {key: plan.pop(key) for key in taken}
        if taken and not plan:
            plan[min(taken)] = "replicate"  # transformers refuses an empty plan

    def _add(self, layer: str, style: str) -> None:
        if style in _WHOLE:
            return
        if style in _EXPERTS:
            self.cuts[layer] = Cut("tensor")
            return
        if style not in _KINDS:
            raise UnsupportedError(
                f"tp_plan: style {style!r} of {layer!r} is not supported for quantized layers.\n"
                f"Leave the layer float (exclude=...), or load without tp_plan and call qcore.parallel.shard_."
            )
        kind, known = _KINDS[style], self._known.get(layer)
        parts = 2 if style == "packed_colwise" else 1
        if known is not None and known.kind == kind:
            self.cuts[layer] = known
        elif not self._is_tied(layer):
            self.cuts[layer] = Cut(kind, parts=parts)

    def _is_tied(self, layer: str) -> bool:
        ties = getattr(self.model, "all_tied_weights_keys", {})
        return any(f"{layer}.weight" in pair for pair in ties.items())

    @property
    def ranks(self) -> Ranks:
        """The group of transformers' mesh."""
        if self._ranks is None:
            self._ranks = Ranks(self.model._mesh_manager.get_mesh("tp"))
        return self._ranks

    def make(self, archive: Archive, swap: Swap, scheme: Scheme, device: torch.device) -> QuantizedModule | None:
        """This rank's part of a linear layer, of which nothing else is read; None for layers that are cut later."""
        cut, module = self.cuts.get(swap.layer), swap.module
        if cut is None or not isinstance(module, nn.Linear) or swap.owner != swap.record.name:
            return None
        stored: Any = StoredWeight(archive, swap.owner, device)
        given: dict[str, Any] = {"dtype": module.weight.dtype, "ranks": self.ranks}
        bias = module._parameters.get("bias")
        made: QuantizedLinear
        if cut.kind == "row":
            made = RowParallelLinear.from_qtensor(stored, bias, scheme, unit=cut.unit or 1, **given)
        else:
            made = ColumnParallelLinear.from_qtensor(stored, bias, scheme, **column_arguments(cut), **given)
        self.done.add(swap.layer)
        return adopt_hooks(made, module)

    def finish(self) -> None:
        """Cut what was installed whole, and tell attention modules how many heads this rank has."""
        rest = {name: cut for name, cut in self.cuts.items() if name not in self.done and self._fits(name, cut)}
        if rest:
            shard_(self.model, rest, self.ranks.group)
        localize(self.model, self._found, self.done)
        warn_if_different(self.model, self.ranks)
        self.model._tp_plan = {**self.model._tp_plan, **self.rules}

    def _fits(self, name: str, cut: Cut) -> bool:
        """Whether a layer is of the kind that a cut is for, and can be cut: not if it is tied or scaled."""
        module = self.model.get_submodule(name)
        kinds: dict[str, Any] = {"vocab": QuantizedEmbedding, "tensor": QuantizedExperts, "expert": QuantizedExperts}
        tied = isinstance(module, QuantizedModule) and len(module._store.users) > 1
        whole = tied or isinstance(module, QuantizedScaledEmbedding)
        return isinstance(module, kinds.get(cut.kind, (QuantizedLinear, nn.Linear))) and not whole


def check_whole(model: nn.Module) -> None:
    """Raise `UnsupportedError` if a model that is to be saved holds parts of weights."""
    if any(hasattr(module, "ranks") for module in model.modules()):
        raise UnsupportedError(
            "save_pretrained: this rank holds a part of each quantized weight.\n"
            "Keep the directory that the model was loaded from, or save before the model is cut."
        )
