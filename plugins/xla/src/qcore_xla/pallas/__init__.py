"""Kernels in Pallas, for products in which XLA alone would write an unpacked weight to memory.

`product` is for TPUs, `skinny_gemm` for GPUs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def compiler_parameters(backend: ModuleType, before: str, **options: Any) -> Any:
    """Parameters for the compiler of a Pallas backend; ``before``: the name of the class in JAX 0.6."""
    made = getattr(backend, "CompilerParams" if hasattr(backend, "CompilerParams") else before)
    return made(**options)
