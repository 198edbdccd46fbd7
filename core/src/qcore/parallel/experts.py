"""`ParallelExperts`: the fused experts of a mixture-of-experts layer over several ranks."""

# ruff: noqa: SLF001 - made from layers of qcore.nn, whose stores and dtypes they take

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..nn.base import HOOKS
from ..nn.experts import QuantizedExperts
from ..nn.grouped_linear import QuantizedGroupedLinear
from ..nn.parts import mark_part
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from .cutting import Share, check_columns, cut_columns, cut_rows, owned, scheme_of_cut, shares
from .ranks import AllReduce, Ranks

_DOWN = "down_proj"


class ParallelExperts(QuantizedExperts):
    """Fused experts of which a rank holds some, or a part of each; the results are summed over the ranks.

    ``hidden_states``, ``top_k_index`` and ``top_k_weights`` are the same on every rank, as from a router that every
    rank has; the result is equal on every rank. One all_reduce, in the dtype of ``hidden_states`` or in ``sum_dtype``.
    """

    ranks: Ranks
    share: Share
    by_expert: bool
    sum_dtype: torch.dtype | None

    @classmethod
    def from_experts(
        cls,
        experts: QuantizedExperts,
        by: str = "expert",
        *,
        group: Any = None,
        unit: int = 1,
        sum_dtype: torch.dtype | None = None,
        all_reduce: AllReduce | None = None,
        ranks: Ranks | None = None,
    ) -> ParallelExperts:
        """Cut whole experts, which are left unchanged.

        ``by``: ``"expert"``: each rank holds some of the experts; ``"tensor"``: a share of every expert's hidden
        features, in multiples of ``unit``. Raises `UnsupportedError` for weights that cannot be cut.
        """
        if isinstance(experts, cls) or by not in ("expert", "tensor"):
            raise UnsupportedError(f"experts are cut once, by 'expert' or 'tensor', not {by!r}.")
        ranks = ranks or Ranks(group, all_reduce)
        share = shares_of(experts, by, ranks.size, unit)[ranks.rank]
        up, down = _two(experts)
        if by == "expert":
            cut = [_some_experts(layer, share) for layer in (up, down)]
        else:
            cut = [_rows(up, _rows_of(experts, share)), _columns(down, share, first=not ranks.rank)]
        made = cls(experts.gate, experts._up, *cut)
        made.ranks, made.share, made.by_expert, made.sum_dtype = ranks, share, by == "expert", sum_dtype
        for layer in _two(made):
            mark_part(layer, ranks.rank, ranks.size)
        made.train(experts.training)
        for table in HOOKS:
            getattr(made, table).update(getattr(experts, table))
        return made

    def _mixed(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums over all ranks, ``(T, H)``."""
        if self.by_expert:
            own = (index >= self.share.start) & (index < self.share.stop)
            index = torch.where(own, index - self.share.start, self.share.length)
        mine = super()._mixed(self.ranks.shared(hidden_states), index, self.ranks.shared(weights))
        return self.ranks.sum(mine.to(self.sum_dtype or hidden_states.dtype))

    def extra_repr(self) -> str:
        """Describe the experts for ``print(model)``."""
        kind = "experts" if self.by_expert else "hidden features"
        return f"rank={self.ranks.rank} of {self.ranks.size}, {kind}={self.share.start}..{self.share.stop}"


def shares_of(experts: QuantizedExperts, by: str, size: int, unit: int = 1) -> list[Share]:
    """The share of each rank: of the experts, or of their hidden features; reads no weight."""
    down = _two(experts)[1]
    if by == "expert":
        return shares(experts.num_experts, size, what="experts")
    if down._store.has_order:
        raise UnsupportedError("experts whose columns have an order are cut by expert, not by tensor.")
    every = shares(down.in_features, size, unit, what="hidden features")
    check_columns(down.scheme.weight, every)
    _rows_of(experts, every[0])
    return every


def _two(experts: QuantizedExperts) -> tuple[QuantizedGroupedLinear, QuantizedGroupedLinear]:
    """The product before the gate, and that after it."""
    found = experts.projections()
    return found[experts._up], found[_DOWN]


def _some_experts(layer: QuantizedGroupedLinear, share: Share) -> QuantizedGroupedLinear:
    weight = owned(layer._store.neutral().narrow(0, share.start, share.length))
    bias = None if layer.bias is None else layer.bias.detach()[share.start : share.stop].clone()
    return QuantizedGroupedLinear(WeightStore(weight), layer.scheme, bias, layer._dtype)


def _rows(layer: QuantizedGroupedLinear, rows: list[Share]) -> QuantizedGroupedLinear:
    """The output features ``rows`` of every expert."""
    whole = layer._store.neutral()
    weight = QTensor.cat([cut_rows(whole, part) for part in rows], -2)
    bias = layer.bias
    own = None if bias is None else torch.cat([bias.detach()[:, part.start : part.stop] for part in rows], 1)
    return QuantizedGroupedLinear(WeightStore(weight), layer.scheme, own, layer._dtype)


def _columns(layer: QuantizedGroupedLinear, share: Share, *, first: bool) -> QuantizedGroupedLinear:
    """The input features of every expert; the bias, which is added once, on the first rank."""
    weight = cut_columns(layer._store.neutral(), share)
    bias = None if layer.bias is None else layer.bias.detach().clone()
    if bias is not None and not first:
        bias.zero_()
    return QuantizedGroupedLinear(WeightStore(weight), scheme_of_cut(layer.scheme, weight), bias, layer._dtype)


def _rows_of(experts: QuantizedExperts, share: Share) -> list[Share]:
    """The output features of the first product from which the share of the hidden features is computed."""
    up, down = _two(experts)
    n, hidden = up.out_features, down.in_features
    if n == hidden:
        return [share]
    if n != 2 * hidden:
        raise UnsupportedError(f"experts with {n} features before and {hidden} behind their gate are cut by expert.")
    if _is_interleaved(experts.gate, hidden):
        return [Share(2 * share.start, 2 * share.length, n)]
    return [Share(share.start, share.length, n), Share(hidden + share.start, share.length, n)]


def _is_interleaved(gate: nn.Module, hidden: int) -> bool:
    """Whether gate and up alternate (gpt-oss) instead of standing side by side, by what the gate function reads."""
    function: Any = gate._apply_gate if getattr(gate, "has_gate", True) else gate.act_fn
    x = torch.linspace(0.5, 1.0, 2 * hidden).unsqueeze(0)
    other = x.clone()
    other[0, 1] += 0.25
    with torch.no_grad():
        changed: list[int] = (function(x) != function(other)).nonzero()[:, 1].tolist()
    if hidden > 1 and changed not in ([0], [1]):
        raise UnsupportedError(
            f"{type(gate).__name__} mixes features in its gate function; cut these experts by expert."
        )
    return changed == [0]
