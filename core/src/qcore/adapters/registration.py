"""Makes peft choose qcore's LoRA layers for quantized layers."""

from __future__ import annotations

from functools import wraps
from typing import Any

from peft.tuners.lora.model import LoraModel
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..errors import UnsupportedError
from ..nn.base import QuantizedModule
from ..nn.experts import QuantizedExperts
from .layers import ADAPTED, base_of

# ruff: noqa: SLF001 - peft's hook for custom layers is private, and set on one config at a time

_MARK = "_qcore_registered"


def register() -> None:
    """Let peft put LoRA over quantized layers, in this process; a second call does nothing.

    peft builds each LoRA layer in ``LoraModel._create_new_module``. Its own hook, ``LoraConfig._custom_modules``, holds
    for one config and is not saved with it, so `peft.PeftModel.from_pretrained` would not have it. Layers of other
    classes, and classes that a config maps itself, go to peft unchanged.
    """
    if hasattr(LoraModel._create_new_module, _MARK):
        return
    create: Any = LoraModel._create_new_module
    check: Any = AuxiliaryTrainingWrapper.check_module

    @wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        base = base_of(target)
        if not isinstance(base, (QuantizedModule, QuantizedExperts)) or _is_mapped(lora_config, base):
            return create(lora_config, adapter_name, target, **kwargs)
        kind = ADAPTED.get(type(base))
        if kind is None:
            raise UnsupportedError(
                f"{kwargs.get('target_name') or 'a target module'} is a {type(base).__name__}, "
                f"which LoRA cannot adapt: its rows belong to different experts.\n"
                f"Leave it out of target_modules, or out of quantize_ (exclude=...)."
            )
        return kind(target, adapter_name, config=lora_config, **kwargs)

    @wraps(check)
    def check_module(wrapper: Any) -> None:
        check(wrapper)
        _check_trainable(wrapper.original_module)

    setattr(create_new_module, _MARK, True)
    LoraModel._create_new_module = staticmethod(create_new_module)
    AuxiliaryTrainingWrapper.check_module = check_module


def _is_mapped(config: Any, base: nn.Module) -> bool:
    """Whether the user has mapped the class of ``base`` to a LoRA layer of their own."""
    return any(isinstance(base, kind) for kind in getattr(config, "_custom_modules", None) or ())


def _check_trainable(module: nn.Module) -> None:
    """Raise `UnsupportedError` for a module that peft would copy and train as a whole, if a weight of it is frozen."""
    name = next((name for name, part in module.named_modules() if isinstance(part, QuantizedModule)), None)
    if name is not None:
        where = f"{name!r} of the module" if name else "the module"
        raise UnsupportedError(
            f"modules_to_save and trainable tokens train a weight itself, but {where} is quantized, so it is frozen.\n"
            f"Leave it out of quantize_ (exclude=...), or adapt it with LoRA (target_modules)."
        )
