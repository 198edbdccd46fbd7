"""Biases as the functions take them: float32, padded according to the weight's plan.

They are compared by value: a tensor's identity and version do not reveal values written through ``.data`` or swapped
in, and a weak reference to a tensor would keep torch from swapping it. If a comparison would wait for a device, each
call writes the values again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcore import FormatError

from .memo import Memo
from .packing import Plan

_KEPT = 4


class Biases:
    """The last few biases used with a weight. Threads need no lock: at worst, two create the same one."""

    def __init__(self, of: Plan) -> None:
        self._of = of
        self._known: tuple[tuple[Tensor, Tensor], ...] = ()
        self._room: Tensor | None = None

    def filled(self, bias: Tensor) -> Tensor:
        """A bias ``(n,)`` as ``(rows,)``, or ``(heads, rows)``. Raises `FormatError` for another shape."""
        if bias.shape != (self._of.n,):
            raise FormatError(f"bias has shape {tuple(bias.shape)}; this weight needs ({self._of.n},).")
        bias = bias.detach()
        if bias.device.type == "cpu":
            same = self._same(bias)
            return self._kept(bias) if same is None else same
        return self._written(bias) if bias.is_cuda else self._made(bias)

    def _same(self, bias: Tensor) -> Tensor | None:
        """The padded bias made from these values, if any; the comparison takes 2 us."""
        for values, made in reversed(self._known):
            if values.dtype == bias.dtype and torch.equal(values, bias):
                return made
        return None

    def _kept(self, bias: Tensor) -> Tensor:
        made = self._made(bias)
        self._known = (*self._known[-(_KEPT - 1) :], (bias.clone(), made))
        return made

    def _written(self, bias: Tensor) -> Tensor:
        """The same memory at each call. JAX reads it after torch's stream wrote it, which it waits for because of x."""
        if self._room is None:
            self._room = self._made(bias).clone()  # own memory, even if `_made` returns a view
        else:
            self._room.narrow(-1, 0, self._each).copy_(self._by_heads(bias))
        return self._room

    def _made(self, bias: Tensor) -> Tensor:
        return pad(self._by_heads(bias).float(), (0, self._of.rows - self._each)).contiguous()

    @property
    def _each(self) -> int:
        return self._of.n // self._of.heads

    def _by_heads(self, bias: Tensor) -> Tensor:
        return bias.view(self._of.heads, self._each) if self._of.heads > 1 else bias


_of_weights: Memo[Biases] = Memo(lambda _data, of: (Biases(of), True))


def filled(bias: Tensor, data: Tensor, of: Plan) -> Tensor:
    """`Biases.filled` for the weight with the codes ``data``, packed according to ``of``."""
    return _of_weights.get(data, of).filled(bias)
