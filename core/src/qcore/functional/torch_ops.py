"""``torch.ops.qcore.*``: functional ops with names, arguments and bytes as in torch_xla, torchao and ExecuTorch.

Each op wraps its tensors in a neutral `QTensor` and resolves a kernel in the usual way. Packed weights are cached,
weakly, by the identity and version of the tensors. Gradients with respect to x and bias are those of `qcore.linear`; in
a trace (``torch.compile``), an x that requires a gradient is an error. Sources of the conventions: torch_xla's
``xla::quantized_matmul``, the torchao RFC's ``bf16i4bf16_rowwise``, and ExecuTorch's Vulkan ops.
"""

# ruff: noqa: A002, ARG001 - fakes take the arguments of their ops, which have the names used in those libraries

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..contracts import Conv2dRequest, EmbeddingRequest, LinearRequest
from ..contracts.conv2d import check_image, output_size
from ..contracts.embedding import check_index_dtype
from ..formats import FLOAT_SCALES, Format, ZeroPoint
from ..formats.bits import interleave, unpack_nibbles
from ..weights.activations import Activation, DynamicInt8, OutputInt8, StaticInt8
from ..weights.qtensor import QTensor
from .calls import PackedCache, StoreEntry, needs_grad
from .checks import check_bias, check_runtime_params
from .op_library import define, require, require_float

_cache = PackedCache()


def _entry(tensors: tuple[Tensor | None, ...], extra: Hashable, build: Callable[[], QTensor]) -> StoreEntry:
    return _cache.store(tensors, extra, build)


def _scale(scale: Tensor) -> Tensor:
    return scale if scale.dtype in FLOAT_SCALES else scale.float()


