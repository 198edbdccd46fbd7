"""Prepare a quantized model for the training of adapters."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UnsupportedError

_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""The method of transformers' models, by its names since 5.23 and before."""


def prepare_model_for_kbit_training(
    model: nn.Module,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
) -> nn.Module:
    """Freeze a model and optionally enable gradient checkpointing; returns the model.

    peft's function of this name depends on the tool that quantized the model: for qcore's models it casts the float
    parameters to float32 and does not enable checkpointing. This one leaves every dtype unchanged. Checkpointing with
    ``use_reentrant`` (transformers' default) needs an input that requires a gradient, so the embeddings' results are
    made to require one. Raises `UnsupportedError` if the model has no checkpointing of its own; models of transformers
    have it.
    """
    loaded: Any = model
    options = gradient_checkpointing_kwargs or {}
    enable = next((getattr(model, name) for name in _ENABLE if hasattr(model, name)), None)
    if use_gradient_checkpointing and enable is None:
        raise UnsupportedError(
            f"a {type(model).__name__} has no {_ENABLE[-1]}(), which models of transformers have.\n"
            f"Pass use_gradient_checkpointing=False."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if use_gradient_checkpointing and enable is not None:
        if options.get("use_reentrant", True) and hasattr(model, "enable_input_require_grads"):
            loaded.enable_input_require_grads()
        enable(options)
    return model
