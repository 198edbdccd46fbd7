"""qcore-xla: quantized kernels on XLA, for TPUs, GPUs and CPUs; a plugin of qcore.

qcore finds `qcore_xla.plugin` by its entry point. Importing this imports neither JAX nor a backend of torch; it defines
``torch.ops.qcore_xla.*``, which exported programs call, and ``torch.ops.xla.quantized_matmul`` if torch_xla is
not installed.
"""

from . import ops as _ops  # noqa: F401 - defines them
from .quantized_matmul import XlaQuantizedLinear

__version__ = "26.11.0"
__all__ = ["XlaQuantizedLinear"]
