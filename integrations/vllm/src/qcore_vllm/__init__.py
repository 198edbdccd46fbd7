"""Serves quantized checkpoints of any tool in vLLM, and quantizes float weights at load: the method ``"qcore"``.

vLLM calls `register` in each of its processes. Imports `qcore`, `qcore.plugin_api` and vLLM.
"""

__version__ = "26.11.0"
__all__ = ["register"]


def register() -> None:
    """Register the quantization method ``"qcore"`` and the loader of its checkpoints. Called again, changes nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .config import METHOD, QcoreConfig
    from .loader import register_loader

    register_quantization_config(METHOD)(QcoreConfig)
    register_loader()