def _common_dtype(scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
    """Convert scale and float zero point to a common dtype of weights, without rounding either one."""
    scale = _scale(scale)
    return (scale, zero_point) if scale.dtype == zero_point.dtype else (scale.float(), zero_point.float())


def _run(
    entry: StoreEntry,
    x: Tensor,
    shape: tuple[int, int],
    fmt: Format,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    output: OutputInt8 | None = None,
    out_dtype: torch.dtype | None = None,
    **runtime_params: Tensor,
) -> Tensor:
    check_bias(bias, shape[0], x.device)
    if runtime_params:
        check_runtime_params(runtime_params, x.shape[:-1].numel(), x.device)
    out = torch.int8 if output else out_dtype or x.dtype
    sizes = (*shape, None, fmt, activation, output, bias is not None, needs_grad(x, bias, output))
    return _contiguous(entry.run(LinearRequest(x.device, x.dtype, out, *sizes), x, bias, runtime_params))


def _contiguous(result: Tensor) -> Tensor:
    # The fake promises contiguous strides; a kernel's result may have any.
    return result.contiguous()


# xla::quantized_matmul


def _check_matmul(x: Tensor, w: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: int) -> tuple[int, int]:
    op = "quantized_matmul"
    require_float(op, x)
    require(w.dtype == torch.int8, op, f"w has dtype {w.dtype}; int4 values are stored in int8, too.")
    if block_size == -1:
        require(w.dim() == 2, op, f"per-channel w has shape {tuple(w.shape)}; it must be (N, K).")
        n, k = w.shape
        wanted: tuple[int, ...] = (n,)
    else:
        fits = w.dim() == 3 and w.shape[1] == block_size
        require(fits, op, f"blockwise w has shape {tuple(w.shape)}; it must be (K/{block_size}, {block_size}, N).")
        n, k = w.shape[2], w.shape[0] * w.shape[1]
        wanted = (w.shape[0], n)
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if value is not None:
            require(tuple(value.shape) == wanted, op, f"{name} has shape {tuple(value.shape)}; it must be {wanted}.")
    require(x.dim() > 0 and x.shape[-1] == k, op, f"x has shape {tuple(x.shape)}; its last dimension must be {k}.")
    return n, k


def _fake_matmul(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    block_size: int = -1,
    int4_weight: bool = False,
    quantize_activation: bool = False,
) -> Tensor:
    n, _ = _check_matmul(x, w, scale, zero_point, block_size)
    return x.new_empty((*x.shape[:-1], n))


@define(
    "quantized_matmul(Tensor x, Tensor w, Tensor scale, Tensor? zero_point=None, int block_size=-1, "
    "bool int4_weight=False, bool quantize_activation=False) -> Tensor",
    _fake_matmul,
)
def quantized_matmul(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    block_size: int = -1,
    int4_weight: bool = False,
    quantize_activation: bool = False,
) -> Tensor:
    """Compute ``x @ (w * scale - zero_point)^T`` in x's dtype.

    Per channel (``block_size`` -1): ``w`` int8 ``(N, K)``, ``scale`` and ``zero_point`` ``(N,)``. Blockwise: ``w`` int8
    ``(K/bs, bs, N)``, ``scale`` and ``zero_point`` ``(K/bs, N)``. ``zero_point`` is a float, already multiplied by the
    scale, and is subtracted. ``int4_weight``: the values fit int4. ``quantize_activation``: quantize x to int8 per
    token, symmetric.
    """
    shape = _check_matmul(x, w, scale, zero_point, block_size)
    zero = ZeroPoint.NONE if zero_point is None else ZeroPoint.FLOAT
    fmt = Format("int4" if int4_weight else "int8", None if block_size == -1 else block_size, zero)

    def build() -> QTensor:
        codes = w if block_size == -1 else w.permute(2, 0, 1).reshape(shape)
        _require_int4(codes, int4_weight)
        groups = (-1, shape[0])
        if zero_point is None:
            return QTensor.from_codes(codes, _scale(scale).reshape(groups), None, fmt)
        s, zero = _common_dtype(scale, zero_point)
        return QTensor.from_codes(codes, s.reshape(groups), -zero.reshape(groups), fmt)

    entry = _entry((w, scale, zero_point), ("quantized_matmul", fmt), build)
    return _run(entry, x, shape, fmt, activation=DynamicInt8() if quantize_activation else None)


def _require_int4(codes: Tensor, int4_weight: bool) -> None:
    if int4_weight and codes.numel():
        low, high = (int(v) for v in codes.aminmax())
        require(low >= -8 and high <= 7, "quantized_matmul", f"int4_weight is set, but w spans {low}..{high}.")


# torchao's bf16i4bf16_rowwise


def _check_rowwise(x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[int, int, int]:
    op = "bf16i4bf16_rowwise"
    require_float(op, x)
    fits = weight.dim() == 2 and weight.dtype in (torch.int8, torch.uint8)
    require(fits, op, f"weight has dtype {weight.dtype}, shape {tuple(weight.shape)}; it must be int8 (N, K/2).")
    n, k = weight.shape[0], weight.shape[1] * 2
    fits = scale.dim() == 2 and scale.shape == zero_point.shape and scale.shape[1] == n and scale.shape[0] > 0
    shapes = f"{tuple(scale.shape)}, {tuple(zero_point.shape)}"
    require(fits, op, f"scale and zero_point have shapes {shapes}; both must be (K/g, N).")
    require(k % scale.shape[0] == 0, op, f"scale has {scale.shape[0]} groups, which do not divide K = {k}.")
    require(x.dim() > 0 and x.shape[-1] == k, op, f"input has shape {tuple(x.shape)}; its last dimension must be {k}.")
    return n, k, k // scale.shape[0]


def _fake_rowwise(input: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], _check_rowwise(input, weight, scale, zero_point)[0]))


