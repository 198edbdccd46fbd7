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
from torch.nn import functional as F
from torch.nn.grad import conv2d_input
from torch.utils._pytree import tree_leaves, tree_map

from ..contracts import Conv2dRequest, GroupedLinearRequest, Request
from ..contracts.conv2d import dense_kernel
from ..contracts.grouped import expert_rows, read_ends
from ..discovery.kernels import Kernel, Packed
from ..formats import Format
from ..formats.tracing import in_forward_mode, is_transformed, outside_transforms, without_base
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
        _remember(ctx, x, bias, kernel, packed, request, runtime_params)
        return without_base(kernel(x, packed, bias, **runtime_params))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (*_gradients(ctx, *grads), None, None, None, None, None)


class _Transformed(torch.autograd.Function):
    """As `_Frozen`, under the transforms of ``torch.func`` and in forward mode, which `torch.compile` cannot trace."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        x, bias, kernel, packed, _, runtime_params = inputs
        # A copy: torch refuses a tangent for a view of a larger tensor, which a kernel with padded rows may return.
        return kernel(x, packed, bias, **runtime_params).clone()  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, *inputs)
        ctx.out_shape, ctx.out_dtype = output.shape, output.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (*_gradients(ctx, *grads), None, None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        dx, dbias, *_ = tangents
        weight = _unpacked(ctx.kernel, ctx.packed)
        return _tangent(dx, dbias, weight, ctx.request, ctx.out_shape, ctx.offsets).to(ctx.out_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        x, bias, kernel, packed, request, runtime_params = inputs
        x_dim, *others = in_dims
        if x_dim is None or any(dim is not None for dim in tree_leaves(others)) or runtime_params:
            each = (
                call_differentiably(*tree_map(lambda t, dim, i=i: _selected(t, dim, i), inputs, in_dims))
                for i in range(info.batch_size)
            )
            return torch.stack([*each]), 0
        x = x.movedim(x_dim, 0)
        if request.contract != "conv2d":  # rows are independent of each other, as are images
            return call_differentiably(x, bias, kernel, packed, request), 0
        y = call_differentiably(x.flatten(0, 1), bias, kernel, packed, request)
        return y.reshape(*x.shape[:2], *y.shape[1:]), 0


def _selected(value: Any, dim: int | None, index: int) -> Any:
    return value if dim is None else value.select(dim, index)


def _remember(ctx: Any, *inputs: Any) -> None:
    """Keep what the derivatives need of the arguments of `call_differentiably`."""
    x, bias, ctx.kernel, ctx.packed, ctx.request, runtime_params = inputs
    ctx.shape, ctx.offsets = x.shape, runtime_params.get("offsets")
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients with respect to x and bias."""
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        weight = _unpacked(ctx.kernel, ctx.packed)
        if isinstance(ctx.request, GroupedLinearRequest):
            dx = _grouped_input_gradient(grad, weight, ctx.offsets).to(ctx.x_dtype)
        else:
            dx = _input_gradient(grad, weight, ctx.request, ctx.shape).to(ctx.x_dtype)
    if ctx.needs_input_grad[1]:
        dbias = _bias_gradient(grad, ctx.request.contract, ctx.offsets).to(ctx.bias_dtype)
    return dx, dbias


def _unpacked(kernel: Kernel, packed: Packed) -> QTensor:
    if torch.compiler.is_compiling():
        return kernel.unpack(packed)
    with outside_transforms():
        return kernel.unpack(packed)


def _straight_through(*inputs: Any) -> Tensor:
    """`call_differentiably` in ops that dynamo can trace in forward mode: the tangent is that of a dense product."""
    x, bias, kernel, packed, request, runtime_params = inputs
    y: Tensor = kernel(x.detach(), packed, None if bias is None else bias.detach(), **runtime_params)
    dense = _tangent(x, bias, kernel.unpack(packed), request, y.shape, runtime_params.get("offsets"))
    return y + (dense - dense.detach()).to(y.dtype)


