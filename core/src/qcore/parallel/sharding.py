"""`shard_`: cuts the layers of a model over the ranks of a process group, in place."""

# ruff: noqa: SLF001 - reads the groups of fused layers and the stores of quantized ones

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import QcoreWarning, UnsupportedError, did_you_mean
from ..model.fusing import fuse_children
from ..model.selection import matches
from ..nn.base import QuantizedModule, adopt_hooks
from ..nn.embedding import QuantizedEmbedding
from ..nn.experts import QuantizedExperts
from ..nn.linear import QuantizedLinear
from ..nn.parts import mark_part
from ..nn.siblings import SiblingLinear
from .agreement import disagreements
from .cutting import Cut, check_columns, shares
from .embedding import VocabParallelEmbedding
from .experts import ParallelExperts, shares_of
from .floats import FloatColumnParallelLinear, FloatRowParallelLinear
from .linear import LOCAL, ColumnParallelLinear, RowParallelLinear, check_sums, column_arguments
from .order import fold_order_
from .plans import (
    HEAD_COUNTS,
    KV_COUNTS,
    WIDTHS,
    Attention,
    Mlp,
    bias_of_heads,
    is_tied,
    plan_for,
    structures,
    units_for,
)
from .ranks import AllReduce, Ranks

_LINEAR = (QuantizedLinear, nn.Linear)
_SHOWN = 5


@dataclass(frozen=True)
class _Sums:
    dtype: torch.dtype | None
    scales: str


def shard_(
    model: nn.Module,
    plan: Mapping[str, str | Cut] | None = None,
    group: Any = None,
    *,
    sum_dtype: torch.dtype | None = None,
    scales: str = LOCAL,
    all_reduce: AllReduce | None = None,
) -> dict[str, Cut]:
    """Cut layers over the ranks of ``group``, in place; call it on every rank with the same whole model.

    **Arguments:**

    - ``model``: quantized, with weights; layers that are left float may be cut, too. Layers joined by `qcore.fuse_` are
      joined again after they are cut.
    - ``plan``: patterns of layer names, as for `qcore.quantize_`, to ``"column"``, ``"row"`` or another `Cut`; the
      first pattern that matches a layer counts. Default: `plan_for` the model. In attention modules that are
      recognized, ``"column"`` and ``"row"`` cut whole heads.
    - ``group``: of torch.distributed, or a `DeviceMesh` of one dimension; default all ranks.
    - ``sum_dtype``, ``scales``, ``all_reduce``: of layers that are cut by rows, see `RowParallelLinear`.

    A column-parallel layer returns a share of its features, which the layer behind it must expect: cut them in pairs.
    Numbers of heads that an attention module keeps in attributes (``num_heads`` and the like) become those of the rank.

    Returns the cut of each layer by name. Raises `UnsupportedError`, before anything is changed, for a layer that
    cannot be cut; warns if the ranks choose different kernels.
    """
    ranks, sums = Ranks(group, all_reduce), _Sums(sum_dtype, scales)
    if plan is None:
        chosen = plan_for(model, ranks.size)
    else:
        chosen = _chosen(model, _as_cuts(plan), units_for(model, ranks.size))
    for name, cut in chosen.items():
        _check(name, model.get_submodule(name), cut, ranks, sums)
    if plan is None and not chosen:
        raise UnsupportedError("no attention, MLP or experts were recognized in the model: give shard_ a plan.")
    found = list(structures(model))
    fused = _separate(model, chosen)
    _fold(model, found, chosen)
    _replace(model, chosen, ranks, sums)
    for group_of_names in fused:
        _join_again(model, group_of_names)
    localize(model, found, chosen)
    warn_if_different(model, ranks)
    return chosen


def localize(model: nn.Module, found: Iterable[Attention | Mlp], chosen: Collection[str]) -> None:
    """Make the numbers of heads of the attention modules in ``found`` whose q and k were cut those of this rank."""
    for structure in found:
        if isinstance(structure, Attention) and structure.q in chosen and structure.k in chosen:
            _localize(model.get_submodule(structure.owner), structure, model)


def _as_cuts(plan: Mapping[str, str | Cut]) -> dict[str, Cut]:
    if not isinstance(plan, Mapping):
        raise UnsupportedError(f"the plan is a {type(plan).__name__}; it maps patterns of names to cuts.")
    return {pattern: cut if isinstance(cut, Cut) else Cut(cut) for pattern, cut in plan.items()}