@define("bf16i4bf16_rowwise(Tensor input, Tensor weight, Tensor scale, Tensor zero_point) -> Tensor", _fake_rowwise)
def bf16i4bf16_rowwise(input: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Compute ``input @ (q * scale + zero_point)^T``.

    ``weight`` int8 ``(N, K/2)``: signed nibbles, low = even k. ``scale`` and float ``zero_point``: ``(K/g, N)``.
    """
    n, k, group = _check_rowwise(input, weight, scale, zero_point)
    fmt = Format("int4", group, ZeroPoint.FLOAT)

    def build() -> QTensor:
        s, zero = _common_dtype(scale, zero_point)
        return QTensor(weight.contiguous().view(torch.uint8), s, zero, (n, k), fmt)

    return _run(_entry((weight, scale, zero_point), "bf16i4bf16_rowwise", build), input, (n, k), fmt)


# ExecuTorch Vulkan: int8 per-channel symmetric weights

_Q8CSW = Format("int8")


def _check_q8csw(op: str, x: Tensor, weights: Tensor, scales: Tensor, sums: Tensor | None = None) -> tuple[int, int]:
    require_float(op, x)
    fits = weights.dim() == 2 and weights.dtype == torch.int8
    require(fits, op, f"weights have dtype {weights.dtype}, shape {tuple(weights.shape)}; they must be int8 (N, K).")
    n, k = weights.shape
    require(tuple(scales.shape) == (n,), op, f"weight_scales have shape {tuple(scales.shape)}; they must be ({n},).")
    if sums is not None:
        fits = sums.dtype == torch.int32 and tuple(sums.shape) == (n,)
        form = f"dtype {sums.dtype}, shape {tuple(sums.shape)}"
        require(fits, op, f"weight_sums have {form}; they must be int32 ({n},).")
    return n, k


def _check_linear_q8csw(
    op: str, x: Tensor, weights: Tensor, scales: Tensor, sums: Tensor | None = None
) -> tuple[int, int]:
    n, k = _check_q8csw(op, x, weights, scales, sums)
    require(x.dim() > 0 and x.shape[-1] == k, op, f"x has shape {tuple(x.shape)}; its last dimension must be {k}.")
    return n, k


def _q8csw_entry(weights: Tensor, scales: Tensor) -> StoreEntry:
    return _entry((weights, scales), "q8csw", lambda: QTensor.from_codes(weights, _scale(scales)[None], None, _Q8CSW))


def _fake_linear_q8csw(x: Tensor, weights: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], _check_linear_q8csw("linear_q8csw", x, weights, weight_scales)[0]))


@define("linear_q8csw(Tensor x, Tensor weights, Tensor weight_scales, Tensor? bias=None) -> Tensor", _fake_linear_q8csw)
def linear_q8csw(x: Tensor, weights: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ (weights * weight_scales)^T + bias`` with float accumulation.

    ``weights``: int8 ``(N, K)``; ``weight_scales``: ``(N,)``.
    """
    shape = _check_linear_q8csw("linear_q8csw", x, weights, weight_scales)
    return _run(_q8csw_entry(weights, weight_scales), x, shape, _Q8CSW, bias)


def _fake_linear_q8ta_q8csw(
    x: Tensor,
    input_scale: float,
    input_zero_point: int,
    weights: Tensor,
    weight_sums: Tensor | None,
    weight_scales: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    n, _ = _check_linear_q8csw("linear_q8ta_q8csw", x, weights, weight_scales, weight_sums)
    return x.new_empty((*x.shape[:-1], n))


@define(
    "linear_q8ta_q8csw(Tensor x, float input_scale, int input_zero_point, Tensor weights, Tensor? weight_sums, "
    "Tensor weight_scales, Tensor? bias=None) -> Tensor",
    _fake_linear_q8ta_q8csw,
)
def linear_q8ta_q8csw(
    x: Tensor,
    input_scale: float,
    input_zero_point: int,
    weights: Tensor,
    weight_sums: Tensor | None,
    weight_scales: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Quantize x per tensor to -128..127 and accumulate in int32; the result is float.

    ``weight_sums``: int32 ``(N,)``, as in ExecuTorch; only validated, because kernels compute the sums while packing.
    """
    shape = _check_linear_q8csw("linear_q8ta_q8csw", x, weights, weight_scales, weight_sums)
    activation = StaticInt8(input_scale, input_zero_point)
    return _run(_q8csw_entry(weights, weight_scales), x, shape, _Q8CSW, bias, activation)


_CONV_TAIL = "Tensor? bias, int[] kernel_size, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor"


def _conv_request(
    op: str, x: Tensor, weights: Tensor, scales: Tensor, sums: Tensor | None, bias: Any, activation: Any, geometry: Any
) -> Conv2dRequest:
    n, k = _check_q8csw(op, x, weights, scales, sums)
    require(x.dim() == 4, op, f"x has shape {tuple(x.shape)}; it must be (B, IC, H, W).")
    check_bias(bias, n, x.device)
    *pairs, groups = geometry
    fits = all(len(p) in (1, 2) for p in pairs)
    require(fits, op, "kernel_size, stride, padding and dilation take one or two ints.")
    kernel, stride, padding, dilation = ((int(p[0]), int(p[-1])) for p in pairs)
    sizes = (x.shape[1], n, kernel, stride, padding, dilation, int(groups))
    training = needs_grad(x, bias)
    request = Conv2dRequest(x.device, x.dtype, x.dtype, *sizes, _Q8CSW, activation, None, bias is not None, training)
    require(request.k == k, op, f"weights have {k} columns; they need KH*KW*IC/groups = {request.k}.")
    return request


def _fake_conv(request: Conv2dRequest, x: Tensor) -> Tensor:
    check_image("conv2d", x, request)
    return x.new_empty((x.shape[0], request.n, *output_size(request, x.shape[2], x.shape[3])))


def _fake_conv2d_q8csw(
    x: Tensor, weights: Tensor, weight_scales: Tensor, bias: Tensor | None, *geometry: Any
) -> Tensor:
    return _fake_conv(_conv_request("conv2d_q8csw", x, weights, weight_scales, None, bias, None, geometry), x)


@define(f"conv2d_q8csw(Tensor x, Tensor weights, Tensor weight_scales, {_CONV_TAIL}", _fake_conv2d_q8csw)
def conv2d_q8csw(x: Tensor, weights: Tensor, weight_scales: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Convolve float x with the dequantized weight. ``weights``: int8 ``(OC, KH*KW*IC/groups)``, columns (KH, KW, IC).

    ``geometry``: kernel_size, stride, padding, dilation (one or two ints each) and groups.
    """
    request = _conv_request("conv2d_q8csw", x, weights, weight_scales, None, bias, None, geometry)
    return _contiguous(_q8csw_entry(weights, weight_scales).run(request, x, bias, {}))


def _fake_conv2d_q8ta_q8csw(
    x: Tensor, scale: float, zero: int, weights: Tensor, sums: Tensor | None, scales: Tensor, bias: Any, *geometry: Any
) -> Tensor:
    return _fake_conv(_conv_request("conv2d_q8ta_q8csw", x, weights, scales, sums, bias, None, geometry), x)


@define(
    "conv2d_q8ta_q8csw(Tensor x, float input_scale, int input_zero_point, Tensor weights, Tensor? weight_sums, "
    f"Tensor weight_scales, {_CONV_TAIL}",
    _fake_conv2d_q8ta_q8csw,
)
def conv2d_q8ta_q8csw(
    x: Tensor,
    input_scale: float,
    input_zero_point: int,
    weights: Tensor,
    weight_sums: Tensor | None,
    weight_scales: Tensor,
    bias: Tensor | None,
    *geometry: Any,
) -> Tensor:
    """`conv2d_q8csw` with x quantized per tensor to -128..127 and int32 accumulation."""
    activation = StaticInt8(input_scale, input_zero_point)
    request = _conv_request("conv2d_q8ta_q8csw", x, weights, weight_scales, weight_sums, bias, activation, geometry)
    return _contiguous(_q8csw_entry(weights, weight_scales).run(request, x, bias, {}))


# ExecuTorch Vulkan: int8 activations per token, grouped int4 weights


def _check_qga4w(op: str, x: Tensor, weights: Tensor, group: int, scales: Tensor, zeros: Tensor) -> tuple[int, int]:
    require(x.dtype == torch.int8, op, f"x has dtype {x.dtype}; it must hold int8 codes.")
    fits = weights.dim() == 2 and weights.dtype == torch.uint8
    form = f"dtype {weights.dtype}, shape {tuple(weights.shape)}"
    require(fits, op, f"weights have {form}; they must be uint8 (N, K/2).")
    n, k = weights.shape[0], weights.shape[1] * 2
    require(group > 0 and k % group == 0, op, f"group_size {group} must divide K = {k}.")
    for name, value in (("weight_scales", scales), ("weight_zeros", zeros)):
        fits = tuple(value.shape) == (k // group, n)
        require(fits, op, f"{name} have shape {tuple(value.shape)}; they must be (K/g, N) = {(k // group, n)}.")
    require(x.dim() > 0 and x.shape[-1] == k, op, f"x has shape {tuple(x.shape)}; its last dimension must be {k}.")
    return n, k


def _fake_qga4w(
    x: Tensor, scale: Tensor, zero: Tensor, weights: Tensor, group_size: int, scales: Tensor, zeros: Tensor
) -> Tensor:
    n, _ = _check_qga4w("linear_qta8a_qga4w", x, weights, group_size, scales, zeros)
    return x.new_empty((*x.shape[:-1], n), dtype=torch.float32)


def _fake_qga4w_qta8o(x: Tensor, *arguments: Any) -> Tensor:
    return _fake_qga4w(x, *arguments[:6]).to(torch.int8)


def _qga4w(
    op: str,
    x: Tensor,
    input_scale: Tensor,
    input_zero_point: Tensor,
    weights: Tensor,
    group_size: int,
    scales: Tensor,
    zeros: Tensor,
    **output: Any,
) -> Tensor:
    shape = _check_qga4w(op, x, weights, group_size, scales, zeros)
    fmt = Format("int4", group_size, ZeroPoint.INT)

    require(not zeros.is_floating_point(), op, f"weight_zeros have dtype {zeros.dtype}; they must be integers.")

    def build() -> QTensor:
        # Checked before the cast to int8, in which 256 would become 0.
        fits = not zeros.numel() or (int(zeros.min()) >= -8 and int(zeros.max()) <= 7)
        require(fits, op, "weight_zeros hold values outside -8..7, the range of int4 codes.")
        odd, even = unpack_nibbles(weights ^ 0x88)
        return QTensor.from_codes(interleave(even, odd), _scale(scales), zeros.to(torch.int8), fmt)

    entry = _entry((weights, scales, zeros), ("qga4w", fmt), build)
    runtime_params: Any = {
        "x_scale": _per_token(op, x, input_scale),
        "x_zero_point": _per_token(op, x, input_zero_point),
    }
    activation = StaticInt8(per_token=True)
    return _run(entry, x, shape, fmt, activation=activation, out_dtype=torch.float32, **runtime_params, **output)


def _per_token(op: str, x: Tensor, value: Tensor) -> Tensor:
    tokens = x.shape[:-1].numel()
    require(value.numel() == tokens, op, f"a per-token parameter has {value.numel()} values; x has {tokens} tokens.")
    return value.reshape(-1)


@define(
    "linear_qta8a_qga4w(Tensor x, Tensor input_scale, Tensor input_zero_point, Tensor weights, int group_size, "
    "Tensor weight_scales, Tensor weight_zeros) -> Tensor",
    _fake_qga4w,
)
def linear_qta8a_qga4w(
    x: Tensor,
    input_scale: Tensor,
    input_zero_point: Tensor,
    weights: Tensor,
    group_size: int,
    weight_scales: Tensor,
    weight_zeros: Tensor,
) -> Tensor:
    """Int8 codes in, float32 out.

    ``x`` int8 ``(..., K)`` with per-token scale and zero point ``(tokens,)``. ``weights`` uint8 ``(N, K/2)``, offset
    binary (q + 8), high nibble = even k; scales and zeros ``(K/g, N)``, ``w = (q - z) * s`` with q and z signed.
    """
    op, weight = "linear_qta8a_qga4w", (weights, group_size, weight_scales, weight_zeros)
    return _qga4w(op, x, input_scale, input_zero_point, *weight)


@define(
    "linear_qta8a_qga4w_qta8o(Tensor x, Tensor input_scale, Tensor input_zero_point, Tensor weights, int group_size, "
    "Tensor weight_scales, Tensor weight_zeros, Tensor output_scale, Tensor output_zero_point) -> Tensor",
    _fake_qga4w_qta8o,
)
def linear_qta8a_qga4w_qta8o(
    x: Tensor,
    input_scale: Tensor,
    input_zero_point: Tensor,
    weights: Tensor,
    group_size: int,
    weight_scales: Tensor,
    weight_zeros: Tensor,
    output_scale: Tensor,
    output_zero_point: Tensor,
) -> Tensor:
    """As `linear_qta8a_qga4w`, requantized per token: ``clamp(round(y / s) + z, -128, 127)`` as int8."""
    op, weight = "linear_qta8a_qga4w_qta8o", (weights, group_size, weight_scales, weight_zeros)
    runtime_params: Any = {
        "out_scale": _per_token(op, x, output_scale),
        "out_zero_point": _per_token(op, x, output_zero_point),
    }
    return _qga4w(op, x, input_scale, input_zero_point, *weight, output=OutputInt8(per_token=True), **runtime_params)


# ExecuTorch Vulkan: embedding


def _check_q4gsw(weight: Tensor, scales: Tensor, group_size: int) -> tuple[int, int, int]:
    op = "embedding_q4gsw"
    fits = weight.dim() == 2 and weight.dtype == torch.uint8
    require(fits, op, f"weight has dtype {weight.dtype}, shape {tuple(weight.shape)}; it must be uint8 (V, D/2).")
    v, d = weight.shape[0], weight.shape[1] * 2
    require(group_size > 0 and d % group_size == 0, op, f"group_size {group_size} must divide D = {d}.")
    groups = d // group_size
    fits = tuple(scales.shape) in ((v, groups), (groups, v)) or (groups == 1 and tuple(scales.shape) == (v,))
    require(fits, op, f"weight_scales have shape {tuple(scales.shape)}; they must be (V, D/g) = {(v, groups)}.")
    return v, d, groups


def _fake_q4gsw(
    weight: Tensor, weight_scales: Tensor, group_size: int, indices: Tensor, is_linear_weight: bool = False
) -> Tensor:
    _, d, _ = _check_q4gsw(weight, weight_scales, group_size)
    check_index_dtype(indices)
    return _scale(weight_scales).new_empty((*indices.shape, d))


@define(
    "embedding_q4gsw(Tensor weight, Tensor weight_scales, int group_size, Tensor indices, bool is_linear_weight=False) "
    "-> Tensor",
    _fake_q4gsw,
)
def embedding_q4gsw(
    weight: Tensor, weight_scales: Tensor, group_size: int, indices: Tensor, is_linear_weight: bool = False
) -> Tensor:
    """Look up rows of a grouped symmetric int4 table, in the scales' dtype.

    ``weight``: uint8 ``(V, D/2)``, offset binary (q + 8); the high nibble holds even d, or the low nibble if
    ``is_linear_weight``. ``weight_scales``: ``(V, D/g)``; ``(D/g, V)`` is accepted if only that shape fits.
    """
    v, d, groups = _check_q4gsw(weight, weight_scales, group_size)
    check_index_dtype(indices)
    fmt = Format("int4", group_size)

    def build() -> QTensor:
        low, high = unpack_nibbles(weight ^ 0x88)
        codes = interleave(low, high) if is_linear_weight else interleave(high, low)
        scale = _scale(weight_scales)
        scale = scale if tuple(scale.shape) == (groups, v) != (v, groups) else scale.reshape(v, groups).t().contiguous()
        return QTensor.from_codes(codes, scale, None, fmt)

    entry = _entry((weight, weight_scales), ("q4gsw", group_size, is_linear_weight), build)
    request = EmbeddingRequest(weight.device, _scale(weight_scales).dtype, v, d, fmt)
    return _contiguous(entry.run(request, indices, None, {}))
