"""vLLM's loader of weights, which reads checkpoints through qcore if qcore serves the model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import qcore
from qcore.plugin_api import open_checkpoint

from .config import METHOD, QcoreConfig
from .reporting import check_strict, tell
from .stream import stream

_FORMATS = ("auto", "hf", "safetensors")
"""The values of ``load_format`` that read a model's directory; others bring readers of their own."""
_logger = init_logger("vllm.qcore")


class QcoreModelLoader(DefaultModelLoader):  # type: ignore[misc, unused-ignore]
    """vLLM's default loader for every model that qcore does not serve."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Load a model and log which kernel runs which layer."""
        model: nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        config = vllm_config.quant_config
        if isinstance(config, QcoreConfig) and model_config.quantization == METHOD:
            config.shared.clear()
            check_strict(config, model_config.model)
            tell(qcore.report(model), config.notes, _logger)
        return model

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint; quantized weights as views that layers take their parts of."""
        if model_config.quantization != METHOD:
            yield from super().get_all_weights(model_config, model)
            return
        config = _config_of(model)
        self.counter_before_loading_weights = time.perf_counter()  # of vLLM's log
        with open_checkpoint(self._folder(model_config, model)) as archive:
            yield from stream(archive, model, model_config.dtype, config)
        for source in getattr(model, "secondary_weights", ()):
            yield from self._get_weights_iterator(source)

    def _folder(self, model_config: Any, model: nn.Module) -> Path:
        """The directory of a model, downloaded if it is not local."""
        if os.path.exists(model_config.model):  # noqa: PTH110 - the same question that vLLM asks
            return Path(model_config.model)
        patterns = getattr(model, "allow_patterns_overrides", None)
        folder, *_ = self._prepare_weights(model_config.model, None, model_config.revision, False, patterns)
        return Path(folder)


def _config_of(model: nn.Module) -> QcoreConfig:
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    found = getattr(current, "quant_config", None) or _config_of_layers(model)
    assert isinstance(found, QcoreConfig)
    return found


def _config_of_layers(model: nn.Module) -> Any:
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    found = (getattr(method, "config", None) for method in methods)
    return next((config for config in found if isinstance(config, QcoreConfig)), None)


def register_loader() -> None:
    """Register the loader for the formats that read directories."""
    with _quiet():
        for name in _FORMATS:
            register_model_loader(name)(QcoreModelLoader)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide vLLM's warning that a loader is replaced by another one: this one does the same for all other models."""
    logger = logging.getLogger("vllm.model_executor.model_loader")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