def _chosen(model: nn.Module, rules: Mapping[str, Cut], known: Mapping[str, Cut]) -> dict[str, Cut]:
    """The cut of each layer that a pattern matches."""
    layers = {name: module for name, module in model.named_modules() if _is_layer(module) and name}
    inside = {f"{name}.{child}" for name, m in layers.items() if isinstance(m, QuantizedExperts) for child in _two(m)}
    found: dict[str, Cut] = {}
    used: set[str] = set()
    for name, module in layers.items():
        pattern = next((p for p in rules if matches(name, p)), None)
        if pattern is not None and name not in inside:
            found[name] = _refined(rules[pattern], known.get(name))
        elif isinstance(module, QuantizedExperts):
            pattern = _of_both(name, module, rules)
            found |= {} if pattern is None else {name: Cut("tensor")}
        used |= {p for p in rules if matches(name, p)}
    for pattern in rules:
        if pattern not in used:
            hint = did_you_mean(pattern, layers)
            warnings.warn(f"pattern {pattern!r} matches no layer that can be cut.{hint}", QcoreWarning, stacklevel=4)
    return found


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (QuantizedModule, QuantizedExperts, nn.Linear, nn.Embedding, nn.Conv2d))


def _two(experts: QuantizedExperts) -> list[str]:
    return list(experts.projections())


def _of_both(name: str, experts: QuantizedExperts, rules: Mapping[str, Cut]) -> str | None:
    """The pattern that cuts the projections of experts one by one, ``column`` before the gate and ``row`` after it."""
    kinds, last = [], None
    for child in _two(experts):
        last = next((p for p in rules if matches(f"{name}.{child}", p)), None)
        kinds.append("" if last is None else rules[last].kind)
    if kinds not in (["", ""], ["column", "row"]):
        raise UnsupportedError(
            f"{name}: experts are cut by column before their gate and by row after it, or as a whole."
        )
    return last


def _refined(cut: Cut, known: Cut | None) -> Cut:
    """The cut with the unit of a structure that was recognized, unless it has one."""
    if cut.unit is not None or known is None or known.kind != cut.kind:
        return cut
    return replace(known, parts=max(known.parts, cut.parts))


def _check(name: str, module: Any, cut: Cut, ranks: Ranks, sums: _Sums) -> None:
    """Raise `UnsupportedError`, naming the layer, unless it can be cut."""
    try:
        _check_one(module, cut, ranks.size, sums)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None


def _check_one(module: Any, cut: Cut, size: int, sums: _Sums) -> None:
    if isinstance(module, QuantizedExperts):
        _check_kind(module, cut, ("expert", "tensor"))
        shares_of(module, cut.kind, size, cut.unit or 1)
    elif isinstance(module, QuantizedEmbedding):
        _check_kind(module, cut, ("vocab",))
        shares(module.num_embeddings, size, cut.unit or 1, what="rows")
    elif isinstance(module, _LINEAR):
        _check_kind(module, cut, ("column", "row", "gather"))
        _check_linear(module, cut, size, sums)
    else:
        raise UnsupportedError(f"a {type(module).__name__} cannot be cut.")


def _check_kind(module: nn.Module, cut: Cut, kinds: tuple[str, ...]) -> None:
    if cut.kind not in kinds:
        raise UnsupportedError(f"a {type(module).__name__} is cut by {' or '.join(kinds)}, not by {cut.kind}.")
    done = (ColumnParallelLinear, RowParallelLinear, FloatColumnParallelLinear, FloatRowParallelLinear)
    if isinstance(module, (*done, ParallelExperts, VocabParallelEmbedding)):
        raise UnsupportedError(f"a {type(module).__name__} is cut already: shard_ each layer once.")
    if is_tied(module):
        raise UnsupportedError("the layer shares its weight with another one (tied): leave both whole.")


def _check_linear(module: Any, cut: Cut, size: int, sums: _Sums) -> None:
    unit = cut.unit or 1
    if cut.kind == "row":
        every = shares(module.in_features, size, unit, what="input features")
        if isinstance(module, QuantizedLinear):
            check_sums(module.scheme, every, sums.dtype, sums.scales)
            if not module._store.has_order:
                check_columns(module.scheme.weight, every)
        return
    if module.out_features % cut.parts:
        raise UnsupportedError(f"{module.out_features} output features are not {cut.parts} equal parts.")
    n = module.out_features // cut.parts
    shares(n, size, unit, replicate=cut.replicate, what="output features")


def _separate(model: nn.Module, chosen: Mapping[str, Cut]) -> list[tuple[str, ...]]:
    """Give fused layers that are cut weights of their own; returns the names of each group that was fused."""
    names = {id(module): name for name, module in model.named_modules()}
    groups = []
    for name in chosen:
        module = model.get_submodule(name)
        if isinstance(module, SiblingLinear) and module._group is not None:
            groups.append(tuple(names[id(member)] for member in module._group.members))
            module._group.separate()
    return groups


def _fold(model: nn.Module, found: list[Attention | Mlp], chosen: Mapping[str, Cut]) -> None:
    """Fold the order of an MLP's last layer into those before it, so that it is cut at groups."""
    for mlp in found:
        if not isinstance(mlp, Mlp) or mlp.after not in chosen or not set(mlp.before) <= chosen.keys():
            continue
        last = model.get_submodule(mlp.after)
        before = [model.get_submodule(name) for name in mlp.before]
        halves = any(chosen[name].parts > 1 for name in mlp.before)
        if isinstance(last, QuantizedLinear) and last._store.has_order and not halves:
            fold_order_(before, last)


