"""Makes peft choose qcore's LoRA layers for quantized layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import wraps
from typing import Any

from peft.tuners import tuners_utils
from peft.tuners.lora.model import LoraModel
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..errors import UnsupportedError
from ..nn.base import QuantizedModule
from ..nn.experts import QuantizedExperts
from ..nn.linear import QuantizedLinear
from .layers import ADAPTED, base_of

# ruff: noqa: SLF001 - peft's hook for custom layers is private, and set on one config at a time

_MARK = "_qcore_registered"
_ALL_LINEAR = "all-linear"


def register() -> None:
    """Make peft put LoRA over quantized layers, in this process; a second call does nothing.

    peft builds each LoRA layer in ``LoraModel._create_new_module``. Its own hook, ``LoraConfig._custom_modules``,
    applies to one config and is not saved with it, so `peft.PeftModel.from_pretrained` would not have it. Layers of
    other classes, and classes that a config maps itself, go to peft unchanged. ``target_modules="all-linear"`` includes
    quantized linear layers, which peft alone does not recognize as linear.
    """
    if hasattr(LoraModel._create_new_module, _MARK):
        return
    create: Any = LoraModel._create_new_module
    wrap: Any = AuxiliaryTrainingWrapper.__init__
    include: Any = tuners_utils._maybe_include_all_linear_layers

    @wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        base = base_of(target)
        if not isinstance(base, (QuantizedModule, QuantizedExperts)) or _is_mapped(lora_config, base):
            return create(lora_config, adapter_name, target, **kwargs)
        kind = ADAPTED.get(type(base))
        if kind is None:
            target_name = kwargs.get("target_name") or "a target module"
            raise UnsupportedError(f"{target_name} is a {type(base).__name__}, which LoRA cannot adapt: {_why(base)}")
        return kind(target, adapter_name, config=_for_rows_of_outputs(lora_config), **kwargs)

    @wraps(wrap)
    def wrap_trainable(wrapper: Any, module_to_save: nn.Module, *args: Any, **kwargs: Any) -> None:
        _check_trainable(module_to_save)
        wrap(wrapper, module_to_save, *args, **kwargs)

    @wraps(include)
    def include_linear_layers(config: Any, model: nn.Module) -> Any:
        targets = getattr(config, "target_modules", None)
        found = include(config, model)
        if isinstance(targets, str) and targets.lower() == _ALL_LINEAR:
            found.target_modules = {*found.target_modules, *_quantized_linear_layers(found, model)}
        return found

    setattr(create_new_module, _MARK, True)
    tuners_utils._maybe_include_all_linear_layers = include_linear_layers
    LoraModel._create_new_module = staticmethod(create_new_module)
    AuxiliaryTrainingWrapper.__init__ = wrap_trainable


def _for_rows_of_outputs(config: Any) -> Any:
    """The config for a weight ``(N, K)``: with ``fan_in_fan_out``, for Conv1D, a merge would transpose the change."""
    if not getattr(config, "fan_in_fan_out", False):
        return config
    found = copy.copy(config)
    found.fan_in_fan_out = False
    return found


def _why(base: nn.Module) -> str:
    if hasattr(base, "ranks"):
        return (
            "this rank holds a part of it.\n"
            "To train adapters on several devices, add them to the whole model and shard it by FSDP2."
        )
    return (
        "its rows belong to different experts.\n"
        "Remove it from target_modules, or exclude it from quantize_ (exclude=...)."
    )


def _is_mapped(config: Any, base: nn.Module) -> bool:
    """Whether the user has mapped the class of ``base`` to a LoRA layer of their own."""
    return any(isinstance(base, kind) for kind in getattr(config, "_custom_modules", None) or ())


def _quantized_linear_layers(config: Any, model: Any) -> Iterator[str]:
    """Yield the names of quantized linear layers outside of adapters, except the head of the model, as peft does."""
    heads = {getattr(model, name, None) for name in tuners_utils.SEQ_CLS_HEAD_NAMES}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None or getattr(config, "task_type", None) != tuners_utils.TaskType.SEQ_CLS:
        heads = {head}
    inside = ""
    for name, module in model.named_modules():
        if isinstance(module, tuners_utils.BaseTunerLayer):
            inside = f"{name}."
        elif isinstance(module, QuantizedLinear) and module not in heads and not (inside and name.startswith(inside)):
            yield name


def _check_trainable(module: nn.Module) -> None:
    """Raise `UnsupportedError` for a module that peft would copy and train as a whole, if a weight in it is frozen."""
    name = next((name for name, part in module.named_modules() if isinstance(part, QuantizedModule)), None)
    if name is not None:
        where = f"{name!r} of the module" if name else "the module"
        raise UnsupportedError(
            f"modules_to_save and trainable tokens train a weight itself, but {where} is quantized, so it is frozen.\n"
            f"Exclude it from quantize_ (exclude=...), or adapt it with LoRA (target_modules)."
        )
