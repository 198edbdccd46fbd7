"""Integer activations in torch ops: quantizing x, an exact product, and the epilogue.

Codes are centred first: ``q - z`` is at most 255 in magnitude. A float32 matrix product of integers is exact as long as
every partial sum stays within 2**24. Longer groups of K are split, and the partial products are added in int32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..discovery.kernels import Packed
from ..formats import Format, ZeroPoint
from ..weights.activations import (
    INT8_MAX,
    INT8_MIN,
    DynamicInt8,
    Int8Activation,
    OutputInt8,
    StaticInt8,
    dynamic_parameters,
    quantize_int8,
)
from .weights import WeightReader

EXACT = 1 << 24
"""float32 represents every integer up to this one."""

_PRODUCTS = 1 << 23
"""Elements of the per-group products held at a time: 32 MiB of float32."""
_TRACED_ROWS = 256
"""The M that chunks are sized for in a trace, in which the real M is unknown."""
_MAX_ROWS = 1024
"""More rows are processed in pieces if there are several groups, which multiply the size of the products."""

RuntimeParams = dict[str, Tensor]
Parameter = Tensor | float


def parameters(
    part: StaticInt8 | OutputInt8, runtime_params: RuntimeParams, prefix: str
) -> tuple[Parameter, Parameter]:
    """Return scale and zero point: floats, or the per-token tensors of this call as float32 ``(tokens, 1)``."""
    if part.per_token:
        scale, zero = runtime_params[f"{prefix}_scale"], runtime_params[f"{prefix}_zero_point"]
        return scale.reshape(-1, 1).float(), zero.reshape(-1, 1).float()
    return float(part.scale if part.scale is not None else 1.0), float(part.zero_point)


def centred_activations(
    activation: Int8Activation, x: Tensor, runtime_params: RuntimeParams
) -> tuple[Tensor, Parameter]:
    """Quantize x ``(..., K)``: ``q - z``, integers in float32, and the scale ``(..., 1)`` or a number."""
    zero: Parameter | None
    scale: Parameter
    if isinstance(activation, DynamicInt8):
        scale, zero = dynamic_parameters(x, activation.symmetric)
    else:
        scale, zero = parameters(activation, runtime_params, "x")
    if x.dtype == torch.int8:
        return x.float() - (0.0 if zero is None else zero), scale
    codes = (x.float() / scale).round_()
    if zero is None:
        return codes.clamp_(INT8_MIN, INT8_MAX), scale
    return codes.add_(zero).clamp_(INT8_MIN, INT8_MAX).sub_(zero), scale


def activation_bound(activation: Int8Activation) -> int:
    """The largest magnitude of a centred activation code."""
    symmetric = activation.symmetric if isinstance(activation, DynamicInt8) else False
    return 128 if symmetric else 255


def weight_bound(format: Format) -> int:
    """Return the largest magnitude of a centred weight code."""
    low, high = format.code_range
    return high - low if format.zero is ZeroPoint.INT else -low


def exact_groups(x: Tensor, w: Tensor, bound: int) -> Tensor:
    """Multiply per group, exactly: x ``(H, M, G, g)`` and w ``(H, n, G, g)``, integers in float32, to ``(H, G, M, n)``.

    ``bound``: the largest magnitude of a product of two elements.
    """
    length = x.shape[-1]
    parts = -(-length * bound // EXACT)
    x, w = x.transpose(1, 2), w.permute(0, 2, 3, 1)
    if parts <= 1:
        return torch.matmul(x, w)
    step, whole = -(-length // parts), torch.int32 if length * bound < 1 << 31 else torch.int64
    total = torch.matmul(x[..., :step], w[..., :step, :]).to(whole)
    for start in range(step, length, step):
        total += torch.matmul(x[..., start : start + step], w[..., start : start + step, :]).to(whole)
    return total.float()


def integer_product(reader: WeightReader, x: Tensor, packed: Packed, bound: int) -> Tensor:
    """Sum ``scale * exact product`` over the groups in float32: x ``(M, K)`` to ``(M, N)``.

    ``x``: centred codes in the reader's order of columns; ``bound``: the largest magnitude of one.
    """
    rows = x.shape[0]
    known = rows if type(rows) is int and not torch.compiler.is_compiling() else _TRACED_ROWS
    if known > _MAX_ROWS and reader.groups > 1:
        parts = torch.split(x, _MAX_ROWS)
        return torch.cat([integer_product(reader, part, packed, bound) for part in parts])
    if reader.padding:
        x = torch.nn.functional.pad(x, (0, reader.padding))
    x = x.reshape(rows, reader.groups, reader.group)
    elements = _PRODUCTS * reader.k // max(1, reader.groups * known)
    return concatenated([_chunk_product(reader, x, *chunk, bound) for chunk in reader.chunks(packed, elements)])


def _chunk_product(
    reader: WeightReader, x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bound: int
) -> Tensor:
    w = reader.centred(data, zero, torch.float32)
    products = exact_groups(x.unsqueeze(0), w.unsqueeze(0), bound * weight_bound(reader.format)).squeeze(0)
    y = products * scale.float().unsqueeze(1)
    if zero is not None and reader.format.zero is ZeroPoint.FLOAT:
        y = y + x.sum(-1).t().unsqueeze(-1) * zero.float().unsqueeze(1)
    return y.squeeze(0) if reader.groups == 1 else y.sum(0)


class ChannelProduct:
    """`integer_product` for the channel groups of a convolution, each with its own rows of the weight.

    The weight is decoded once. **Arguments:** ``heads``: the number of groups; the others as in `integer_product`.
    """

    def __init__(self, reader: WeightReader, packed: Packed, heads: int, bound: int) -> None:
        self.reader, self.heads = reader, heads
        self.bound = bound * weight_bound(reader.format)
        dense = reader.restore_order(reader.centred(packed["data"], packed.get("zero"), torch.float32))
        self.weight = dense.reshape(heads, dense.shape[0] // heads, reader.groups, reader.group)
        self.scale = self._per_group(packed["scale"])
        zero = packed.get("zero")
        self.zero = None if zero is None or reader.format.zero is not ZeroPoint.FLOAT else self._per_group(zero)

    def __call__(self, columns: Tensor) -> Tensor:
        """Multiply columns of centred codes ``(heads, K, M)``, in natural order, giving ``(heads, N/heads, M)``."""
        reader = self.reader
        if reader.padding:
            # Not F.pad, which torch 2.9 refuses for columns without positions.
            columns = torch.cat([columns, columns.new_zeros(self.heads, reader.padding, columns.shape[-1])], 1)
        x = columns.view(self.heads, reader.groups, reader.group, columns.shape[-1])
        # The weight stands in the place of x: its product with columns whose positions come last needs no copy.
        y = exact_groups(self.weight, x.permute(0, 3, 1, 2), self.bound) * self.scale
        if self.zero is not None:
            y = y + x.sum(2, keepdim=True) * self.zero
        return y.squeeze(1) if reader.groups == 1 else y.sum(1)

    def _per_group(self, parameter: Tensor) -> Tensor:
        """Reshape ``(G, N)`` to float32 ``(H, G, N/H, 1)``."""
        groups, n = parameter.shape
        return parameter.float().reshape(groups, self.heads, n // self.heads, 1).transpose(0, 1)


def concatenated(parts: list[Tensor], dim: int = -1) -> Tensor:
    """Concatenate chunks of a result, by default of output columns; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def split_bias(bias: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Split ``bias = inside * scale + rest``: ``dtype`` to start the product from, float32 to add to its result.

    If the whole bias were added after the product was rounded to ``dtype``, cancellation would expose that rounding.
    """
    wide = bias.float()
    # What overflows is left to the rest.
    inside = (wide if scale is None else wide / scale).to(dtype).nan_to_num(0.0, 0.0, 0.0)
    return inside, wide - (inside.float() if scale is None else inside.float() * scale)


def finish(
    y: Tensor,
    scale: Parameter,
    bias: Tensor | None,
    output: OutputInt8 | None,
    dtype: torch.dtype,
    runtime_params: RuntimeParams,
) -> Tensor:
    """Apply the epilogue: ``y * scale + bias`` in float32, rounded once to ``dtype`` or to int8 codes.

    ``y``: float32 ``(..., N)``, overwritten.
    """
    if isinstance(scale, Tensor) or scale != 1.0:
        y = y.mul_(scale)
    if bias is not None:
        y = y.add_(bias.float())
    if output is None:
        return y.to(dtype)
    return quantize_int8(y, *parameters(output, runtime_params, "out"))
