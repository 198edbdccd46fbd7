"""`plan_for`: which layers of a model are cut, and how, by the names that models of transformers and others use."""

# ruff: noqa: SLF001 - asks the stores of quantized layers

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..formats import Format
from ..nn.base import QuantizedModule
from ..nn.embedding import QuantizedEmbedding
from ..nn.experts import QuantizedExperts
from ..nn.linear import QuantizedLinear
from ..nn.siblings import SiblingLinear
from .cutting import Cut, check_columns, shares

ATTENTION: tuple[tuple[tuple[str, str, str], tuple[str, ...]], ...] = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense")),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    (("query_proj", "key_proj", "value_proj"), ("out_proj", "dense")),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("to_q", "to_k", "to_v"), ("to_out.0", "to_out")),
    (("wq", "wk", "wv"), ("wo",)),
    (("q", "k", "v"), ("o",)),
)
"""Queries, keys and values under one module, and the names that the output projection may have there."""

MLP: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("intermediate.dense",), "output.dense"),
)
"""Layers whose results are combined element by element, and the layer that reads them."""

_HEAD_SIZE = ("head_dim", "attention_head_size", "head_size", "dim_per_head", "key_value_proj_dim", "d_head")
HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "n_local_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads")
WIDTHS = ("inner_dim", "all_head_size", "embed_dim")
_FINE = 32
"""Groups of at least this are no slower than whole ones in every kernel of qcore, so an even cut may make them."""


@dataclass(frozen=True)
class Attention:
    """An attention module that was recognized: full names of its layers, and its heads.

    **Fields:** ``owner``: the module that holds q and the numbers of heads; ``q``, ``k``, ``v``, ``o``; ``heads``,
    ``kv_heads``, ``head_dim``; ``format``: that o is cut in, None if it can be cut anywhere; ``alone``: whether the
    owner has nothing else that is made for all heads, so that cutting these four layers is enough.
    """

    owner: str
    q: str
    k: str
    v: str
    o: str
    heads: int
    kv_heads: int
    head_dim: int
    format: Format | None
    alone: bool = True

    def cuts(self, size: int) -> dict[str, Cut]:
        """The cuts over ``size`` ranks; empty if whole heads cannot be shared out, or leave groups too fine."""
        group = self.heads // self.kv_heads * self.head_dim
        if self.kv_heads >= size:  # a key head and its queries stay on one rank
            wide, narrow, replicate = group, self.head_dim, False
        elif size % self.kv_heads == 0 and self.heads % size == 0:
            wide, narrow, replicate = self.head_dim, self.head_dim, True
        else:
            return {}
        if not _fits(self.format, self.heads * self.head_dim, size, wide):
            return {}
        kv = Cut("column", narrow, replicate)
        return {self.q: Cut("column", wide), self.k: kv, self.v: kv, self.o: Cut("row", wide)}


@dataclass(frozen=True)
class Mlp:
    """An MLP that was recognized: full names of its layers; ``hidden``: features between them; ``format``: of after.

    ``alone``: whether nothing between its layers needs all hidden features.
    """

    before: tuple[str, ...]
    after: str
    hidden: int
    format: Format | None
    alone: bool = True

    def cuts(self, size: int) -> dict[str, Cut]:
        """The cuts over ``size`` ranks; empty if there are too few features or groups."""
        unit = _unit(self.hidden, None if self.format is None else self.format.group_size, size)
        if not _fits(self.format, self.hidden, size, unit):
            return {}
        parts = 2 if self.before[0].endswith("gate_up_proj") else 1
        return {**dict.fromkeys(self.before, Cut("column", unit, parts=parts)), self.after: Cut("row", unit)}


def plan_for(model: nn.Module, size: int) -> dict[str, Cut]:
    """The cut of each layer of ``model`` over ``size`` ranks, for the structures that qcore knows.

    Attention by whole heads (keys and values are replicated if there are fewer than ranks), MLPs by hidden features,
    fused experts by expert, or by tensor if they are fewer than the ranks. Other layers are left whole: embeddings,
    ``lm_head``, attention whose heads cannot be shared out or are normalized together, attention and MLPs with more
    weights of all heads or hidden features (a gate, a norm for each head), layers that share a weight with others
    (tied), and those whose groups would be too fine.
    """
    return units_for(model, size, alone=True)


