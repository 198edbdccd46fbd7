"""``torch.cpu.w4a16``: bfloat16 x and grouped int4 weights on a CPU.

Few rows go through ``aten::_weight_int4pack_mm_for_cpu``, which reads 4 bits per weight but multiplies row by row.
From `_CROSSOVER` rows on, the same packed bytes are dequantized a few columns at a time, in the cache, for the bfloat16
matrix product.

The op rounds its result to bfloat16 before the bias is added: where the two cancel, the error is up to 3 times the
contract's tolerance. As a further group of codes the bias would be added before, in up to 2.7 times the time of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts import LinearRequest
from ..discovery.kernels import Packed, RowsKernel, check_weight
from ..formats import Format, ZeroPoint
from ..weights.qtensor import QTensor
from .int4_blocks import COLUMNS, BlockLayout, block_layout
from .integer import split_bias
from .ops import int4_product, op

GROUP_SIZES = (256, 128, 64, 32)
_CROSSOVER = 80
"""Measured at 4096 x 4096 on AVX-512: the op costs 0.092 ms per row, the matrix product 4.1 ms plus 0.04 ms per row."""
_CHUNK = 1 << 21
"""Weights dequantized at a time: 4 MiB of bfloat16."""


class CpuW4A16(RowsKernel):
    """bfloat16 x, int4 weight, any zero point, any N; the group size divides K and is a multiple of 32, at most 256.

    A single group per channel may be longer: the op then multiplies codes, which are exact in bfloat16, and the scale
    is applied to its result.

    Packed: ``weight`` uint8 ``(N', K/2)``; ``params`` bfloat16 ``(G', N', 2)``: scale and added zero; ``zero`` int8
    ``(G', N')``, if the zero point is an integer. N' is N rounded up to 64; G' counts the groups of the op, which may
    be smaller than the format's. The neutral ``scale`` (and a float zero as ``added``) is kept only if ``params`` does
    not hold its exact value.
    """

    name = "torch.cpu.w4a16"

    def __init__(self, request: LinearRequest) -> None:
        self.format, self.n, self.k = request.weight, request.n, request.k
        self.out_dtype = torch.bfloat16
        self.group, self.float_zero = op_group(self.format, self.k), self.format.zero is ZeroPoint.FLOAT
        self.repeats = self.format.group(self.k) // self.group
        self.scale_after = self.format.groups(self.k) == 1 and not self.float_zero
        # Registered here: a trace cannot register ops. Inside the ops, the byte layout can be probed as well.
        self._traced, self._traced_codes = op(w4a16, _fake), op(int4_codes, _fake_codes)

    def pack(self, weight: QTensor) -> dict[str, Tensor]:
        check_weight(self.name, weight, self.format, self.n, self.k)
        packed = {"weight": _layout().pack(F.pad(weight.codes(), (0, 0, 0, -self.n % COLUMNS)))}
        scale, zero, added = weight.scale, weight.integer_zero(), torch.zeros_like(weight.scale)
        inside = torch.ones_like(scale) if self.scale_after else scale
        if zero is not None:
            added, packed["zero"] = -zero.float() * inside.float(), self._pad_params(zero.unsqueeze(-1)).squeeze(-1)
        elif weight.zero is not None:
            added = weight.zero
        packed["params"] = self._pad_params(torch.stack((inside.bfloat16(), added.bfloat16()), -1))
        if scale.dtype != torch.bfloat16 or self.scale_after:
            packed["scale"] = scale
            if self.float_zero:
                packed["added"] = added
        return packed

    def _pad_params(self, parameters: Tensor) -> Tensor:
        """Repeat and pad ``(G, N, p)`` to the op's groups and columns ``(G', N', p)``."""
        return F.pad(parameters.repeat_interleave(self.repeats, 0), (0, 0, 0, -self.n % COLUMNS))

    def unpack(self, packed: Packed) -> QTensor:
        params = packed["params"][:: self.repeats, : self.n].unbind(-1)
        scale = packed["scale"] if "scale" in packed else params[0].contiguous()
        zero = None
        if self.format.zero is ZeroPoint.INT:
            zero = packed["zero"][:: self.repeats, : self.n].contiguous()
        elif self.float_zero:
            zero = packed["added"] if "added" in packed else params[1].contiguous()
        call = self._traced_codes if torch.compiler.is_compiling() else int4_codes
        codes = call(packed["weight"])[: self.n]
        return QTensor.from_codes(codes, scale, zero, self.format)

    def run(self, x: Tensor, packed: Packed, bias: Tensor | None, **_runtime_params: Tensor) -> Tensor:
        call = self._traced if torch.compiler.is_compiling() else w4a16
        scale = packed["scale"] if self.scale_after else None
        weight = (packed["weight"], packed["params"], packed.get("zero"), scale)
        return call(x, self.n, *weight, bias, self.group, self.float_zero)


def w4a16(
    x: Tensor,
    n: int,
    weight: Tensor,
    params: Tensor,
    zero: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    group: int,
    float_zero: bool,
) -> Tensor:
    """Multiply x ``(M, K)`` bfloat16 by the packed weight of `CpuW4A16`, to ``(M, n)``."""
    if x.shape[0] >= _CROSSOVER:
        start = None
        if bias is not None:
            start, bias = split_bias(bias, None if scale is None else scale[0].float())
        y = _product(x, weight, params if scale is None else None, zero, start, group, float_zero)
    else:
        assert int4_product is not None  # without the op, the kernel is not offered
        y = int4_product(x.contiguous(), weight, group, params)
    if y.shape[1] != n:
        y = y[:, :n].contiguous()
    if scale is not None:
        y = y * scale.float()
    if bias is not None:
        y = y + bias
    return y.to(torch.bfloat16)


def int4_codes(weight: Tensor) -> Tensor:
    """Unpack a weight uint8 ``(N', K/2)`` to signed int8 codes ``(N', K)``."""
    return _layout().unpack(weight)


def _fake_codes(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[0], 2 * weight.shape[1], dtype=torch.int8)


def _fake(x: Tensor, n: int, *_packed: object) -> Tensor:
    return x.new_empty(x.shape[0], n)


def _product(
    x: Tensor,
    weight: Tensor,
    params: Tensor | None,
    zero: Tensor | None,
    start: Tensor | None,
    group: int,
    float_zero: bool,
) -> Tensor:
    """Multiply by dequantized columns ``(K, C)``, one chunk at a time in one reused buffer.

    Without ``params`` the columns hold centred codes. ``start``: bfloat16 ``(N,)``, added before the result is rounded.
    """
    n, k = weight.shape[0], weight.shape[1] * 2
    step = max(COLUMNS, _CHUNK // k // COLUMNS * COLUMNS)
    y, buffer = x.new_empty(x.shape[0], n), x.new_empty(k * min(step, n))
    start = None if start is None else F.pad(start, (0, n - start.shape[0]))
    for place in range(0, n, step):
        cut = slice(place, min(place + step, n))
        dense = buffer[: k * (cut.stop - place)].view(k, -1)
        _write_centred(dense, weight[cut], None if zero is None else zero[:, cut], group)
        if params is not None:
            _apply_scale(dense, params[:, cut], group, float_zero)
        if start is None:
            torch.mm(x, dense, out=y[:, cut])
        else:
            torch.addmm(start[cut], x, dense, out=y[:, cut])
    return y


def _write_centred(dense: Tensor, weight: Tensor, zero: Tensor | None, group: int) -> None:
    """Write codes minus zero points into ``dense`` ``(K, C)``."""
    layout = _layout()
    # Zero points are subtracted in int8 and made contiguous first: strided, they cost ten times as much.
    zeros = (None, None) if zero is None else layout.halves(zero + 8)
    for target, codes, z in zip(layout.halves(dense), layout.nibbles(weight), zeros, strict=True):
        blocks = codes.view(codes.shape[0], -1, group, codes.shape[2])
        blocks -= 8 if z is None else z.contiguous().unsqueeze(2)
        target.copy_(codes)


def _apply_scale(dense: Tensor, params: Tensor, group: int, float_zero: bool) -> None:
    """Multiply ``dense`` ``(K, C)`` by its scales and add float zero points, in place."""
    scale, added = (part.contiguous().unsqueeze(1) for part in params.unbind(-1))
    groups = dense.view(-1, group, dense.shape[1])
    if float_zero:
        torch.addcmul(added, groups, scale, out=groups)
    else:
        groups *= scale


def _layout() -> BlockLayout:
    layout = block_layout()
    assert layout is not None  # without a known layout, the kernel is not offered
    return layout


def why_not(request: LinearRequest) -> str:
    """Why the kernel does not support ``request``; empty if it does."""
    if request.device.type != "cpu" or not request.x_dtype == request.out_dtype == torch.bfloat16:
        return "it needs bfloat16 on the CPU"  # for other dtypes of x the op runs scalar code, 50 times slower
    if request.activation is not None or request.weight.dtype != "int4":
        return "it needs float activations and int4 weights"
    if not op_group(request.weight, request.k):
        return f"{request.weight} with K={request.k} cannot be split into groups of {GROUP_SIZES}"
    return "" if int4_product is not None and block_layout() is not None else "this torch has no known int4 product"


def kernel(request: LinearRequest) -> CpuW4A16:
    """Return the kernel for a request that `why_not` accepts."""
    return CpuW4A16(request)


def op_group(fmt: Format, k: int) -> int:
    """Return the largest group size of the op that divides the format's group size; 0 if the op cannot be used.

    The op takes scales and zero points in bfloat16. Their rounding errors average out only if there are many groups.
    """
    group = fmt.group(k)
    coarse = group > GROUP_SIZES[0] and (group != k or fmt.zero is ZeroPoint.FLOAT)
    if not k or k % group or coarse:
        return 0
    return next((size for size in GROUP_SIZES if group % size == 0), 0)
