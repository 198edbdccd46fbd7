"""Torch's ops for XPU as its sources describe them to oneDNN, computed by oneDNN on its CPU engine.

What torch says is said here in the same words: dimensions, strides, data types, masks and groups of `WoQMatmul.cpp` and
`QMatmul.cpp` (aten/src/ATen/native/mkldnn/xpu/detail, torch 2.13). Four things differ, because this engine has no such
primitive otherwise; each is said where it is done. Arguments are those of `qcore_xpu.aten`.
"""

from __future__ import annotations

import torch
import xpu_peers_onednn as onednn
from torch import Tensor
from xpu_peers_onednn import DST, SRC, WEIGHTS, Attributes, Factor, Matrix

_PER_COLUMN = 1 << 1
_PER_GROUP = (1 << 0) + (1 << 1)


def int4_mm(x: Tensor, words: Tensor, group: int, scale: Tensor, zeros: Tensor) -> Tensor:
    """`_weight_int4pack_mm_with_scales_and_zeros`: the int32 words are handed over as a matrix of u4, k contiguous."""
    k, (n, words_per_row) = x.shape[1], words.shape
    assert (k % group, group % 32) == (0, 0), "the op takes whole groups of a multiple of 32"
    assert words_per_row * 8 >= k, "the words do not reach to the last column"
    assert scale.shape == zeros.shape == (k // group, n)
    weights = Matrix(words, (k, n), (1, words_per_row * 8), "u4")
    return matmul(x, weights, grouped(scale, zeros, group))


def matmul(x: Tensor, weights: Matrix, attributes: Attributes) -> Tensor:
    """Float x with weights of whole numbers, in x's dtype.

    The first difference: the engine multiplies float16 on processors with AVX512-FP16 only, and bfloat16 on those with
    AVX-512. On others x passes as float32, which changes none of its values, and the result is rounded here.
    """
    src = x if onednn.multiplies(x.dtype) else x.float()
    told = Attributes(attributes.scales, attributes.zeros, src.dtype)
    return onednn.matmul(Matrix.of(src.contiguous()), weights, src.dtype, told).y.to(x.dtype)


def grouped(scale: Tensor, zeros: Tensor | None, group: int) -> Attributes:
    """Scales ``(G, N)`` and zero points of weights, one for ``group`` numbers along k."""
    given = {} if zeros is None else {WEIGHTS: Factor(zeros, _PER_GROUP, (group, 1))}
    return Attributes({WEIGHTS: Factor(scale, _PER_GROUP, (group, 1))}, given)


def int8_mm(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """`_weight_int8pack_mm`.

    The second difference: torch does not allow whole numbers to be converted (`set_fpmath_mode`), and this engine
    refuses to, unless it is allowed.
    """
    n, k = codes.shape
    weights = Matrix(codes, (k, n), (1, k), torch.int8)
    return matmul(x, weights, Attributes({**_ones(), WEIGHTS: Factor(scale.float(), _PER_COLUMN)}))


def int_mm(x: Tensor, codes: Tensor) -> Tensor:
    """`_int_mm`: ``codes`` is ``(K, N)`` in the strides that it has; every scale is a one.

    The fourth difference: on processors without VNNI the engine saturates sums of two products at 16 bits. There the
    codes pass as two terms of seven bits, whose sums stay below that.
    """
    attributes = Attributes({**_ones(), WEIGHTS: Factor(torch.ones(1), 0)})
    half = codes >> 1
    terms = (codes,) if onednn.sums_exactly() else (half, codes - half)
    products = [onednn.matmul(Matrix.of(x.contiguous()), Matrix.of(w), torch.int32, attributes).y for w in terms]
    return torch.stack(products).sum(0, dtype=torch.int32)


def int8_rows(codes: Tensor, scale: Tensor, zero: Tensor | None, weights: Matrix, attributes: Attributes) -> Tensor:
    """``codes (M, K)`` with a scale and a zero point per row, float32 ``(M, 1)``, and weights as `grouped` says.

    No op of torch's: it stands beside kernels of our own, for the convention of zero points on both sides.
    """
    per_row = (1, codes.shape[1])
    scales = {**attributes.scales, SRC: Factor(scale, _PER_GROUP, per_row)}
    given = {} if zero is None else {SRC: Factor(zero.to(torch.int32), _PER_GROUP, per_row)}
    told = Attributes(scales, {**attributes.zeros, **given})
    return onednn.matmul(Matrix.of(codes), weights, torch.float32, told).y


def _ones() -> dict[int, Factor]:
    """The scales of one for x and the result that torch passes. The third difference: it passes them from the host."""
    return {SRC: Factor(torch.ones(1), 0), DST: Factor(torch.ones(1), 0)}
