"""The quantized counterparts of torch's modules: the registry, reasons for unsupported modules, and rebuilding.

A new kind of layer is added here, to `COUNTERPARTS` and `_BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..contracts.grouped import is_for_experts
from ..errors import FormatError
from ..resolving.binding import WeightStore
from ..weights.qtensor import QTensor
from ..weights.quantizers import quantize
from ..weights.schemes import Scheme
from .base import QuantizedModule, adopt
from .conv2d import QuantizedConv2d
from .embedding import QuantizedEmbedding
from .experts import QuantizedExperts, expert_weights, why_not_experts
from .geometry import Geometry
from .grouped_linear import QuantizedGroupedLinear
from .linear import QuantizedLinear
from .parts import mark_part, place_of
from .scaled_embedding import QuantizedScaledEmbedding, is_scaled_embedding

# ruff: noqa: SLF001 - reads private attributes of the quantized modules and torch's parameter tables

COUNTERPARTS: dict[type[nn.Module], Any] = {
    nn.Linear: QuantizedLinear,
    nn.Conv2d: QuantizedConv2d,
    nn.Embedding: QuantizedEmbedding,
}
"""Float module class to quantized module class."""


def quantized(
    module: nn.Module, scheme: Scheme, name: str, moments: Tensor | None
) -> QuantizedModule | QuantizedExperts:
    """Quantize a float module: its counterpart, with the module's bias, mode and hooks."""
    if expert_weights(module):
        return QuantizedExperts.from_float(module, scheme, name=name)
    if is_transposed_linear(module):
        weight = quantize_transposed(module.get_parameter("weight"), scheme, name, moments)
        return rebuild(module, WeightStore(weight), scheme)
    kind: Any = QuantizedScaledEmbedding if is_scaled_embedding(module) else COUNTERPARTS[float_base(module)]
    made: QuantizedModule = kind.from_float(module, scheme, name=name, moments=moments)
    return made


def quantize_transposed(weight: Tensor, scheme: Scheme, name: str, moments: Tensor | None = None) -> QTensor:
    """Quantize the weight ``(K, N)`` of a transposed linear layer as ``(N, K)``."""
    return quantize(weight.t().contiguous(), scheme.weight, scheme.quantizer, moments=moments, name=name)


def float_base(module: nn.Module) -> type[nn.Module]:
    """Return the class in `COUNTERPARTS` that ``module`` is an instance of."""
    return next(base for base in COUNTERPARTS if isinstance(module, base))


