"""The fused experts in a float file: weights of three dimensions.

A file does not say whether they are ``(E, N, K)`` or transposed, as gpt-oss's are: the sizes of the two weights of a
layer do, which fit together in one way only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..nn.experts import DOWN, FUSED, UP
from .header import Entry

_MODULE = "experts"


@dataclass(frozen=True)
class StoredExperts:
    """The two weights of a layer's experts.

    **Fields:** ``layer``: the name of their module; ``weights``: their names in the file; ``transposed``: whether they
    are ``(E, K, N)``, None if the sizes leave it open.
    """

    layer: str
    weights: tuple[str, str]
    transposed: bool | None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that patterns may use: one choice applies to both weights."""
        return (self.layer, *self.weights)


def stored_experts(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> dict[str, StoredExperts]:
    """Find the fused experts in a file, by the name of each weight. ``config``: of the model, empty if unknown."""
    found: dict[str, StoredExperts] = {}
    for layer in {name.rpartition(".")[0] for name in entries if name.endswith(f"{_MODULE}.{DOWN}")}:
        up = next((n for n in (f"{layer}.{FUSED}", f"{layer}.{UP}") if n in entries), "")
        weights = up, f"{layer}.{DOWN}"
        if up and layer.rpartition(".")[2] == _MODULE and _fit(*(entries[name] for name in weights)):
            shapes = [entries[name].shape for name in weights]
            gates = 2 if up.endswith(FUSED) else 1
            found |= dict.fromkeys(weights, StoredExperts(layer, weights, _is_transposed(shapes, gates, config)))
    return found


def _fit(up: Entry, down: Entry) -> bool:
    return len(up.shape) == len(down.shape) == 3 and up.shape[0] == down.shape[0]


def _is_transposed(shapes: list[tuple[int, ...]], gates: int, config: Mapping[str, Any]) -> bool | None:
    """Whether weights are ``(E, K, N)``. ``gates``: rows of the first one for each column of the second one."""
    (_, a, b), (_, c, d) = shapes
    plain, turned = (b == c and a == gates * d), (a == d and b == gates * c)
    if plain != turned:
        return turned
    hidden = set(_hidden_sizes(config)) & {a, b}
    return None if not plain or a == b or len(hidden) != 1 else hidden == {a}


def _hidden_sizes(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the widths of a model and of its parts."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        yield from (size for name in ("hidden_size", "d_model") if isinstance(size := part.get(name), int))