def units_for(model: nn.Module, size: int, *, alone: bool = False) -> dict[str, Cut]:
    """As `plan_for`, also where more than the layers themselves has to be cut, which a plan of the model's own may do.

    ``alone``: only where it has not.
    """
    plan: dict[str, Cut] = {}
    for found in structures(model):
        if not alone or (found.alone and not any(is_tied(model.get_submodule(name)) for name in _names_of(found))):
            plan.update(found.cuts(size))
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            plan[name] = Cut("expert") if module.num_experts >= size else _by_tensor(module, size)
    return plan


def _by_tensor(experts: QuantizedExperts, size: int) -> Cut:
    down = experts.projections()["down_proj"]
    return Cut("tensor", _unit(down.in_features, down.scheme.weight.group_size, size))


def structures(model: nn.Module) -> Iterator[Attention | Mlp]:
    """Yield the attention modules and MLPs of a model, each layer once."""
    taken: set[str] = set()
    for path, parent in model.named_modules():
        if isinstance(parent, (QuantizedModule, nn.Linear, QuantizedExperts)):
            continue
        found: list[Attention | Mlp | None] = [_attention(model, path, names, out) for names, out in ATTENTION]
        found += [_mlp(path, parent, names, out) for names, out in MLP]
        for structure in found:
            names = set() if structure is None else _names_of(structure)
            if structure is not None and not names & taken:
                taken |= names
                yield structure


def _names_of(found: Attention | Mlp) -> set[str]:
    return {found.q, found.k, found.v, found.o} if isinstance(found, Attention) else {*found.before, found.after}


def is_tied(layer: Any) -> bool:
    """Whether a layer shares its quantized weight with another one, other than by `qcore.fuse_`."""
    quantized = isinstance(layer, QuantizedModule) and not isinstance(layer, SiblingLinear)
    return quantized and len(layer._store.users) > 1


def linear_at(parent: nn.Module, path: str) -> Any:
    """The linear layer, quantized or float, at a path below ``parent``; None for anything else."""
    module: Any = parent
    for part in path.split("."):
        module = dict(module.named_children()).get(part)
        if module is None:
            return None
    return module if isinstance(module, (QuantizedLinear, nn.Linear)) else None


def _attention(model: nn.Module, path: str, names: tuple[str, str, str], outputs: Sequence[str]) -> Attention | None:
    parent = model.get_submodule(path)
    q, k, v = layers = [linear_at(parent, name) for name in names]
    out = next((name for name in outputs if linear_at(parent, name) is not None), "")
    if any(layer is None for layer in layers) or not out:
        return None
    o = linear_at(parent, out)
    inner = names[0].rpartition(".")[0]
    owner = parent.get_submodule(inner)
    head_dim = _head_dim(owner, q.out_features)
    fits = head_dim and o.in_features == q.out_features and k.out_features == v.out_features
    if not fits or k.out_features % head_dim or q.out_features % k.out_features:
        return None
    if _normalizes_heads_together(owner, (q.out_features, k.out_features), head_dim):
        return None
    counts = q.out_features // head_dim, k.out_features // head_dim
    full_q, full_k, full_v, full_o = (_join(path, name) for name in (*names, out))
    fmt = None if _has_order(o) else _format(o)
    alone = not (_spans_heads(owner, (*layers, o), counts[0], head_dim) or _takes_width_of_x(owner))
    return Attention(_join(path, inner), full_q, full_k, full_v, full_o, *counts, head_dim, fmt, alone)


