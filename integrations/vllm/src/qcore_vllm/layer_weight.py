"""The weight of one of vLLM's layers, put together from the parts that its loader copies into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import qcore
from qcore import QTensor, Scheme, UnsupportedError

from .stored import StoredView, quantized_rows
from .views import WeightView
from .windows import Window

Choose = Callable[[Iterable[str]], "Scheme | None"]
"""The scheme that float weights with these names are quantized with; None to keep them float."""


@dataclass(frozen=True)
class Part:
    """Rows of a layer's weight that run as one. ``weight``: all K columns of them; ``names``: in the checkpoint."""

    row: int
    weight: QTensor | Tensor
    scheme: Scheme | None
    names: tuple[str, ...]

    @property
    def rows(self) -> int:
        """How many."""
        return int(self.weight.shape[0])

    def __str__(self) -> str:
        kind = self.scheme if isinstance(self.weight, QTensor) else "float"
        return f"{' and '.join(self.names)}: {kind}"


class LayerWeight:
    """What has arrived of a weight ``(N, K)`` or ``(E, N, K)``; parts are quantized, or cut, as they arrive.

    **Arguments:** ``prefix``: the layer's name in vLLM; ``device``: where the parts go; ``choose``: None for a
    checkpoint that is quantized already.
    """

    def __init__(
        self, prefix: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, choose: Choose | None
    ) -> None:
        self.names = [prefix]
        self.shape, self.dtype, self.device, self.choose = shape, dtype, device, choose
        self._parts: dict[tuple[int, int], Part] = {}
        self._zeros: list[Window] = []

    def parameter(self, **attributes: Any) -> torch.nn.Parameter:
        """The parameter that vLLM loads into, with the attributes that its loaders read."""
        view = LayerView.of(self, Window.whole(self.shape))
        made = torch.nn.Parameter(view, requires_grad=False)
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    def clear(self) -> None:
        """Forget the parts: vLLM keeps parameters of the layer for reloading."""
        self._parts, self._zeros = {}, []

    # Taking parts.

    def put(self, window: Window, source: Tensor) -> None:
        """Take the part of the weight in a window. Raises `UnsupportedError` if only some columns of it arrive."""
        if window.columns != (0, self.shape[-1]):
            raise UnsupportedError(
                f"{self.names[0]}: vLLM loads columns {window.columns[0]} to {sum(window.columns)} of "
                f"{self.shape[-1]} by themselves, padded to a size that its own kernels need.\n"
                f"Exclude this layer from quantization, or choose a tensor_parallel_size that divides it."
            )
        for at, expert in enumerate(window.experts):
            part = self._stored(source, at) if isinstance(source, StoredView) else self._given(source, at)
            self._parts[expert, window.rows[0]] = replace(part, row=window.rows[0])

    def fill(self, window: Window) -> None:
        """Note rows of zeros, which pad a vocabulary."""
        self._zeros.append(window)

    def _stored(self, source: StoredView, at: int) -> Part:
        stored = source.stored
        scheme = stored.scheme or self._chosen([stored.name, *self._tied()])
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        weight = stored.quantized(source.window, source.window.experts[at], scheme, like)
        return Part(0, weight, scheme, (stored.name,))

    def _given(self, source: Tensor, at: int) -> Part:
        """A dense part that a loader has computed from weights of the checkpoint."""
        dense = source if source.dim() == 2 else source[at]
        dense = dense.to(self.device, self.dtype)
        scheme = self._chosen(self.names)
        if scheme is None:
            return Part(0, dense.clone(), None, (self.names[0],))
        weight = quantized_rows(dense, Window.whole(tuple(dense.shape)), scheme, self.names[0])
        return Part(0, weight, scheme, (self.names[0],))

    def _tied(self) -> list[str]:
        """The names of layers that share the weight, beside the first."""
        return self.names[1:]

    def _chosen(self, names: list[str]) -> Scheme | None:
        return None if self.choose is None else self.choose(names)

    # Giving the whole.

    def parts(self, expert: int = 0) -> list[Part]:
        """The weight of one expert, as few parts as possible. Raises `UnsupportedError` if rows are missing."""
        arrived = [part for (e, _), part in sorted(self._parts.items(), key=lambda item: item[0]) if e == expert]
        found: list[Part] = []
        for part in (*arrived, self._zero_rows(expert, arrived)):
            if part is None:
                continue
            if found and (joined := _joined(found[-1], part)) is not None:
                found[-1] = joined
            else:
                found.append(part)
        self._check_rows(found)
        return found

    @property
    def is_float(self) -> bool:
        """Whether nothing that has arrived is quantized."""
        return not any(isinstance(part.weight, QTensor) for part in self._parts.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived."""
        return not self._parts

    def dense(self) -> Tensor:
        """All of a weight that is float."""
        experts = range(self.shape[0]) if len(self.shape) == 3 else range(1)
        found: list[Any] = [torch.cat([part.weight for part in self.parts(e)]) for e in experts]  # type: ignore[misc]
        return torch.stack(found) if len(self.shape) == 3 else found[0]

    def _zero_rows(self, expert: int, arrived: list[Part]) -> Part | None:
        """The rows of zeros at the end, in the format of the others."""
        end = max((part.row + part.rows for part in arrived), default=0)
        starts = [w.rows[0] for w in self._zeros if w.rows[1] and expert in w.experts and sum(w.rows) == self.shape[-2]]
        count = self.shape[-2] - end
        if not arrived or count <= 0 or not any(start <= end for start in starts):
            return None
        like = arrived[-1]
        zeros = torch.zeros(count, self.shape[-1], dtype=self.dtype, device=self.device)
        if not isinstance(like.weight, QTensor):
            return Part(end, zeros, None, like.names)
        w = like.weight
        made = qcore.quantize(zeros, w.format, scale_dtype=w.dtype, name=f"{self.names[0]} (padding)")
        made = made.derived(order=w.order, global_scale=w.global_scale, quantizer=w.quantizer)
        return Part(end, made, like.scheme, like.names)

    def _check_rows(self, found: list[Part]) -> None:
        end = 0
        for part in found:
            if part.row != end:
                break
            end += part.rows
        if end != self.shape[-2] or len(found) == 0:
            raise UnsupportedError(
                f"{self.names[0]}: row {end} of {self.shape[-2]} is in no tensor of the checkpoint.\n"
                f"Load it with load_format='auto': other loaders do not know qcore's tensors."
            )


class LayerView(WeightView):
    """The parameter of a layer, or a part of it, that loaders copy weights into."""

    layer_weight: LayerWeight

    @classmethod
    def of(cls, layer_weight: LayerWeight, window: Window) -> LayerView:
        """The part of a layer's weight in a window."""
        where, dtype = layer_weight.device, layer_weight.dtype
        made: LayerView = cls._make(window, dtype, where, layer_weight=layer_weight)
        return made

    def part(self, window: Window) -> LayerView:
        return LayerView.of(self.layer_weight, window)

    def dense(self) -> Tensor:
        raise UnsupportedError(f"{self.layer_weight.names[0]}: its weight is quantized and cannot be changed.")

    def receive(self, source: Tensor) -> LayerView:
        """Take ``source``, of the same shape, as this part."""
        if source.shape != self.shape:
            raise UnsupportedError(
                f"{self.layer_weight.names[0]}: a weight of shape {tuple(source.shape)} does not fit into "
                f"{tuple(self.shape)}. The checkpoint belongs to another model."
            )
        if isinstance(source, StoredView) and source.window.flipped:
            raise UnsupportedError(
                f"{self.layer_weight.names[0]}: vLLM did not transpose {source.stored.name!r}, as this model's weights "
                f"are stored.\nExclude the layer from quantization, and report the version of vLLM."
            )
        self.layer_weight.put(self.window, source)
        return self

    def fill(self, value: float) -> LayerView:
        """Make this part zero; the only number that it can be filled with."""
        if value:
            raise UnsupportedError(f"{self.layer_weight.names[0]}: qcore does not make dummy weights (load_format).")
        self.layer_weight.fill(self.window)
        return self


def _joined(a: Part, b: Part) -> Part | None:
    """Two neighbours as one part; None if they have to stay apart."""
    if a.row + a.rows != b.row or a.scheme != b.scheme:
        return None
    names = tuple(dict.fromkeys((*a.names, *b.names)))
    if isinstance(a.weight, QTensor) and isinstance(b.weight, QTensor):
        if a.weight.format != b.weight.format or a.weight.scale.dtype != b.weight.scale.dtype:
            return None
        if not all(_equal(getattr(a.weight, name), getattr(b.weight, name)) for name in ("order", "global_scale")):
            return None
        return Part(a.row, QTensor.cat([a.weight, b.weight]), a.scheme, names)
    if isinstance(a.weight, QTensor) or isinstance(b.weight, QTensor):
        return None
    return Part(a.row, torch.cat([a.weight, b.weight]), None, names)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
