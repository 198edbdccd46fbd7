"""Select a scheme for each layer by the patterns of `quantize_`, and for layers that share a weight."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..errors import FormatError, QcoreWarning, did_you_mean, quoted
from ..weights.schemes import Scheme

Patterns = str | Iterable[str]


def as_rules(scheme: str | Scheme | Mapping[str, str | Scheme]) -> tuple[tuple[str, Scheme], ...]:
    """Parse a scheme for all layers, or a mapping from patterns to schemes, to (pattern, scheme) pairs."""
    mapping = scheme if isinstance(scheme, Mapping) else {"*": scheme}
    return tuple(zip(as_patterns(mapping) or (), map(Scheme.parse, mapping.values()), strict=True))


def as_patterns(patterns: Patterns | None) -> tuple[str, ...] | None:
    """Return one pattern or several as a tuple; None stays None. Raises `FormatError` for anything but texts."""
    if patterns is None:
        return None
    single = isinstance(patterns, str) or not isinstance(patterns, Iterable)
    found: tuple[Any, ...] = (patterns,) if single else tuple(patterns)
    wrong = [pattern for pattern in found if not isinstance(pattern, str)]
    if wrong:
        raise FormatError(f"{quoted(wrong[0])} is not a pattern: pass a layer's name such as 'lm_head' or '*.mlp.*'.")
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether a layer's name equals a pattern, matches it as a glob, or ends with it after a dot."""
    return name == pattern or fnmatchcase(name, pattern) or name.endswith(f".{pattern}")


@dataclass(frozen=True)
class Choice:
    """The choice of the patterns for a layer: ``scheme``, or None to leave the weight float; ``reason``: as text."""

    scheme: Scheme | None
    reason: str

    def same_weight_as(self, other: Choice) -> bool:
        """Whether both choose the same format and quantizer of the weight; activations may differ."""
        if self.scheme is None or other.scheme is None:
            return self.scheme is other.scheme
        mine, theirs = self.scheme, other.scheme
        return (mine.weight, mine.quantizer) == (theirs.weight, theirs.quantizer)

    def __str__(self) -> str:
        return str(self.scheme) if self.scheme else "float"


_EXPERTS, _ROUTERS = ".experts.", ("gate", "router")
_POSITIONS = "embed_positions"


