"""What torch's XPU ops ask of a call, written down from their sources, apart from qcore-xpu's own text.

Each function raises `ConstraintError` for a call that a device would refuse, or, worse, take for another one.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ConstraintError(RuntimeError):
    """A call that the device's op does not take."""


def check_int4(x: Tensor, words: Tensor, group: int, scale: Tensor, zeros: Tensor) -> None:
    """Arguments of ``_weight_int4pack_mm_with_scales_and_zeros``."""
    _on_one_device(x, words, scale, zeros)
    _expect(x.dim() == 2 and words.dim() == 2, "x and words are matrices")
    _expect(x.dtype in {torch.bfloat16, torch.float16}, f"x is bfloat16 or float16, not {x.dtype}")
    _expect(words.dtype == torch.int32, f"words are int32, not {words.dtype}")
    _expect(type(group) is int and group > 1 and group % 32 == 0, f"the group is a multiple of 32, not {group}")
    n, k = words.shape[0], x.shape[1]
    _expect(k % group == 0 and k > 0, f"K = {k} is a multiple of the group of {group}")
    _expect(words.shape[1] * 8 == k, f"words hold {words.shape[1] * 8} codes per row, x has {k} columns")
    _expect(scale.dtype == x.dtype, f"scales have x's dtype, {x.dtype}, not {scale.dtype}")
    _expect(zeros.dtype == torch.int8, f"zero points are int8, not {zeros.dtype}")
    for name, parameter in (("scales", scale), ("zero points", zeros)):
        _expect(tuple(parameter.shape) == (k // group, n), f"{name} have shape {(k // group, n)}")
    _laid_out(x=x, words=words, scale=scale, zeros=zeros)


def check_int8(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Arguments of ``_weight_int8pack_mm``."""
    _on_one_device(x, codes, scale)
    _expect(x.dim() == 2 and codes.dim() == 2, "x and codes are matrices")
    floats = {torch.bfloat16, torch.float16, torch.float32}
    _expect(x.dtype in floats, f"x is bfloat16, float16 or float32, not {x.dtype}")
    _expect(codes.dtype == torch.int8, f"codes are int8, not {codes.dtype}")
    _expect(codes.shape[1] == x.shape[1] > 0, "codes and x have as many columns")
    _expect(tuple(scale.shape) == (codes.shape[0],), "one scale per row of codes")
    _expect(scale.dtype == torch.float32, f"scales are float32, or converted at every call; not {scale.dtype}")
    _laid_out(x=x, codes=codes, scale=scale)


def check_int(x: Tensor, codes: Tensor) -> None:
    """Arguments of ``_int_mm``."""
    _on_one_device(x, codes)
    _expect(x.dim() == 2 and codes.dim() == 2, "x and codes are matrices")
    _expect(x.dtype == torch.int8 and codes.dtype == torch.int8, f"both are int8, not {x.dtype} and {codes.dtype}")
    _expect(x.shape[1] == codes.shape[0], "x has as many columns as codes have rows")
    _expect(0 < x.shape[1] < 1 << 17, "sums of products of codes fit int32")
    _laid_out(x=x, codes=codes)


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise ConstraintError(f"expected: {text}")


def _on_one_device(*tensors: Tensor) -> None:
    _expect(len({tensor.device for tensor in tensors}) == 1, "all tensors are on one device")


def _laid_out(**tensors: Tensor) -> None:
    """Contiguous, and starting on 64 bytes from where their memory starts, which oneDNN wants."""
    for name, tensor in tensors.items():
        _expect(tensor.is_contiguous(), f"{name} is contiguous, not of strides {tensor.stride()}")
        offset = tensor.storage_offset() * tensor.element_size()
        _expect(offset % 64 == 0, f"{name} starts on 64 bytes, not {offset} bytes into its memory")
