"""vLLM's linear layers over qcore: the parameter that is loaded, and what runs in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear, UnquantizedLinearMethod

from .layer_weight import LayerWeight
from .served import ServedLinear

if TYPE_CHECKING:
    from .config import QcoreConfig


class QcoreLinearMethod(LinearMethodBase):  # type: ignore[misc, unused-ignore]
    """Loads the weight of a linear layer through qcore. A weight that stays float goes back to vLLM's own method."""

    def __init__(self, config: QcoreConfig, prefix: str) -> None:
        super().__init__()
        self.config, self.prefix = config, prefix
        self.adds_bias = False
        """Whether the kernel of this rank adds the layer's bias, before the result is rounded."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameter ``weight``, which has no memory."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = self.config.layer_weight(self.prefix, shape, params_dtype)
        layer.register_parameter("weight", weight.parameter(input_dim=1, output_dim=0, **extra_weight_attrs))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded for the device. A second call changes nothing."""
        weight: LayerWeight | None = getattr(layer.weight, "layer_weight", None)
        if weight is None:
            return
        if weight.is_float:
            _serve_float(layer, weight)
            return
        bias = _own_bias(layer)
        self.adds_bias = bias is not None
        layer.qcore = self.config.bound(lambda: ServedLinear(weight.parts(), bias, weight.dtype), weight)
        layer.weight = empty(weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W^T + bias``; under row parallelism vLLM passes the bias on rank 0 and adds the ranks' results."""
        served: ServedLinear = layer.qcore
        if not self.adds_bias:
            y = served.forward(x)
            return y if bias is None else y + bias
        if bias is not None:
            return served.forward(x)
        # The weight by itself: attention of latent vectors multiplies it with an identity.
        if not hasattr(layer, "qcore_unbiased"):
            layer.qcore_unbiased = served.without_bias()
        return layer.qcore_unbiased(x)  # type: ignore[no-any-return]


def _own_bias(layer: Any) -> Tensor | None:
    """The bias that this rank adds in its kernel."""
    bias: Tensor | None = getattr(layer, "bias", None)
    first = not isinstance(layer, RowParallelLinear) or layer.tp_rank == 0
    return bias if first and not getattr(layer, "skip_bias_add", False) else None


def empty(weight: LayerWeight) -> nn.Parameter:
    """A parameter without values in place of a weight that is packed: other code asks it for dtype and device."""
    made = nn.Parameter(torch.empty(0, dtype=weight.dtype, device=weight.device), requires_grad=False)
    weight.clear()
    return made


def _serve_float(layer: Any, weight: LayerWeight) -> None:
    layer.weight = nn.Parameter(weight.dense(), requires_grad=False)
    weight.clear()
    layer.quant_method = UnquantizedLinearMethod()
    layer.quant_method.process_weights_after_loading(layer)
