"""Which modules of a chain the device can take, and what flows between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qcore import FormatError
from qcore.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear
from qcore.plugin_api import FLOATS, output_size

from .kernel import HandleKernel
from .steps import rows_bytes

# ruff: noqa: SLF001 - asks quantized modules for the kernels they are bound to

ROWS, IMAGE, INDICES = "rows", "image", "indices"

_ELEMENTWISE: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.SiLU: "silu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh",
}  # fmt: skip
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Flow:
    """A tensor between two modules: its ``shape`` and ``dtype``, and how it lies in memory.

    ``kind``: `ROWS`: a matrix of all leading dimensions by the last; `IMAGE`: ``(B, C, H, W)``, channels last;
    `INDICES`: whole numbers of any shape.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the matrix that it is in memory."""
        if self.kind == IMAGE:
            batch, channels, height, width = self.shape
            return batch * height * width, channels
        columns = 1 if self.kind == INDICES else self.shape[-1]
        return math.prod(self.shape) // columns, columns

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix on the device, at 4 for a number: they are widened on the way."""
        return rows_bytes(*self.matrix, torch.float32)


@dataclass(frozen=True)
class Stage:
    """One module on the device: ``bound`` to a kernel of ours, or ``elementwise`` by name, or nothing to be done."""

    module: nn.Module
    before: Flow
    after: Flow
    bound: Any = None
    elementwise: str = ""


def flow_of(x: Tensor, module: nn.Module) -> Flow | str:
    """How x enters a chain that starts with ``module``; else why it cannot."""
    if x.device.type != "cpu":
        return f"the input is on {x.device}, not on the CPU"
    if not x.numel():
        return "the input is empty"
    if not x.dtype.is_floating_point and x.dtype != torch.int8:
        return Flow(INDICES, tuple(x.shape), x.dtype)
    if x.dim() == 4 and isinstance(module, QuantizedConv2d):
        return Flow(IMAGE, tuple(x.shape), x.dtype)
    return Flow(ROWS, tuple(x.shape), x.dtype) if x.dim() else "the input has no dimensions"


def has_hooks(module: nn.Module) -> bool:
    """Whether something of the user's runs before or after the module."""
    own = module.__dict__  # asked once per module and call: attributes of modules are slow to look up
    before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
    return bool(before or after or own["_backward_pre_hooks"] or own["_backward_hooks"])


def stage_of(module: nn.Module, before: Flow) -> Stage | str:
    """How ``module`` takes part; else why it does not."""
    if has_hooks(module):
        return "it has hooks, which run on the host"
    if type(module) is nn.Identity or (type(module) in _DROPOUTS and not module.training):
        return Stage(module, before, before)
    if type(module) is nn.Flatten:
        return _flatten(module, before)
    name = _elementwise(module)
    if name:
        return Stage(module, before, before, elementwise=name) if before.dtype in FLOATS else _no_float(before.dtype)
    planner = _QUANTIZED.get(type(module))
    return planner(module, before) if planner else "there is no step for it on the device"


def _elementwise(module: nn.Module) -> str:
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _ELEMENTWISE.get(type(module), "")


def _no_float(dtype: torch.dtype) -> str:
    return f"it takes floats on the device, not {str(dtype).removeprefix('torch.')}"


def _flatten(module: nn.Flatten, before: Flow) -> Stage | str:
    """Where it is only another view of the same matrix."""
    if before.kind == INDICES:
        return "it stands before a lookup"
    first, last = (dim % len(before.shape) for dim in (module.start_dim, module.end_dim))
    middle = math.prod(before.shape[first : last + 1])
    after = replace(before, kind=ROWS, shape=(*before.shape[:first], middle, *before.shape[last + 1 :]))
    if first == last and before.kind == ROWS:
        return Stage(module, before, before)
    if before.kind == IMAGE and (first, last) == (1, 3) and before.shape[2:] == (1, 1):
        return Stage(module, before, after)
    if before.kind == ROWS and last < len(before.shape) - 1:
        return Stage(module, before, after)
    return "it moves numbers: only where it is another view of the same rows does it stay on the device"


def _bound(module: Any, dtype: torch.dtype) -> Any:
    """The kernel that serves activations of ``dtype``, where it is ours; else why there is none."""
    if module._primary is None:
        return "it is on the meta device"
    try:
        bound = module._bound_for(dtype, False)
    except FormatError as error:
        return str(error).splitlines()[0]
    if isinstance(bound.kernel, HandleKernel):
        return bound
    return f"{bound.kernel.name} serves it; qcore.using('vulkan') when it is made asks for this plugin"


def _product(module: Any, before: Flow, shape: Callable[[Any], tuple[int, ...]]) -> Stage | str:
    if before.dtype == torch.int8:
        if not getattr(module.scheme.activation, "is_given", False):
            return "int8 codes need a scheme with static activations"
    elif before.dtype not in FLOATS:
        return _no_float(before.dtype)
    bound = _bound(module, before.dtype)
    if isinstance(bound, str):
        return bound
    return Stage(module, before, Flow(before.kind, shape(bound.request), bound.request.out_dtype), bound)


def _linear(module: QuantizedLinear, before: Flow) -> Stage | str:
    if before.kind != ROWS or before.shape[-1] != module.in_features:
        return f"an input of shape {before.shape} does not lie in rows of {module.in_features}"
    return _product(module, before, lambda _request: (*before.shape[:-1], module.out_features))


def _conv2d(module: QuantizedConv2d, before: Flow) -> Stage | str:
    if before.kind != IMAGE or before.shape[1] != module.in_channels:
        return f"an input of shape {before.shape} is no batch of images of {module.in_channels} channels"
    if module._outer_padding:
        return f"padding mode {module.padding_mode!r} is done on the host"
    size = (before.shape[2], before.shape[3])

    def shape(request: Any) -> tuple[int, ...]:
        return (before.shape[0], module.out_channels, *output_size(request, *size))

    stage = _product(module, before, shape)
    return stage if isinstance(stage, str) or min(stage.after.shape) > 0 else "its kernel is larger than the images"


def _embedding(module: QuantizedEmbedding, before: Flow) -> Stage | str:
    if before.kind != INDICES or before.dtype not in (torch.int32, torch.int64):
        return "a lookup takes indices, int32 or int64, from the host"
    bound = _bound(module, module._dtype)
    if isinstance(bound, str):
        return bound
    after = Flow(ROWS, (*before.shape, module.embedding_dim), bound.request.out_dtype)
    return Stage(module, before, after, bound)


_QUANTIZED: dict[type[nn.Module], Callable[[Any, Flow], Stage | str]] = {
    QuantizedLinear: _linear,
    QuantizedConv2d: _conv2d,
    QuantizedEmbedding: _embedding,
}