def needs_derivatives(x: Tensor, bias: Tensor | None) -> bool:
    """Whether a call needs `call_differentiably`: for gradients, or under a transform or in forward mode."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return True
    return in_forward_mode() or (not torch.compiler.is_compiling() and is_transformed())


def call_differentiably(
    x: Tensor,
    bias: Tensor | None,
    kernel: Kernel,
    packed: Packed,
    request: Request,
    runtime_params: Mapping[str, Tensor] = _NO_PARAMS,
) -> Tensor:
    """Call ``kernel(x, packed, bias, **runtime_params)``, differentiable with respect to x and bias."""
    apply: Any
    if torch.compiler.is_compiling():
        if in_forward_mode():
            return _straight_through(x, bias, kernel, packed, request, runtime_params)
        _read_numbers(request)
        apply, guarded = _Frozen.apply, _describe(request.weight)
    elif is_transformed():
        apply = _Transformed.apply
        return apply(x, bias, kernel, packed, request, dict(runtime_params))  # type: ignore[no-any-return]
    else:
        apply, guarded = _Frozen.apply, ""
    return apply(x, bias, kernel, packed, request, runtime_params, guarded)  # type: ignore[no-any-return]


def _read_numbers(request: Request) -> None:
    """Read the floats of static activations where dynamo makes them inputs of the whole graph; see `smallest_scale`.

    Dynamo reads what is computed with.
    """
    for name in ("activation", "output"):
        scale = getattr(getattr(request, name, None), "scale", None)
        _ = None if scale is None else scale * 1.0


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


def _tangent(
    dx: Tensor | None,
    dbias: Tensor | None,
    weight: QTensor,
    request: Request,
    shape: torch.Size,
    offsets: Tensor | None,
) -> Tensor:
    """The derivative of a result of ``shape`` in the directions ``dx`` of x and ``dbias`` of the bias; one is given."""
    dy = None if dx is None else _product(dx, weight, request, offsets)
    if dbias is None:
        assert dy is not None
        return dy
    added = _bias_tangent(dbias, shape, request.contract, offsets)
    return added if dy is None else dy + added


def _product(x: Tensor, weight: QTensor, request: Request, offsets: Tensor | None) -> Tensor:
    """The derivative of the result in the direction x: its product with the dense weight."""
    if isinstance(request, Conv2dRequest):
        geometry = (request.stride, request.padding, request.dilation, request.groups)
        return F.conv2d(x, dense_kernel(weight, request, x.dtype), None, *geometry)
    if offsets is not None:
        y = x.new_zeros(x.shape[0], request.n)
        for expert, rows in expert_rows(read_ends(offsets)):
            y = y.slice_scatter(x[rows] @ weight[expert].dequantize(x.dtype).t(), 0, rows.start, rows.stop)
        return y
    step = max(1, _CHUNK_ELEMENTS // max(1, request.k))
    starts = range(0, request.n, step)
    cuts = (weight.narrow(0, start, min(step, request.n - start)).dequantize(x.dtype) for start in starts)
    return torch.cat([x.new_zeros(*x.shape[:-1], 0), *(x @ part.t() for part in cuts)], -1)


def _bias_tangent(tangent: Tensor, shape: torch.Size, contract: str, offsets: Tensor | None) -> Tensor:
    """The derivative of a result of ``shape`` in a direction of the bias."""
    if contract == "conv2d":
        return tangent.view(-1, 1, 1).expand(shape)
    if offsets is None:
        return tangent.expand(shape)
    rows = torch.arange(shape[0], device=tangent.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, rows, right=True)
    return F.pad(tangent, (0, 0, 0, 1)).index_select(0, expert)


def _grouped_input_gradient(grad: Tensor, weight: QTensor, offsets: Tensor) -> Tensor:
    """The gradient with respect to x ``(T, K)``, float32, of ``grad`` ``(T, N)``."""
    dx = grad.new_zeros(grad.shape[0], weight.shape[2], dtype=torch.float32)
    for expert, rows in expert_rows(read_ends(offsets)):
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
