"""Where a weight is cut: `Cut`, the shares of the ranks, and exact cuts along K.

Nothing is requantized. A cut along N takes rows. A cut along K that falls inside a group makes the groups finer
(`QTensor.regroup`): the same codes, with scales and zero points repeated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import FormatError, UnsupportedError
from ..formats import Format
from ..formats.bits import raw
from ..weights.activations import DynamicFP8
from ..weights.qtensor import QTensor
from ..weights.schemes import Scheme

KINDS = ("column", "row", "gather", "vocab", "expert", "tensor")
_FINEST = 4
"""The smallest group that a cut may make: below it, scales take more memory than 4-bit codes."""
_RUN = 8
"""Columns of one group are padded to a multiple of this when they are sorted locally: bytes stay whole."""


@dataclass(frozen=True)
class Cut:
    """How a layer is cut over the ranks.

    **Fields:**

    - ``kind``: ``"column"`` (output features), ``"row"`` (input features, summed afterwards), ``"gather"`` (output
      features, joined afterwards: an ``lm_head``), ``"vocab"`` (rows of an embedding), ``"expert"`` and ``"tensor"``
      (fused experts: some experts whole, or a part of each).
    - ``unit``: features that stay together, such as a head or a group of codes; the first ranks get one unit more
      where the ranks do not divide the units. None: the heads of an attention module that is recognized, else 1.
    - ``replicate``: with fewer units than ranks, several ranks get the same unit (key and value heads).
    - ``parts``: equal parts of the output features that are cut each: 2 for gate and up in one layer.
    """

    kind: str
    unit: int | None = None
    replicate: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedError(f"a cut is {self.kind!r}; it must be one of {', '.join(KINDS)}.")
        if (self.unit is not None and self.unit < 1) or self.parts < 1:
            raise UnsupportedError(f"{self}: unit and parts must be positive.")


@dataclass(frozen=True)
class Share:
    """The features ``start .. start + length`` of ``total``."""

    start: int
    length: int
    total: int

    @property
    def stop(self) -> int:
        """The first feature behind the share."""
        return self.start + self.length


def shares(total: int, size: int, unit: int = 1, *, replicate: bool = False, what: str = "features") -> list[Share]:
    """The share of each of ``size`` ranks, on multiples of ``unit``; see `Cut`.

    Raises `UnsupportedError` if a rank would get nothing.
    """
    units = -(-total // unit)
    if units < size and replicate and size % units == 0 and total % unit == 0:
        return [Share(rank * units // size * unit, unit, total) for rank in range(size)]
    if units < size:
        whole, hint = (f" of whole units of {unit}", ", or a smaller unit") if unit > 1 else ("", "")
        raise UnsupportedError(f"cannot cut {total} {what} into {size} shares{whole}.\nUse fewer ranks{hint}.")
    base, extra = divmod(units, size)
    starts = [(rank * base + min(rank, extra)) * unit for rank in range(size + 1)]
    stops = [min(start, total) for start in starts]
    return [Share(a, b - a, total) for a, b in itertools.pairwise(stops)]


def cut_rows(weight: QTensor, share: Share, parts: int = 1) -> QTensor:
    """The share of the output features; of each of ``parts`` equal parts if there are several."""
    if parts == 1:
        return owned(weight.narrow(-2, share.start, share.length))
    return owned(QTensor.cat([weight.narrow(-2, at, share.length) for at in row_starts(share, parts)], -2))


def row_starts(share: Share, parts: int) -> list[int]:
    """Where the share starts in each of ``parts`` equal parts."""
    return [part * share.total + share.start for part in range(parts)]


def cut_values(values: Tensor | None, share: Share, parts: int = 1) -> Tensor | None:
    """The share of a bias along its last dimension."""
    if values is None:
        return None
    return torch.cat([values.narrow(-1, at, share.length) for at in row_starts(share, parts)], -1).clone()


def cut_columns(weight: QTensor, share: Share) -> QTensor:
    """The share of the input features, in finer groups if a border falls inside a group.

    Raises `UnsupportedError` as `check_columns` does. A weight with an order is cut by `cut_ordered`.
    """
    assert weight.order is None
    fmt, k = weight.format, weight.shape[-1]
    check_columns(fmt, [share])
    fine = group_of(fmt, share)
    # The groups and bytes that the share touches, which are all that is read of a weight on disk.
    unit = fmt.group_size or 8
    start, stop = share.start // unit * unit, min(-(-share.stop // unit) * unit, k)
    part = weight.narrow(-1, start, stop - start)
    finer = part if fine is None else part.regroup(fine)
    return owned(finer.narrow(-1, share.start - start, share.length))


def check_columns(fmt: Format, every: Sequence[Share]) -> None:
    """Raise `UnsupportedError` if a share would have groups of fewer than four codes."""
    g = fmt.group_size
    for share in every:
        fine = group_of(fmt, share)
        if g is not None and fine is not None and fine < min(g, _FINEST):
            raise UnsupportedError(
                f"cannot cut K={share.total} at {share.start}..{share.stop}: groups of {g} would become groups of "
                f"{fine}.\nCut at whole groups, Cut('row', unit={g}), and the layer before with the same unit."
            )


def group_of(fmt: Format, share: Share) -> int | None:
    """The group size of a share: the largest that divides the groups and both borders."""
    if fmt.group_size is None:
        return None
    return math.gcd(fmt.group_size, share.start, *((share.stop,) if share.stop != share.total else ()))


def cut_ordered(weight: QTensor, share: Share) -> tuple[QTensor, Tensor]:
    """The share of the input features of a weight ``(N, K)`` whose columns are sorted by group (act-order).

    The stored columns of this share's features, sorted by group, each group padded to a multiple of 8 columns. Returns
    the weight ``(N, K')`` in groups of 8 (or less), and int64 ``(K',)``: for each column the feature of the share that
    it multiplies, ``share.length`` for padding, which is to be multiplied by 0. Exact.
    """
    assert weight.order is not None
    fmt = weight.format
    order = weight.order.long()
    own = torch.argsort(order)[share.start : share.stop]  # the stored column of each feature of the share
    g = fmt.group_size
    if g is None or g >= weight.shape[-1]:
        return owned(_taken(weight, own, None, g)), torch.arange(share.length, device=own.device)
    fine = math.gcd(g, _RUN)
    columns, picks, groups = [], [], []
    for group in range(fmt.groups(weight.shape[-1])):
        mine = (own // g == group).nonzero().flatten()
        padding = mine.new_full((-len(mine) % fine,), share.length)
        picks.append(torch.cat([mine, padding]))
        # Any valid code will do for padding, because it is multiplied by 0: this group's own first column.
        columns.append(torch.cat([own[mine], padding.new_full(padding.shape, group * g)]))
        groups += [group] * (len(picks[-1]) // fine)
    index = torch.tensor(groups, dtype=torch.int64, device=own.device)
    return owned(_taken(weight, torch.cat(columns), index, fine)), torch.cat(picks)


def _taken(weight: QTensor, columns: Tensor, groups: Tensor | None, group_size: int | None) -> QTensor:
    """Stored ``columns`` of a weight, with the scales of ``groups``, without an order."""

    def pick(values: Tensor | None) -> Tensor | None:
        if values is None or groups is None:
            return values
        return raw(values).index_select(-2, groups).view(values.dtype)

    codes = weight.codes().index_select(-1, columns)
    fmt = replace(weight.format, group_size=group_size)
    data = fmt.codec.encode(codes)
    shape, scale = (weight.shape[0], len(columns)), pick(weight.scale)
    return weight.derived(data=data, scale=scale, zero=pick(weight.zero), shape=shape, format=fmt, order=None)


def scheme_of_cut(scheme: Scheme, weight: QTensor) -> Scheme:
    """The scheme of a cut weight: activations quantized in groups follow the groups of the weight."""
    activation = scheme.activation
    if isinstance(activation, DynamicFP8) and activation.group is not None:
        activation = DynamicFP8(weight.format.group_size)
    return replace(scheme, weight=weight.format, activation=activation)


def owned(weight: QTensor) -> QTensor:
    """The weight in memory of its own, so that the whole one can be freed."""

    def own(t: Tensor) -> Tensor:
        return t.clone() if t.device.type != "meta" and t.untyped_storage().nbytes() > t.nbytes else t

    return weight.derived(**{name: own(t) for name, t in weight.tensors().items()})


def check_dims(weight: QTensor) -> None:
    """Raise `FormatError` unless a weight is ``(N, K)``."""
    if weight.dim() != 2:
        raise FormatError(f"weight has shape {tuple(weight.shape)}; experts are cut by qcore.parallel.shard_.")
