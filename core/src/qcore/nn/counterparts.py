"""The quantized counterparts of torch's modules: which there are, why a module has none, and how one is rebuilt.

A new kind of layer is entered here, in `COUNTERPARTS` and `_BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..resolving.binding import WeightStore
from ..weights.schemes import Scheme
from .base import QuantizedModule, adopt
from .conv2d import QuantizedConv2d, _paddings, _pair
from .embedding import QuantizedEmbedding
from .linear import QuantizedLinear

# ruff: noqa: SLF001 - these modules and the quantized ones are two ends of one thing

COUNTERPARTS: dict[type[nn.Module], Any] = {
    nn.Linear: QuantizedLinear,
    nn.Conv2d: QuantizedConv2d,
    nn.Embedding: QuantizedEmbedding,
}
"""The quantized module of each kind of float module."""


def float_base(module: nn.Module) -> type[nn.Module]:
    """The kind of a float module that has a counterpart."""
    return next(base for base in COUNTERPARTS if isinstance(module, base))


def why_parent_reads(parent: nn.Module) -> str:
    """Why a child of ``parent`` cannot be replaced: some modules read its weight instead of calling it; else empty."""
    if isinstance(parent, nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention reads this weight itself instead of calling the layer"
    return ""


def why_unsupported(module: nn.Module) -> str:
    """Why a module has no quantized counterpart; empty where it has one."""
    kind = type(module).__name__
    base: Any = next((base for base in COUNTERPARTS if isinstance(module, base)), None)
    if base is None:
        return f"qcore has no contract for {kind}; it quantizes Linear, Conv2d and Embedding"
    if is_parametrized(module):
        return "its weight is parametrized; remove the parametrization first"
    if type(module).forward is not base.forward or "forward" in vars(module):
        return f"{kind} overrides the forward of {base.__name__}, which quantization would lose"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an embedding with max_norm rewrites its table while it runs"
    return _unfit_weight(module._parameters.get("weight"))


def _unfit_weight(weight: Any) -> str:
    if weight is None:
        return "its weight is no parameter but computed (weight_norm, pruning); make it permanent first"
    return "its weight is not initialized yet; run the model once first" if is_lazy(weight) else ""


def why_not_quantizable(layers: Mapping[str, nn.Module], layer: str) -> str:
    """Why a layer has no quantized counterpart; empty where it has one. ``layers``: all of the model by name."""
    module = layers[layer]
    if isinstance(module, QuantizedModule):
        return ""
    if not layer:
        return f"the model itself is a {type(module).__name__}, which cannot be replaced in place"
    if reader := why_parent_reads(layers[layer.rpartition(".")[0]]):
        return reader
    if isinstance(module, (nn.Linear, nn.Conv2d)) and "bias" not in module._parameters:
        return "its bias is no parameter but computed or a buffer"
    return why_unsupported(module)


def weight_parameter(module: nn.Module) -> Tensor | None:
    """The parameter ``weight`` of a module, if it has one.

    A weight that is computed when it is read (a parametrization) is left alone: spectral norm, for one, changes its
    buffers then.
    """
    return dict(module._parameters.items()).get("weight")


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """The logical shape (N, K) that a layer's quantized weight has."""
    if isinstance(module, QuantizedModule):
        n, k = module._store.shape
        return n, k
    weight = weight_parameter(module)
    assert weight is not None
    return weight.shape[0], weight.shape[1:].numel()


def weight_identity(module: nn.Module) -> int:
    """Equal for layers whose weights are tied."""
    if isinstance(module, QuantizedModule):
        return id(module._store)
    weight = weight_parameter(module)
    return id(module if weight is None else weight)


def weight_device_dtype(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a layer's weight is, and what the layer computes in."""
    if isinstance(module, QuantizedModule):
        return module._store.device, module._dtype
    weight = weight_parameter(module)
    assert weight is not None
    return weight.device, weight.dtype


def rebuild(module: nn.Module, store: WeightStore, scheme: Scheme) -> QuantizedModule:
    """The quantized counterpart of ``module`` with another weight; shares its bias, mode and hooks."""
    dtype = weight_device_dtype(module)[1]
    made = _BUILDERS[_kind(module)](module, store, scheme, dtype)
    adopt(made, module)
    return made


def _kind(module: nn.Module) -> type[nn.Module]:
    if not isinstance(module, QuantizedModule):
        return float_base(module)
    return next(kind for kind in _BUILDERS if isinstance(module, kind))


def _linear(module: nn.Module, store: WeightStore, scheme: Scheme, dtype: torch.dtype) -> QuantizedModule:
    return QuantizedLinear(store, scheme, module._parameters["bias"], dtype)


def _embedding(module: nn.Module, store: WeightStore, scheme: Scheme, dtype: torch.dtype) -> QuantizedModule:
    assert isinstance(module, (nn.Embedding, QuantizedEmbedding))
    return QuantizedEmbedding(store, scheme, dtype, module.padding_idx)


def _conv2d(module: nn.Module, store: WeightStore, scheme: Scheme, dtype: torch.dtype) -> QuantizedModule:
    assert isinstance(module, (nn.Conv2d, QuantizedConv2d))
    if isinstance(module, nn.Conv2d):
        padding, outer = _paddings(module)
    else:
        padding, outer = module.padding, module._outer_padding
    return QuantizedConv2d(
        store,
        scheme,
        module._parameters["bias"],
        dtype,
        in_channels=module.in_channels,
        kernel_size=_pair(module.kernel_size),
        stride=_pair(module.stride),
        padding=padding,
        dilation=_pair(module.dilation),
        groups=module.groups,
        outer_padding=outer,
        padding_mode=module.padding_mode,
    )


_Builder = Callable[[nn.Module, WeightStore, Scheme, torch.dtype], QuantizedModule]
_BUILDERS: dict[type[nn.Module], _Builder] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.Conv2d: _conv2d,
    QuantizedLinear: _linear,
    QuantizedEmbedding: _embedding,
    QuantizedConv2d: _conv2d,
}