@dataclass(frozen=True)
class Selection:
    """The patterns of one call of `quantize_` or `quantize_checkpoint`; ``include`` None means everything.

    ``routers``: the layers that stay float unless a pattern other than ``*`` names them, see `within`.
    """

    rules: tuple[tuple[str, Scheme], ...]
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    routers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        scheme: str | Scheme | Mapping[str, str | Scheme],
        include: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> Selection:
        """Parse the arguments of `quantize_`. Raises `FormatError` for a scheme that does not exist."""
        return cls(as_rules(scheme), as_patterns(include), as_patterns(exclude) or ())

    def within(self, names: Iterable[str]) -> Selection:
        """The same for a model or file with these names of modules or tensors, whose routers it finds.

        A router stands beside experts: ``mlp.gate`` beside ``mlp.experts.0`` or ``mlp.experts.down_proj``.
        """
        blocks = {name.partition(_EXPERTS)[0] for name in names if _EXPERTS in name}
        return replace(self, routers=tuple(f"{block}.{router}." for block in sorted(blocks) for router in _ROUTERS))

    def _unless_named(self, name: str) -> str:
        """Why a layer stays float unless it is named, or an empty string."""
        if f"{name}.".startswith(self.routers):
            return "it routes tokens to experts, and to others if it is quantized"
        if _POSITIONS in name.split("."):
            return "it is a table of positions, which most models read in ways of their own"
        return ""

    def choose(self, names: Sequence[str]) -> Choice:
        """Choose for a weight with these names: an exclude pattern wins, then the first rule that matches any name.

        Routers and tables of positions stay float unless an include pattern, or one other than ``*``, names them.
        """
        pattern = _first_match(self.exclude, names)
        if pattern is not None:
            return Choice(None, f"matches exclude pattern {pattern!r}")
        if self.include is not None and _first_match(self.include, names) is None:
            return Choice(None, "matches no include pattern")
        pattern = _first_match((pattern for pattern, _ in self.rules), names)
        if pattern is None:
            return Choice(None, "matches no pattern of the scheme mapping")
        usual = next(filter(None, map(self._unless_named, names)), "")
        if usual and self.include is None and pattern == "*":
            return Choice(None, usual)
        return Choice(dict(self.rules)[pattern], f"matches pattern {pattern!r}")

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns."""
        return (*self.exclude, *(self.include or ()), *(pattern for pattern, _ in self.rules))

    def warn_about_typos(self, names: Iterable[str], stacklevel: int) -> None:
        """Warn about patterns that match no name, which are most likely typos, or that there are no names."""
        known = list(names)
        if not known:
            what = "the model has no layer with a weight; qcore quantizes Linear, Conv2d, Embedding and fused experts."
            warnings.warn(what, QcoreWarning, stacklevel=stacklevel)
            return
        for pattern in self.patterns:
            if _first_match((pattern,), known) is None:
                hint = did_you_mean(pattern, known)
                warnings.warn(f"pattern {pattern!r} matches no layer.{hint}", QcoreWarning, stacklevel=stacklevel)


def _first_match(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    return next((p for p in patterns if any(matches(name, p) for name in names)), None)


def why_adapter_needs_it(model: nn.Module, name: str) -> str:
    """Return why the adapters of peft in ``model`` need the layer ``name`` as it is, or an empty string.

    A layer inside an adapter trains. The layer that an adapter wraps, its base, can be quantized, unless the adapter
    reads its weight instead of calling it. peft's layers list the children that belong to adapters; peft is not
    imported.
    """
    path = name.split(".") if name else []
    module: Any = model
    for depth, child in enumerate(path):
        adapters = [*_adapter_children(module)]
        if child in adapters:
            return f"it trains as part of the adapter {'.'.join(path[depth + 1 :]) or child!r} of peft"
        if adapters and child == "base_layer" and depth + 1 == len(path) and not _only_calls_base(module):
            kind = type(module).__name__
            return f"the adapter that wraps it ({kind}) reads this weight; quantize before peft adds it"
        module = getattr(module, child)
    return ""


def _adapter_children(module: nn.Module) -> Iterator[str]:
    names = getattr(module, "adapter_layer_names", ())
    return (str(name).partition(".")[0] for name in names) if isinstance(names, tuple) else iter(())


def _only_calls_base(module: Any) -> bool:
    """Whether an adapter is LoRA without a variant (DoRA and the like), which adds to what its base returns."""
    kind = type(module)
    plain = kind.__module__ == _LORA_LAYERS and kind.__name__ in ("Linear", "Embedding", "Conv2d")
    return plain and not getattr(module, "lora_variant", None)


_LORA_LAYERS = "peft.tuners.lora.layer"


class Sharing:
    """Finds the layers of a model that share a weight: by a tied parameter, or as one module under several names."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        # Ids instead of modules, which `quantize_` replaces one by one, and whose weights it then frees.
        self._ids = {name: id(module) for name, module in layers.items()}
        self._names: dict[int, list[str]] = {id(module): [] for module in layers.values()}
        for name, module in model.named_modules(remove_duplicate=False):
            if id(module) in self._names:
                self._names[id(module)].append(name)
        self.groups = list(self._find(model))
        self._group_of = {layer: group for group in self.groups for layer in group}

    def _find(self, model: nn.Module) -> Iterator[list[str]]:
        """Yield groups of names of layers, or other owners, of one parameter; a module with several names has one."""
        modules: dict[str, int | str] = {name: key for key, names in self._names.items() for name in names}
        owners: dict[int, dict[int | str, str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = name.removesuffix(".weight")
            owners.setdefault(id(parameter), {}).setdefault(modules.get(owner, owner), owner)
        return (list(group.values()) for group in owners.values() if len(group) > 1)

    def layers_with(self, layer: str) -> list[str]:
        """Return the layers that share the weight of ``layer``, including ``layer``."""
        return [name for name in self._group_of.get(layer, [layer]) if name in self._ids]

    def names_of(self, *layers: str) -> list[str]:
        """Return every name of these layers."""
        return [name for layer in layers for name in self._names[self._ids[layer]]]