def _head_dim(owner: nn.Module, width: int) -> int:
    """The features of a head, 0 if unknown."""
    config = getattr(owner, "config", None)
    sizes = [getattr(place, name, None) for place in (owner, config) for name in _HEAD_SIZE]
    counts = [getattr(place, name, None) for place in (owner, config) for name in HEAD_COUNTS]
    numbers = [size for size in sizes if type(size) is int and size > 0 and width % size == 0]
    numbers += [width // count for count in counts if type(count) is int and count > 0 and width % count == 0]
    return numbers[0] if numbers else 0


def _normalizes_heads_together(owner: nn.Module, widths: tuple[int, int], head_dim: int) -> bool:
    """Whether a norm spans the features of all heads, which are then needed on one rank."""
    for child in owner.children():
        if isinstance(child, (QuantizedLinear, nn.Linear)):
            continue
        if any(p.dim() == 1 and p.numel() in widths and p.numel() != head_dim for p in child.parameters()):
            return True
    return False


def _spans_heads(owner: nn.Module, layers: Collection[nn.Module], heads: int, head_dim: int) -> bool:
    """Whether an attention module has more of all heads than its four ``layers`` and what `shard_` cuts with them."""
    if any(p.numel() > 1 and tuple(p.shape) != (heads,) for p in owner.parameters(recurse=False)):
        return True
    others = [child for child in owner.children() if not any(layer in set(child.modules()) for layer in layers)]
    return any(not _is_of_a_head(child, heads, head_dim) for child in others)


def _takes_width_of_x(owner: nn.Module) -> bool:
    """Whether an attention module gives its result the width of x, as BART once did: it would need all heads.

    By the names of variables in its code: TrOCR, LED, FSMT and DETR call it ``embed_dim``, Pegasus-X ``hidden_dim``.
    """
    code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
    return code is not None and ("embed_dim" in code.co_varnames or "hidden_dim" in code.co_names)


def _is_of_a_head(child: nn.Module, heads: int, head_dim: int) -> bool:
    """Whether a child of an attention module treats each head alike, sees x before the heads, or is `bias_of_heads`."""
    if isinstance(child, nn.Embedding) or bias_of_heads(child, heads, head_dim) is not None:
        return heads != head_dim and child.embedding_dim in (heads, head_dim)
    if any(isinstance(module, (QuantizedModule, nn.Linear)) for module in child.modules()):
        return False
    own = list(child.parameters(recurse=False))
    # A norm for each head is a list of norms, or one with a weight of (heads, head_dim).
    listed = len(own) < len(list(child.parameters()))
    return not listed and all(p.dim() < 2 and (p.numel() != heads or heads in (1, head_dim)) for p in own)


def bias_of_heads(child: nn.Module, heads: int, head_dim: int) -> Any:
    """``child`` if it is a table with a number for each head, such as T5's relative bias; otherwise None."""
    is_table = isinstance(child, (nn.Embedding, QuantizedEmbedding)) and child.embedding_dim == heads != head_dim
    return child if is_table else None


def _needs_all_features(parent: nn.Module, before: Sequence[Any], last: Any) -> bool:
    """Whether an MLP has a norm, or another weight, of its hidden features, or a threshold over them."""
    if getattr(parent, "activation_sparsity", 0):  # Gemma 3n: by mean and deviation of a token's hidden features
        return True
    hidden = last.in_features
    if hidden in (before[0].in_features, last.out_features):  # norms beside the MLP have as many
        return False
    layers = {id(layer) for layer in (*before, last)}
    others = [child for child in parent.children() if id(child) not in layers]
    return any(p.dim() > 0 and p.shape[0] == hidden for child in others for p in child.parameters(recurse=False))


def _mlp(path: str, parent: nn.Module, names: Sequence[str], after: str) -> Mlp | None:
    before, last = [linear_at(parent, name) for name in names], linear_at(parent, after)
    if last is None or any(layer is None for layer in before):
        return None
    wide = 2 if names == ("gate_up_proj",) else 1
    if any(layer.out_features != wide * last.in_features for layer in before):
        return None
    alone = not _needs_all_features(parent, before, last)
    return Mlp(tuple(_join(path, name) for name in names), _join(path, after), last.in_features, _format(last), alone)


def _format(layer: nn.Module) -> Format | None:
    return layer.scheme.weight if isinstance(layer, QuantizedLinear) else None


def _has_order(layer: nn.Module) -> bool:
    return isinstance(layer, QuantizedLinear) and layer._store.has_order


def _fits(fmt: Format | None, features: int, size: int, unit: int) -> bool:
    """Whether the input features of a weight can be cut over ``size`` ranks in multiples of ``unit``."""
    try:
        every = shares(features, size, unit)
        if fmt is not None:
            check_columns(fmt, every)
    except UnsupportedError:
        return False
    return True


def _unit(hidden: int, group: int | None, size: int) -> int:
    """Features of an MLP that stay together: whole groups, an even cut that leaves groups of 32 or more, or less."""
    if group is None or group >= hidden:
        return 8 if hidden % (8 * size) == 0 else 1
    even = math.gcd(group, hidden // size) if hidden % size == 0 else 0
    if even == group or even >= _FINE:
        return even
    if -(-hidden // group) >= size:
        return group
    # Fewer groups than ranks: the largest part of a group of which each rank gets one.
    return next(part for part in range(group, 0, -1) if not group % part and (-(-hidden // part) >= size or part == 1))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
