"""Our OpenCL kernels of `tests/xpu_peers/kernels` on Intel's OpenCL runtime for CPUs; after `show_opencl`."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SOURCE = Path(__file__).parents[1] / "xpu_peers/kernels/plain_int32.cl"
KERNELS = ("by_sub_groups", "by_tiles")
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as the source numbers them
_TILE = 16


@cache
def _device() -> tuple[Any, Any]:
    """Intel's runtime for CPUs: its context and a queue. Another runtime would prove nothing, so none is taken."""
    import pyopencl as cl

    found = [d for p in cl.get_platforms() if p.name == "Intel(R) OpenCL" for d in p.get_devices(cl.device_type.CPU)]
    if not found:
        raise RuntimeError(f"no Intel OpenCL runtime for CPUs among {[p.name for p in cl.get_platforms()]}.")
    context = cl.Context(found[:1])
    return context, cl.CommandQueue(context)


def device() -> Any:
    """The OpenCL device that the kernels run on."""
    return _device()[0].devices[0]


@cache
def _kernel(name: str, x_dtype: torch.dtype, scale_dtype: torch.dtype) -> Any:
    import pyopencl as cl

    options = [f"-DX={_DTYPES[x_dtype]}", f"-DS={_DTYPES[scale_dtype]}", "-cl-std=CL3.0", "-Werror"]
    with warnings.catch_warnings():
        # Intel's compiler logs that it has vectorized; what it warns of is an error already, by -Werror.
        warnings.simplefilter("ignore", cl.CompilerWarning)
        program = cl.Program(_device()[0], SOURCE.read_text("utf-8")).build(options)
    return cl.Kernel(program, name)


def int4_mm(kernel: str, x: Tensor, words: Tensor, group: int, scale: Tensor, zeros: Tensor) -> Tensor:
    """``x (M, K) @ W^T`` by one of `KERNELS`, in x's dtype; the arguments are those of the XPU op.

    Unlike the op it also takes a ragged last group, groups of any multiple of 8, float32 and scales of any dtype.
    """
    import pyopencl as cl

    context, queue = _device()
    (m, k), (n, words_per_row) = x.shape, words.shape
    assert group % 8 == 0, "a word must lie in one group"
    assert words_per_row * 8 >= k, "the words do not reach to the last column"
    assert scale.shape == zeros.shape == (-(-k // group), n)
    y = np.empty((m, n), dtype=np.float32 if x.dtype == torch.float32 else np.int16)
    result = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, y.nbytes)
    buffers = [_buffer(t) for t in (x, words, scale, zeros)]
    sizes = [np.int32(size) for size in (n, k, words_per_row, group)]
    run = _kernel(kernel, x.dtype, scale.dtype)
    if kernel == "by_tiles":
        padded = (-(-n // _TILE) * _TILE, -(-m // _TILE) * _TILE)
        run(queue, padded, (_TILE, _TILE), *buffers, result, np.int32(m), *sizes)
    else:
        run(queue, (16, n, m), (16, 1, 1), *buffers, result, *sizes)
    cl.enqueue_copy(queue, y, result)
    return torch.from_numpy(y).view(x.dtype)


def _buffer(tensor: Tensor) -> Any:
    import pyopencl as cl

    data = tensor.flatten().view(torch.uint8).numpy()  # of N = 1 also a contiguous one may have odd strides
    return cl.Buffer(_device()[0], cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=data)
