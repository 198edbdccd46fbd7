"""The only access to torch's own ops for Intel GPUs, which run on oneDNN.

All requirements of torch for a call are written here, once, because torch checks only some of them and silently assumes
the others. Kernels call the functions through this module, so that tests can replace them.
(Constraints: ``aten/src/ATen/native/mkldnn/xpu/Blas.cpp`` and ``detail/{WoQMatmul,QMatmul,Utils}.cpp`` of torch 2.9 to
2.13.)
"""

from __future__ import annotations

import torch
from torch import Tensor

INT4 = "_weight_int4pack_mm_with_scales_and_zeros"
INT8 = "_weight_int8pack_mm"
INT = "_int_mm"

GROUP = 32
"""`int4_mm` supports groups of a multiple of this many columns."""
ALIGNMENT = 64
"""The alignment in bytes that oneDNN requires of tensors. Allocations have it; a view into one may not."""


def missing(name: str) -> str:
    """Why an op cannot be called, and how to fix it; empty if this build of torch has it."""
    served = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - there is no public equivalent
    if hasattr(torch.ops.aten, name) and served(f"aten::{name}", "XPU"):
        return ""
    return f"torch {torch.__version__} has no aten::{name} for XPU; upgrade torch (its XPU build)."


def int4_mm(x: Tensor, words: Tensor, group: int, scale: Tensor, zeros: Tensor) -> Tensor:
    """``y[m, n] = sum_k x[m, k] * (u[n, k] - zeros[k // group, n]) * scale[k // group, n]``, in x's dtype.

    **Arguments:**

    - ``x``: ``(M, K)``, bfloat16 or float16, contiguous, K a multiple of ``group``. (float32 passes torch's check and
      ends in an internal assertion.)
    - ``words``: int32 ``(N, K/8)``, contiguous: eight unsigned codes u (0..15) each, lowest bits = lowest k.
    - ``group``: a multiple of 32. Torch divides K by it and ignores the remainder.
    - ``scale``: ``(K/group, N)``, contiguous, of x's dtype. Only its second size is checked.
    - ``zeros``: int8 ``(K/group, N)``, contiguous; required, 8 for symmetric codes.

    All on the current device. oneDNN may round ``(u - zero) * scale`` to x's dtype, accumulates in float32 and rounds
    the sum once. Float zero points are refused (intel/torch-xpu-ops issue 4765: "oneDNN do not support float zero
    point").
    """
    return torch.ops.aten._weight_int4pack_mm_with_scales_and_zeros(x, words, group, scale, zeros)  # type: ignore[no-any-return]  # noqa: SLF001


def int8_mm(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """``y[m, n] = scale[n] * sum_k x[m, k] * codes[n, k]``, in x's dtype.

    **Arguments:**

    - ``x``: ``(M, K)``, bfloat16, float16 or float32, contiguous.
    - ``codes``: int8 ``(N, K)``, contiguous.
    - ``scale``: ``(N,)``, contiguous, of any float dtype: torch converts it to float32 at every call.

    Accumulated in float32, scaled there, rounded once.
    """
    return torch.ops.aten._weight_int8pack_mm(x, codes, scale)  # type: ignore[no-any-return]  # noqa: SLF001


def int_mm(x: Tensor, codes: Tensor) -> Tensor:
    """``y[m, n] = sum_k x[m, k] * codes[k, n]``, int32.

    **Arguments:** ``x``: int8 ``(M, K)``, contiguous; ``codes``: int8 ``(K, N)``, contiguous (some releases copy
    another layout at every call). Any sizes: the multiples of 8 and 16 that CUDA requires are not needed.

    The sum must fit int32. oneDNN applies a scale of one to the result, in float32: sums above 2**24 may be rounded to
    24 significant bits, an error of 2**-24 of the sum.
    """
    return torch.ops.aten._int_mm(x, codes)  # type: ignore[no-any-return]  # noqa: SLF001
