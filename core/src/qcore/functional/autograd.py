"""Gradients with respect to x through frozen quantized weights, for every kernel of every plugin.

The backward pass multiplies by the dequantized weight, ``dx = dy @ W`` (for a convolution, the transposed convolution),
and sums dy for the bias. For quantized activations this is the straight-through estimator (Bengio et al., 2013), which
treats rounding as the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input

from ..contracts import Conv2dRequest, GroupedLinearRequest, Request
from ..contracts.conv2d import dense_kernel
from ..contracts.grouped import expert_rows
from ..discovery.kernels import Kernel, Packed
from ..formats import Format
from ..weights.qtensor import QTensor

_CHUNK_ELEMENTS = 1 << 23
"""Weights dequantized at a time in the backward pass, so that the whole dense weight is never in memory."""

_NO_PARAMS: dict[str, Tensor] = {}


class _Frozen(torch.autograd.Function):
    """Calls a kernel; differentiates it with respect to x and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        kernel: Kernel,
        packed: Packed,
        request: Request,
        runtime_params: Mapping[str, Tensor],
        _guarded: str,
    ) -> Tensor:
        ctx.kernel, ctx.packed, ctx.request, ctx.shape = kernel, packed, request, x.shape
        ctx.offsets = runtime_params.get("offsets")
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return kernel(x, packed, bias, **runtime_params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.kernel.unpack(ctx.packed)
            if isinstance(ctx.request, GroupedLinearRequest):
                dx = _grouped_input_gradient(grad, weight, ctx.offsets).to(ctx.x_dtype)
            else:
                dx = _input_gradient(grad, weight, ctx.request, ctx.shape).to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            dbias = _bias_gradient(grad, ctx.request.contract, ctx.offsets).to(ctx.bias_dtype)
        return dx, dbias, None, None, None, None, None


def call_differentiably(
    x: Tensor,
    bias: Tensor | None,
    kernel: Kernel,
    packed: Packed,
    request: Request,
    runtime_params: Mapping[str, Tensor] = _NO_PARAMS,
) -> Tensor:
    """Call ``kernel(x, packed, bias, **runtime_params)``, differentiable with respect to x and bias."""
    apply: Any = _Frozen.apply
    guarded = _describe(request.weight) if torch.compiler.is_compiling() else ""
    return apply(x, bias, kernel, packed, request, runtime_params, guarded)  # type: ignore[no-any-return]


def _describe(format: Format) -> str:
    """Describe a format as an argument of the traced function, so that dynamo guards on it.

    Only the backward pass reads the format, which a trace does not guard: the graph would be reused for weights of
    another format. ``str(format)`` would not do, since dynamo takes it for a constant without a guard.
    """
    return f"{format.dtype} {format.group_size} {format.zero.name} {format.scale.name} {format.layout.name}"


def _input_gradient(grad: Tensor, weight: QTensor, request: Request, shape: torch.Size) -> Tensor:
    if not (request.n and request.k):
        return grad.new_zeros(shape)
    if isinstance(request, Conv2dRequest):
        geometry = (request.stride, request.padding, request.dilation, request.groups)
        dense = dense_kernel(weight, request, grad.dtype)
        return conv2d_input(shape, dense, grad, *geometry)  # type: ignore[no-any-return, no-untyped-call]
    rows = grad.reshape(-1, request.n)
    step = max(1, _CHUNK_ELEMENTS // request.k)
    dx = grad.new_zeros(rows.shape[0], request.k, dtype=torch.float32)
    for start in range(0, request.n, step):
        part = weight.narrow(0, start, min(step, request.n - start)).dequantize(grad.dtype)
        dx = dx + rows[:, start : start + step] @ part
    return dx.view(shape)


def _grouped_input_gradient(grad: Tensor, weight: QTensor, offsets: Tensor) -> Tensor:
    """The gradient with respect to x ``(T, K)``, float32, of ``grad`` ``(T, N)``."""
    dx = grad.new_zeros(grad.shape[0], weight.shape[2], dtype=torch.float32)
    for expert, rows in expert_rows(offsets.tolist()):
        dx[rows] = (grad[rows] @ weight[expert].dequantize(grad.dtype)).float()
    return dx


def _bias_gradient(grad: Tensor, contract: str, offsets: Tensor | None) -> Tensor:
    if offsets is not None:
        return _grouped_bias_gradient(grad, offsets)
    if contract == "conv2d":
        return grad.sum((0, 2, 3))
    return grad.sum(tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad


def _grouped_bias_gradient(grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient with respect to the bias ``(E, N)``, float32, of ``grad`` ``(T, N)``."""
    rows = torch.arange(grad.shape[0], device=grad.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, rows, right=True)
    sums = grad.new_zeros(offsets.shape[0] + 1, grad.shape[1], dtype=torch.float32)
    return sums.index_add(0, expert, grad.float())[:-1]