def _replace(model: nn.Module, chosen: Mapping[str, Cut], ranks: Ranks, sums: _Sums) -> None:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        path, _, child = name.rpartition(".")
        if name:
            places.setdefault(id(module), []).append((model.get_submodule(path), child))
    for name, cut in chosen.items():
        module = model.get_submodule(name)
        made = _cut(module, cut, ranks, sums)
        for parent, child in places[id(module)]:
            setattr(parent, child, made)


def _cut(module: Any, cut: Cut, ranks: Ranks, sums: _Sums) -> nn.Module:
    unit = cut.unit or 1
    if isinstance(module, QuantizedExperts):
        given = {"unit": unit, "sum_dtype": sums.dtype, "ranks": ranks}
        return ParallelExperts.from_experts(module, cut.kind, **given)  # type: ignore[arg-type]
    if isinstance(module, QuantizedEmbedding):
        return VocabParallelEmbedding.from_embedding(module, unit=unit, ranks=ranks)
    quantized = isinstance(module, QuantizedLinear)
    if cut.kind == "row":
        if not quantized:
            return FloatRowParallelLinear(module, unit=unit, sum_dtype=sums.dtype, ranks=ranks)
        made: nn.Module = RowParallelLinear.from_linear(
            module, unit=unit, ranks=ranks, sum_dtype=sums.dtype, scales=sums.scales
        )
        return made
    if not quantized:
        return FloatColumnParallelLinear(module, ranks=ranks, **column_arguments(cut))
    whole: nn.Module = ColumnParallelLinear.from_linear(module, ranks=ranks, **column_arguments(cut))
    return whole


def _join_again(model: nn.Module, names: tuple[str, ...]) -> None:
    layers = {name.rpartition(".")[2]: model.get_submodule(name) for name in names}
    if all(type(layer) is ColumnParallelLinear for layer in layers.values()):
        fuse_children(model.get_submodule(names[0].rpartition(".")[0]), layers)  # type: ignore[arg-type]


def _localize(owner: Any, attention: Attention, model: nn.Module) -> None:
    """Make the numbers of heads that an attention module keeps those of this rank."""
    head = attention.head_dim
    own: Any = [model.get_submodule(name) for name in (attention.q, attention.k)]
    heads, kv_heads = (layer.out_features // head for layer in own)
    before = {
        **dict.fromkeys(HEAD_COUNTS, (attention.heads, heads)),
        **dict.fromkeys(KV_COUNTS, (attention.kv_heads, kv_heads)),
        **dict.fromkeys(WIDTHS, (attention.heads * head, heads * head)),
        "num_key_value_groups": (attention.heads // attention.kv_heads, heads // kv_heads),
    }
    for name, (whole, local) in before.items():
        if vars(owner).get(name) == whole:
            setattr(owner, name, local)
    start, ranks = own[0].share.start // head, own[0].ranks
    for name, parameter in list(owner._parameters.items()):  # one number per head, such as attention sinks
        if parameter is not None and parameter.dim() == 1 and parameter.shape[0] == attention.heads:
            part = parameter.detach()[start : start + heads].clone()
            owner._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            mark_part(owner, ranks.rank, ranks.size)
    for name, child in list(owner.named_children()):
        table = bias_of_heads(child, attention.heads, head)
        if table is not None:
            setattr(owner, name, _of_heads(table, start, heads))
            mark_part(getattr(owner, name), ranks.rank, ranks.size)


def _of_heads(table: Any, start: int, heads: int) -> nn.Embedding:
    """The columns of this rank's heads, as floats: a quantized table of a column per head is no larger than they."""
    quantized = isinstance(table, QuantizedEmbedding)
    whole = table._store.neutral().dequantize(table._dtype) if quantized else table.weight.detach()
    part = whole[:, start : start + heads].clone()
    made = adopt_hooks(nn.Embedding(table.num_embeddings, heads, _weight=part), table)
    made.weight.requires_grad_(not quantized and table.weight.requires_grad)
    return made


def warn_if_different(model: nn.Module, ranks: Ranks) -> None:
    """Warn if the ranks run different kernels."""
    found = disagreements(model, ranks=ranks)
    if found:
        rows = [f"{name}: {', '.join(kernels)}" for name, kernels in found.items()]
        more = f"\nand {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        warnings.warn(
            "the ranks run different kernels, so their results differ by rounding:\n"
            + "\n".join(rows[:_SHOWN])
            + f"{more}\nInstall the same versions on every rank; parts of different sizes may have different kernels.",
            QcoreWarning,
            stacklevel=3,
        )
