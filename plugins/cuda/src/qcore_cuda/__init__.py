"""qcore-cuda: quantized kernels for NVIDIA and AMD GPUs in Triton; a plugin of qcore.

There is nothing to call here: qcore finds `qcore_cuda.plugin` by its entry point.
"""

__version__ = "26.11.0"
