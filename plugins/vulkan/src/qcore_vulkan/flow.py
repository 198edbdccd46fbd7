"""Which modules of a chain the device supports, and the tensors between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qcore import Conv2dRequest, FormatError
from qcore.plugin_api import FLOATS, BoundLayer, bound_layer, first_line, layer_contract, output_size

from .kernel import HandleKernel
from .steps import rows_bytes

ROWS, IMAGE, INDICES = "rows", "image", "indices"

_ELEMENTWISE: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.SiLU: "silu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh",
}  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Flow:
    """A tensor between two modules: its ``shape`` and ``dtype``, and its layout in memory.

    ``kind``: `ROWS`: a matrix of all leading dimensions by the last; `IMAGE`: ``(B, C, H, W)``, channels last;
    `INDICES`: integers of any shape.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of its matrix in memory."""
        if self.kind == IMAGE:
            batch, channels, height, width = self.shape
            return batch * height * width, channels
        columns = 1 if self.kind == INDICES else self.shape[-1]
        return math.prod(self.shape) // columns, columns

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix on the device, at 4 per element: elements are widened on the way."""
        return rows_bytes(*self.matrix, torch.float32)


@dataclass(frozen=True)
class Stage:
    """One module on the device.

    **Fields:** ``before``, ``after``: its input and output; ``bound``: a quantized layer with a kernel of this plugin;
    ``elementwise``: the name of a function in `steps.ELEMENTWISE`. With neither, it is a view and computes nothing.
    """

    module: nn.Module
    before: Flow
    after: Flow
    bound: BoundLayer | None = None
    elementwise: str = ""


class StaysOnHostError(Exception):
    """A module cannot run on the device; the text is the reason, as `Explanation` shows it."""


def flow_of(x: Tensor, module: nn.Module) -> Flow:
    """The flow of an input x to a chain that starts with ``module``; raises `StaysOnHostError`."""
    if x.device.type != "cpu":
        raise StaysOnHostError(f"the input is on {x.device}, not on the CPU")
    if not x.numel():
        raise StaysOnHostError("the input is empty")
    if not x.dtype.is_floating_point and x.dtype != torch.int8:
        return Flow(INDICES, tuple(x.shape), x.dtype)
    if x.dim() == 4 and layer_contract(module) == "conv2d":
        return Flow(IMAGE, tuple(x.shape), x.dtype)
    if not x.dim():
        raise StaysOnHostError("the input has no dimensions")
    return Flow(ROWS, tuple(x.shape), x.dtype)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of the user run before or after the module."""
    own = module.__dict__  # read once per module and call: attributes of modules are slow to look up
    before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
    return bool(before or after or own["_backward_pre_hooks"] or own["_backward_hooks"])


def stage_of(module: nn.Module, before: Flow) -> Stage:
    """``module`` as a stage of a program; raises `StaysOnHostError`."""
    if has_hooks(module):
        raise StaysOnHostError("it has hooks, which run on the host")
    if type(module) is nn.Identity or (type(module) in _DROPOUTS and not module.training):
        return Stage(module, before, before)
    if type(module) is nn.Flatten:
        return _flatten(module, before)
    name = _elementwise(module)
    if name:
        if before.dtype not in FLOATS:
            raise StaysOnHostError(_no_float(before.dtype))
        return Stage(module, before, before, elementwise=name)
    planner = _QUANTIZED.get(layer_contract(module))
    if planner is None:
        raise StaysOnHostError("the device has no kernel for it")
    return planner(module, before)


def _elementwise(module: nn.Module) -> str:
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _ELEMENTWISE.get(type(module), "")


def _no_float(dtype: torch.dtype) -> str:
    return f"it needs floats on the device, not {str(dtype).removeprefix('torch.')}"


def _flatten(module: nn.Flatten, before: Flow) -> Stage:
    """A view of the same matrix; raises `StaysOnHostError` for any other."""
    if before.kind == INDICES:
        raise StaysOnHostError("it precedes an embedding lookup")
    first, last = (dim % len(before.shape) for dim in (module.start_dim, module.end_dim))
    middle = math.prod(before.shape[first : last + 1])
    after = replace(before, kind=ROWS, shape=(*before.shape[:first], middle, *before.shape[last + 1 :]))
    if first == last and before.kind == ROWS:
        return Stage(module, before, before)
    if before.kind == IMAGE and (first, last) == (1, 3) and before.shape[2:] == (1, 1):
        return Stage(module, before, after)
    if before.kind == ROWS and last < len(before.shape) - 1:
        return Stage(module, before, after)
    raise StaysOnHostError("it moves data: it runs on the device only if the result is a view of the same rows")


def _bound(module: nn.Module, dtype: torch.dtype | None) -> BoundLayer:
    """The layer bound for activations of ``dtype``; raises `StaysOnHostError` if its kernel is another plugin's."""
    try:
        bound = bound_layer(module, dtype)
    except FormatError as error:
        raise StaysOnHostError(first_line(error)) from error
    if isinstance(bound.kernel, HandleKernel):
        return bound
    raise StaysOnHostError(
        f"{bound.kernel.name} runs it; create the layer under qcore.using('vulkan') to get a kernel of this plugin"
    )


def _product(module: Any, before: Flow, shape: Callable[[Any], tuple[int, ...]]) -> Stage:
    if before.dtype == torch.int8:
        if not getattr(module.scheme.activation, "is_given", False):
            raise StaysOnHostError("int8 codes need a scheme with static activations")
    elif before.dtype not in FLOATS:
        raise StaysOnHostError(_no_float(before.dtype))
    bound = _bound(module, before.dtype)
    return Stage(module, before, Flow(before.kind, shape(bound.request), bound.request.out_dtype), bound)


def _linear(module: Any, before: Flow) -> Stage:
    if before.kind != ROWS or before.shape[-1] != module.in_features:
        raise StaysOnHostError(f"an input of shape {before.shape} does not have rows of {module.in_features} features")
    return _product(module, before, lambda _request: (*before.shape[:-1], module.out_features))


def _conv2d(module: Any, before: Flow) -> Stage:
    if before.kind != IMAGE or before.shape[1] != module.in_channels:
        raise StaysOnHostError(
            f"an input of shape {before.shape} is not a batch of images with {module.in_channels} channels"
        )
    size = (before.shape[2], before.shape[3])

    def shape(request: Conv2dRequest) -> tuple[int, ...]:
        return (before.shape[0], module.out_channels, *output_size(request, *size))

    stage = _product(module, before, shape)
    if stage.bound is not None and stage.bound.outer_padding:
        raise StaysOnHostError(f"padding mode {module.padding_mode!r} is applied on the host")
    if min(stage.after.shape) <= 0:
        raise StaysOnHostError("its kernel is larger than the images")
    return stage


def _embedding(module: Any, before: Flow) -> Stage:
    if before.kind != INDICES or before.dtype not in (torch.int32, torch.int64):
        raise StaysOnHostError("an embedding lookup needs int32 or int64 indices from the host")
    bound = _bound(module, None)
    after = Flow(ROWS, (*before.shape, module.embedding_dim), bound.request.out_dtype)
    return Stage(module, before, after, bound)


_QUANTIZED: dict[str, Callable[[Any, Flow], Stage]] = {
    "linear": _linear,
    "conv2d": _conv2d,
    "embedding": _embedding,
}
