"""Linear layers that were left float, cut in the same way: a model is rarely quantized in every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..nn.parts import mark_part
from .cutting import Share, cut_values, row_starts, shares
from .ranks import AllReduce, Ranks


class _FloatParallel(nn.Linear):
    ranks: Ranks
    share: Share

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        share = f"{self.share.start}..{self.share.stop} of {self.share.total}"
        return f"{super().extra_repr()}, rank={self.ranks.rank} of {self.ranks.size}, features={share}"

    def _fill(self, weight: Tensor, bias: Tensor | None, like: nn.Linear, ranks: Ranks, share: Share) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.ranks, self.share = ranks, share
        self.weight = nn.Parameter(weight, requires_grad=like.weight.requires_grad)
        own = _bias(like)
        trained = own is not None and own.requires_grad
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=trained))
        self.train(like.training)
        mark_part(self, ranks.rank, ranks.size)


class FloatColumnParallelLinear(_FloatParallel):
    """One rank's output features of a `torch.nn.Linear`; arguments as for `ColumnParallelLinear`."""

    gathers: tuple[int, ...]

    def __init__(
        self, layer: nn.Linear, *, unit: int = 1, replicate: bool = False, parts: int = 1, gather: bool = False,
        group: Any = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        ranks = ranks or Ranks(group)
        n = layer.out_features // parts
        every = shares(n, ranks.size, unit, replicate=replicate, what="output features")
        share, weight = every[ranks.rank], layer.weight.detach()
        rows = [weight.narrow(0, at, share.length) for at in row_starts(share, parts)]
        own = _bias(layer)
        bias = cut_values(None if own is None else own.detach(), share, parts)
        self._fill(torch.cat(rows).clone(), bias, layer, ranks, share)
        self.gathers = tuple(s.length for s in every) if gather else ()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the part to x ``(..., K)``: ``(..., stop - start)``, or ``(..., N)`` if it gathers."""
        y = super().forward(self.ranks.shared(x))
        return self.ranks.joined(y, self.gathers) if self.gathers else y


class FloatRowParallelLinear(_FloatParallel):
    """One rank's input features of a `torch.nn.Linear`, summed over the ranks; arguments as for `RowParallelLinear`."""

    sum_dtype: torch.dtype | None

    def __init__(
        self, layer: nn.Linear, *, unit: int = 1, sum_dtype: torch.dtype | None = None,
        all_reduce: AllReduce | None = None, group: Any = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        ranks = ranks or Ranks(group, all_reduce)
        share = shares(layer.in_features, ranks.size, unit, what="input features")[ranks.rank]
        weight = layer.weight.detach().narrow(1, share.start, share.length).clone()
        own = _bias(layer)
        self._fill(weight, None if own is None else own.detach().clone(), layer, ranks, share)
        self.sum_dtype = sum_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Apply the part to x ``(..., stop - start)`` and sum: ``(..., N)``."""
        y = nn.functional.linear(x, self.weight)
        total = self.ranks.sum(y.to(self.sum_dtype or y.dtype))
        bias = _bias(self)
        return (total if bias is None else total + bias).to(y.dtype)


def _bias(layer: nn.Linear) -> Tensor | None:
    """The bias, which torch declares as always there."""
    found: Tensor | None = layer._parameters.get("bias")  # noqa: SLF001 - torch's table
    return found
