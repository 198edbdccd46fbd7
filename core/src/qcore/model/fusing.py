"""`fuse_`: joins quantized linear layers of a model that read the same input."""

# ruff: noqa: SLF001 - reads the stores of quantized layers

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from torch import nn

from ..errors import FormatError
from ..nn.base import adopt
from ..nn.linear import QuantizedLinear
from ..nn.offloading import HOOK
from ..nn.siblings import join
from . import merging

GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
"""Names of layers under one module that read the same input in the models of transformers, diffusers and others."""

_QUERIES = frozenset(names[0] for names in GROUPS if len(names) == 3)
_CROSS = ("cross", "encoder_attn", "encdecattention", "attn2")
"""In the name of an attention module: keys and values read another input than queries."""


def fuse_(model: nn.Module, groups: Iterable[Sequence[str]] = GROUPS) -> list[tuple[str, ...]]:
    """Join quantized linear layers that read the same input, in place; returns the names of the layers of each group.

    The layers of a group share one packed weight; whichever is called first with an input computes the results of all
    in one call of the kernel, after quantizing activations once, and the others take theirs. Layers keep their names
    and rows in ``state_dict``, weights keep their codes. Models that Inductor compiles compute a group's product once:
    this installs a pass there that merges identical calls.

    ``groups``: names of layers under one module, default `GROUPS` (q, k and v; gate and up). Layers are left as they
    are unless they have the same scheme, weight format, compute dtype, device and input features, weights of their own
    and no int8 results. A group whose layers turn out to read different inputs is separated again while the model
    runs. Raises `FormatError` for a group of fewer than two names.
    """
    wanted = [tuple(names) for names in groups]
    for names in wanted:
        if len(names) < 2 or any(not isinstance(name, str) for name in names):
            raise FormatError(
                f"groups: {names!r} must be two names of layers or more, such as ('gate_proj', 'up_proj')."
            )
    found = []
    for path, parent in list(model.named_modules()):
        for names in wanted:
            fused = (layers for layers in _alike(path, parent, names) if fuse_children(parent, layers))
            found += [tuple(f"{path}.{name}" if path else name for name in layers) for layers in fused]
    if found:
        merging.install()
    return found


def _alike(path: str, parent: nn.Module, names: Sequence[str]) -> Iterator[dict[str, QuantizedLinear]]:
    """Yield the children with these names that can share a weight, by what they have to have in common."""
    if any(word in path.rpartition(".")[2].lower() for word in _CROSS):
        names = [name for name in names if name not in _QUERIES]
    together: dict[tuple[object, ...], dict[str, QuantizedLinear]] = {}
    children = dict(parent.named_children())
    for name in names:
        child = children.get(name)
        if _can_join(child) and _can_share(child):
            own = (child.scheme, child.in_features, child._dtype, child.out_dtype, child._store.device, child.training)
            key = (type(child), *own)
            together.setdefault(key, {})[name] = child
    yield from (layers for layers in together.values() if len(layers) > 1)


def _can_join(child: nn.Module | None) -> TypeGuard[QuantizedLinear]:
    """Whether a layer is a plain one, or of a subclass that says by which ``sibling`` it is replaced."""
    return type(child) is QuantizedLinear or (isinstance(child, QuantizedLinear) and hasattr(type(child), "sibling"))


def _can_share(layer: QuantizedLinear) -> bool:
    tied = len(layer._store.users) > 1
    return not tied and layer._store.device.type != "meta" and layer.scheme.output is None and HOOK not in vars(layer)


def fuse_children(parent: nn.Module, layers: dict[str, QuantizedLinear]) -> bool:
    """Replace the children ``layers`` by siblings; returns whether their weights could be joined."""
    try:
        made = join(list(layers.values()))
    except FormatError:  # other orders of columns, global scales or dtypes of scales
        return False
    for (name, layer), sibling in zip(layers.items(), made, strict=True):
        adopt(sibling, layer)
        setattr(parent, name, sibling)
    return True
