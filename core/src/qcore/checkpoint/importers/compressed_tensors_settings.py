"""The ``config_groups`` of compressed-tensors: the layers of each group, and how the tool quantizes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import CheckpointError, FormatError, quoted
from ...formats import Format
from ...weights.activations import Activation, DynamicFP8, DynamicInt8, StaticFP8, StaticInt8
from ...weights.schemes import Scheme
from ..header import file_error
from .base import ForeignTensor, LayerRefused, Plan, Source, calibrated, tensor_name
from .fp8 import input_scale
from .name_patterns import NamePatterns, TooManyStepsError

_FUSED = ("weight_input", "weight_output")
"""Where transforms are part of the stored weights."""
_BLOCK = re.compile(r"[0-9]{1,9}x[0-9]{1,9}")
_DAMAGED = "Download config.json again: the file is damaged, or of a version that qcore does not support."


@dataclass(frozen=True)
class Group:
    """One of ``config_groups``.

    **Fields:** ``names``: of layers; ``classes``: of layers, by name; ``patterns``: regular expressions for names of
    layers, matched at the start; ``bits``, ``size`` (columns per scale, None for a row), ``block`` (rows and columns
    per scale), ``kind`` (``int``, ``float`` or empty), ``symmetric`` (whether there are no zero points): of weights;
    ``activations``: the settings of activations, None for float; ``format``: of the bytes, or empty.
    """

    names: frozenset[str]
    patterns: tuple[str, ...]
    bits: int
    size: int | None
    block: tuple[int, int] | None
    kind: str = ""
    symmetric: bool = True
    activations: Mapping[str, Any] | None = None
    format: str = ""
    classes: frozenset[str] = field(default_factory=frozenset)


class Groups:
    """The groups of a file: those that name layers before those that name classes."""

    def __init__(self, source: Source, groups: Sequence[Group]) -> None:
        """Raises `CheckpointError` for a target that is not a supported expression, and for too many of them."""
        self._source = source
        self._groups = sorted(groups, key=lambda group: bool(group.classes))
        self._of_class = next((i for i, group in enumerate(self._groups) if group.classes), len(self._groups))
        self._by_name: dict[str, int] = {}
        self._patterns = NamePatterns()
        for i, group in enumerate(self._groups):
            for name in group.names:
                self._by_name.setdefault(name, i)
            for text in group.patterns:
                self._add(text, i)

    def _add(self, text: str, group: int) -> None:
        try:
            self._patterns.add(text, group)
        except ValueError as error:
            what = f"its target {text[:60]!r} is not a supported regular expression: {error}."
            raise file_error(self._source.path, what, _DAMAGED) from None
        except TooManyStepsError as error:
            raise self._too_many(error) from None

    @property
    def formats(self) -> set[str]:
        """The formats that groups name."""
        return {group.format for group in self._groups}

    def find(self, layer: str) -> Group:
        """The first group whose targets match a layer by its name, a pattern, or the class of linear layers.

        Raises `LayerRefused` if there is none.
        """
        found = min(self._by_name.get(layer, len(self._groups)), self._of_class)
        try:
            matched = self._patterns.first(layer, found)
        except ValueError as error:
            raise LayerRefused(f"a target cannot be compared with its name: {error}") from None
        except TooManyStepsError as error:
            raise self._too_many(error) from None
        found = found if matched is None else matched
        if found == len(self._groups):
            raise LayerRefused("no target of config_groups matches it")
        return self._groups[found]

    def _too_many(self, error: TooManyStepsError) -> CheckpointError:
        what = f"its config_groups are too long: {error}."
        return file_error(self._source.path, what, "List the layers by their names, or with fewer expressions.")


def groups_of(source: Source) -> Groups:
    """The groups in the settings. Raises `CheckpointError`."""
    groups = source.setting("config_groups", dict)
    if not groups:
        raise file_error(source.path, "its quantization_config has no config_groups.", _DAMAGED)
    # Groups without weights quantize activations only, such as those of attention.
    return Groups(source, [_group(source, name, value) for name, value in groups.items() if _has_weights(value)])


def _has_weights(group: Any) -> bool:
    return not isinstance(group, dict) or "weights" not in group or group["weights"] is not None


def _group(source: Source, name: str, value: Any) -> Group:
    weights = value.get("weights") if isinstance(value, dict) else None
    targets = value.get("targets") if isinstance(value, dict) else None
    if not isinstance(weights, dict) or not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise file_error(source.path, f"its config_groups has {name[:40]!r} without weights or targets.", _DAMAGED)
    bits, size, block = (weights.get(key) for key in ("num_bits", "group_size", "block_structure"))
    if isinstance(block, str) and _BLOCK.fullmatch(block):  # another form of it
        block = [int(part) for part in block.split("x")]
    if type(bits) is not int or not 2 <= bits <= 8:
        raise file_error(source.path, f"its group {name[:40]!r} has {quoted(bits)} bits; qcore reads 2 to 8.", _DAMAGED)
    if not (size is None or type(size) is int) or not (block is None or _is_block(block)):
        what = f"its group {name[:40]!r} has group_size {quoted(size)} and block_structure {quoted(block)}."
        raise file_error(source.path, what, _DAMAGED)
    activations = value.get("input_activations")
    # A class is a name such as "Linear"; names of layers contain dots, or are names in the file.
    plain = {target for target in targets if not target.startswith("re:")}
    classes = frozenset(target for target in plain if target[:1].isupper() and "." not in target)
    return Group(
        frozenset(plain - classes),
        tuple(target[3:] for target in targets if target.startswith("re:")),
        bits,
        size,
        None if block is None else (block[0], block[1]),
        str(weights.get("type") or ""),
        weights.get("symmetric") is not False,
        activations if isinstance(activations, dict) else None,
        str(value.get("format") or ""),
        classes,
    )


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def check_transforms(source: Source) -> None:
    """Raise `CheckpointError` for activations that the tool transforms at run time: weights alone are meaningless."""
    groups = (source.setting("transform_config", dict) or {}).get("config_groups") or {}
    for scheme in groups.values() if isinstance(groups, dict) else [groups]:
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for each in applied if isinstance(applied, list) else [applied]:
            location = each.get("location") if isinstance(each, dict) else each
            if location not in _FUSED:
                what = (
                    f"its transform_config has {quoted(location)} transforms at run time, which qcore does not support."
                )
                raise file_error(source.path, what, "Get a checkpoint whose transforms are fused into its weights.")


def activation_of(source: Source, layer: str, group: Group, format: Format, plan: Plan) -> Scheme:
    """The scheme of a layer; calibrated scales of its activations are added to ``plan``.

    Activations that qcore cannot quantize, such as those of NVFP4, stay float, which is noted in ``plan``.
    """
    args = group.activations
    if args is None:
        return Scheme(format)
    kind, bits, strategy = (args.get(key) for key in ("type", "num_bits", "strategy"))
    activation: Activation | None = None
    if (kind, bits) == ("int", 8) and args.get("dynamic") is True and strategy == "token":
        activation = DynamicInt8(symmetric=args.get("symmetric") is not False)
    elif (kind, bits) == ("float", 8) and args.get("dynamic") is True:
        size = args.get("group_size")
        activation = DynamicFP8(size if strategy == "group" and type(size) is int and size > 0 else None)
    elif args.get("dynamic") is False and bits == 8 and strategy == "tensor":
        activation = StaticInt8() if kind == "int" else StaticFP8()
    try:
        scheme = Scheme(format, activation=activation)
    except FormatError:
        activation, scheme = None, Scheme(format)
    if activation is None:
        text = f"{quoted(kind)} activations of {quoted(bits)} bits stay float: qcore does not support them"
        plan.notes[layer] = text
        return scheme
    if isinstance(activation, (StaticInt8, StaticFP8)):
        _add_static(source, layer, activation, plan)
    return scheme


def _add_static(source: Source, layer: str, activation: StaticInt8 | StaticFP8, plan: Plan) -> None:
    if tensor_name(layer, "input_scale") not in source.entries:
        raise LayerRefused("its settings have static activations, but it has no input_scale")
    plan.tensors.append(input_scale(source, layer, tensor_name(layer, "input_scale")))
    if isinstance(activation, StaticFP8):
        return
    name = tensor_name(layer, "input_zero_point")
    if name not in source.entries:  # symmetric
        zero = ForeignTensor(
            name, torch.int32, (), (tensor_name(layer, "input_scale"),), lambda _: torch.zeros((), dtype=torch.int32)
        )
    elif source.entries[name].shape not in ((), (1,)):
        raise LayerRefused(f"its input_zero_point has shape {source.entries[name].shape}")
    else:
        zero = calibrated(name, torch.int32, name)
    plan.tensors.append(zero)
