"""For users of JAX: packed weights as a pytree, and pure functions of it. `qcore_xla` re-exports the public names."""

from .functions import conv2d, embedding, grouped_linear, linear
from .loading import load
from .weights import PackedWeight, pack

__all__ = ["PackedWeight", "conv2d", "embedding", "grouped_linear", "linear", "load", "pack"]