def why_parent_reads(parent: nn.Module) -> str:
    """Return why no child of ``parent`` can be replaced, or an empty string.

    Some modules read the weight of a child instead of calling the child.
    """
    if isinstance(parent, nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention reads this weight itself instead of calling the layer"
    return ""


def why_unsupported(module: nn.Module) -> str:
    """Return why a module has no quantized counterpart, or an empty string if it has one."""
    kind = type(module).__name__
    base: Any = next((base for base in COUNTERPARTS if isinstance(module, base)), None)
    if is_transposed_linear(module):
        base = type(module)
    if base is None and expert_weights(module):
        return why_not_experts(module)
    if base is None:
        return f"qcore does not support {kind}; it quantizes Linear, Conv2d, Embedding and fused experts"
    if is_parametrized(module):
        return "its weight is parametrized; remove the parametrization first"
    own_forward = type(module).forward is not base.forward or "forward" in vars(module)
    if own_forward and not is_scaled_embedding(module):
        return f"{kind} overrides the forward of {base.__name__}, which its quantized counterpart would not run"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an embedding with max_norm rewrites its table while it runs"
    return _unfit_weight(module._parameters.get("weight"))


def _unfit_weight(weight: Any) -> str:
    if weight is None:
        return "its weight is not a parameter but computed (weight_norm, pruning); make it permanent first"
    return "its weight is not initialized yet; run the model once first" if is_lazy(weight) else ""


def why_not_quantizable(layers: Mapping[str, nn.Module], layer: str) -> str:
    """Return why a layer cannot be quantized within its model, or an empty string.

    ``layers``: all modules of the model by name.
    """
    module = layers[layer]
    if isinstance(module, QuantizedModule):
        return ""
    if not layer:
        return f"the model itself is a {type(module).__name__}, which cannot be replaced in place"
    if reader := why_parent_reads(layers[layer.rpartition(".")[0]]):
        return reader
    if isinstance(module, (nn.Linear, nn.Conv2d)) and "bias" not in module._parameters:
        return "its bias is not a parameter but computed or a buffer"
    return why_unsupported(module)


def weight_parameter(module: nn.Module) -> Tensor | None:
    """Return the parameter ``weight`` of a module, or None.

    Does not read a parametrized weight: reading computes it, and some parametrizations (spectral norm) then change
    their buffers.
    """
    return dict(module._parameters.items()).get("weight")


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, as in GPT-2: a linear layer whose float weight is (K, N)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def weight_shape(module: nn.Module) -> tuple[int, ...]:
    """Return the logical shape of a layer's quantized weight: (N, K), of experts (E, N, K)."""
    if isinstance(module, QuantizedModule):
        return tuple(module._store.shape)
    weight = weight_parameter(module)
    assert weight is not None
    if is_transposed_linear(module):
        return weight.shape[1], weight.shape[0]
    return weight.shape[0], weight.shape[1:].numel()


def weight_identity(module: nn.Module) -> int:
    """Return an identity that is equal for layers whose weights are tied."""
    if isinstance(module, QuantizedModule):
        return id(module._store)
    weight = weight_parameter(module)
    return id(module if weight is None else weight)


def weight_device_dtype(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device of a layer's weight and the layer's compute dtype."""
    if isinstance(module, QuantizedModule):
        return module._store.device, module._dtype
    weight = weight_parameter(module)
    assert weight is not None
    return weight.device, weight.dtype


def rebuild(module: nn.Module, store: WeightStore, scheme: Scheme) -> QuantizedModule:
    """Build the quantized counterpart of ``module`` around ``store``; it shares the module's bias, mode and hooks."""
    dtype = weight_device_dtype(module)[1]
    remade = getattr(module, "_remade", None)  # of a layer that is cut over ranks
    made: QuantizedModule = (
        _BUILDERS[_kind(module)](module, store, scheme, dtype) if remade is None else remade(store, scheme)
    )
    place = place_of(module)
    if place is not None:
        mark_part(made, *place)
    adopt(made, module)
    if isinstance(module, QuantizedModule) and module.out_dtype is not None:
        made.out_dtype = module.out_dtype
    return made


def _kind(module: nn.Module) -> type[nn.Module]:
    if not isinstance(module, QuantizedModule):
        return nn.Linear if is_transposed_linear(module) else float_base(module)
    return next(kind for kind in _BUILDERS if isinstance(module, kind))


def _linear(module: nn.Module, store: WeightStore, scheme: Scheme, dtype: torch.dtype) -> QuantizedModule:
    made = QuantizedLinear(store, scheme, module._parameters["bias"], dtype)
    if is_transposed_linear(module) or (isinstance(module, QuantizedLinear) and module.is_transposed):
        made.is_transposed = True
    return made


def _grouped_linear(module: nn.Module, store: WeightStore, scheme: Scheme, dtype: torch.dtype) -> QuantizedModule:
    if not is_for_experts(scheme):
        raise FormatError("experts return floats and take no parameters per token.")
    return QuantizedGroupedLinear(store, scheme, module._parameters["bias"], dtype)


def _embedding(module: nn.Module, store: WeightStore, scheme: Scheme, dtype: torch.dtype) -> QuantizedModule:
    assert isinstance(module, (nn.Embedding, QuantizedEmbedding))
    if isinstance(module, QuantizedScaledEmbedding) or is_scaled_embedding(module):
        return QuantizedScaledEmbedding(store, scheme, dtype, module.padding_idx).scaled_like(module)
    return QuantizedEmbedding(store, scheme, dtype, module.padding_idx)


def _conv2d(module: nn.Module, store: WeightStore, scheme: Scheme, dtype: torch.dtype) -> QuantizedModule:
    assert isinstance(module, (nn.Conv2d, QuantizedConv2d))
    geometry = Geometry.of(module) if isinstance(module, nn.Conv2d) else module._geometry
    return QuantizedConv2d(store, scheme, module._parameters["bias"], dtype, geometry)


_Builder = Callable[[nn.Module, WeightStore, Scheme, torch.dtype], QuantizedModule]
_BUILDERS: dict[type[nn.Module], _Builder] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.Conv2d: _conv2d,
    QuantizedLinear: _linear,
    QuantizedGroupedLinear: _grouped_linear,
    QuantizedEmbedding: _embedding,
    QuantizedConv2d: _conv2d,
}
