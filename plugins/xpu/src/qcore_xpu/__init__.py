"""qcore-xpu: quantized kernels for Intel GPUs; a plugin of qcore.

There is nothing to call here: qcore finds `qcore_xpu.plugin` by its entry point.
"""

__version__ = "26.11.0"
