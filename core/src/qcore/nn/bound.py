"""A view of quantized layers for plugins that run whole graphs: contract, kernel, packed weight.

Such a plugin replaces the calls of several layers by one call of its own. Through the names of this module it reads the
kernel and the packed weight that the layer's forward would use, and leaves the layer unchanged.
"""

# ruff: noqa: SLF001 - a view of the layers of this package

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts import CONV2D, EMBEDDING, GROUPED_LINEAR, LINEAR
from ..contracts.refusals import AnyRequest
from ..discovery.kernels import Kernel
from ..errors import FormatError
from .base import QuantizedModule
from .conv2d import QuantizedConv2d
from .embedding import QuantizedEmbedding
from .grouped_linear import QuantizedGroupedLinear
from .linear import QuantizedLinear

_CONTRACTS: dict[type[nn.Module], str] = {
    QuantizedLinear: LINEAR.name,
    QuantizedConv2d: CONV2D.name,
    QuantizedEmbedding: EMBEDDING.name,
    QuantizedGroupedLinear: GROUPED_LINEAR.name,
}


@dataclass(frozen=True)
class BoundLayer:
    """A quantized layer bound to a kernel, for x of one dtype and without gradients.

    **Fields:** ``request``: the one that the kernel was selected for; ``kernel``; ``packed``: the weight as packed by
    the kernel, read-only; ``outer_padding``: padding that the layer adds to x before the kernel runs, in the order of
    `torch.nn.functional.pad`, empty if the kernel pads by itself. The bias is the layer's own parameter ``bias``.
    """

    request: AnyRequest
    kernel: Kernel
    packed: Mapping[str, Tensor]
    outer_padding: tuple[int, ...] = ()


def layer_contract(module: nn.Module) -> str:
    """The name of the contract that a module of `qcore.nn` computes; empty for every other module.

    A subclass counts as a different module: it may compute something else.
    """
    return _CONTRACTS.get(type(module), "")


def bound_layer(module: nn.Module, x_dtype: torch.dtype | None = None) -> BoundLayer:
    """Bind a quantized layer for x of ``x_dtype``, as its first call would; None: the dtype that it computes in.

    Raises `FormatError` if the layer is on the meta device or its scheme does not support this dtype, `TypeError` for a
    module of another kind. The result is valid as long as `binding_of` the layer returns the same object.
    """
    if not isinstance(module, QuantizedModule):
        raise TypeError(f"{type(module).__name__} is not a layer of qcore.nn")
    if module._primary is None:
        raise FormatError("it is on the meta device")
    bound = module._bound_for(module._dtype if x_dtype is None else x_dtype, False)
    outer = module._outer_padding if isinstance(module, QuantizedConv2d) else ()
    request: Any = bound.request
    return BoundLayer(request, bound.kernel, bound.packed, outer)


def binding_of(module: nn.Module) -> object:
    """An object that a layer replaces whenever it is bound again: after a move, with a new weight or a new kernel.

    Compare it by identity to find out whether a `BoundLayer` is still valid. For other modules it is the module itself.
    Takes a fraction of a microsecond, so that a plugin can check it at every call.
    """
    return module.__dict__.get("_primary", module)
