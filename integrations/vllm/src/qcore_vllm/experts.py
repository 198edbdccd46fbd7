"""vLLM's mixtures of experts over qcore's `grouped_linear`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs

from qcore import QTensor, UnsupportedError
from qcore.nn import QuantizedExperts, QuantizedGroupedLinear

from .layer_weight import LayerWeight

if TYPE_CHECKING:
    from .config import QcoreConfig

_SWIGLUOAI: Any = SimpleNamespace(alpha=1.702, limit=7.0)
"""The settings of vLLM's kernel."""
_UP, _DOWN = "gate_up_proj", "down_proj"
_WEIGHTS = {"w13": _UP, "w2": _DOWN}


class QcoreExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc, unused-ignore]
    """Loads fused experts through qcore. Experts that stay float go back to vLLM's own method."""

    def __init__(self, config: QcoreConfig, prefix: str, moe: Any) -> None:
        super().__init__(moe)
        self.config, self.prefix = config, prefix

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``w13_weight`` (E, 2I, H) and ``w2_weight`` (E, H, I), which have no memory, and real biases."""
        wide = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        shapes = {"w13": (wide, hidden_size), "w2": (hidden_size, intermediate_size_per_partition)}
        for name, (n, k) in shapes.items():
            weight = self.config.layer_weight(f"{self.prefix}.{name}", (num_experts, n, k), params_dtype)
            layer.register_parameter(f"{name}_weight", weight.parameter(**extra_weight_attrs))
            if self.moe.has_bias:
                bias = nn.Parameter(torch.zeros(num_experts, n, dtype=params_dtype), requires_grad=False)
                layer.register_parameter(f"{name}_bias", bias)
                set_weight_attrs(bias, extra_weight_attrs)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels do not run."""
        return

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded for the device. A second call changes nothing."""
        weights: dict[str, Any] = {
            name: getattr(getattr(layer, f"{name}_weight"), "layer_weight", None) for name in _WEIGHTS
        }
        if None in weights.values():
            return
        if all(weight.is_float for weight in weights.values()):
            _serve_float(layer, self.moe, weights)
            return
        layer.qcore = self.config.bound(lambda: self._experts(layer, weights), weights["w13"])
        for name, weight in weights.items():
            weight.clear()
            made = torch.empty(0, dtype=weight.dtype, device=weight.device)
            setattr(layer, f"{name}_weight", nn.Parameter(made, requires_grad=False))

    def _experts(self, layer: Any, weights: dict[str, LayerWeight]) -> QuantizedExperts:
        grouped = {target: _grouped(layer, name, weights[name]) for name, target in _WEIGHTS.items()}
        return QuantizedExperts(_Gate(layer), _UP, grouped[_UP], grouped[_DOWN])

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum over each token's experts that are on this rank; shared experts are vLLM's own."""
        index = topk_ids.long()
        if layer.expert_map is not None:  # expert parallelism: -1 for experts of other ranks
            local = layer.expert_map[index].long()
            index = torch.where(local < 0, layer.qcore.num_experts, local)
        if layer.apply_router_weight_on_input:
            if topk_ids.shape[-1] != 1:
                raise UnsupportedError(f"{self.prefix}: router weights on the input need one expert per token.")
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        return layer.qcore(x, index, topk_weights)  # type: ignore[no-any-return]


class _Gate(nn.Module):
    """The function between the two products of an expert: vLLM's own."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        moe = layer.moe_config
        self.activation, self.gated = layer.activation, moe.is_act_and_mul
        self.settings = ApplyMoEActivationConfig(
            clamp_limit=moe.swiglu_limit,
            alpha=1.0 if moe.swiglu_alpha is None else moe.swiglu_alpha,
            beta=0.0 if moe.swiglu_beta is None else moe.swiglu_beta,
            activation_situ_beta=moe.activation_situ_beta,
            activation_situ_linear_beta=moe.activation_situ_linear_beta,
        )

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        if gate_up.device.type == "cpu" and getattr(self.activation, "value", "") == "swigluoai":
            # vLLM for CPUs has no kernel of gpt-oss's gate; on GPUs it ignores the settings as well.
            made: Tensor = SwigluOAIAndMul.forward_native(_SWIGLUOAI, gate_up)
            return made
        width = gate_up.shape[-1] // 2 if self.gated else gate_up.shape[-1]
        result = gate_up.new_empty(gate_up.shape[0], width)
        return apply_moe_activation(  # type: ignore[no-any-return]
            self.activation, result, gate_up.contiguous(), activation_config=self.settings
        )


def _grouped(layer: Any, name: str, weight: LayerWeight) -> QuantizedGroupedLinear:
    experts = []
    for e in range(weight.shape[0]):
        parts = weight.parts(e)
        if len(parts) > 1 or not isinstance(parts[0].weight, QTensor):
            raise UnsupportedError(
                f"expert {e} of {weight.names[0]} has parts of different formats: {'; '.join(map(str, parts))}.\n"
                f"The experts of a layer run as one product: quantize all of their weights with one scheme, or none."
            )
        experts.append(parts[0])
    first = experts[0]
    for e, part in enumerate(experts):
        a, b = first.weight, part.weight
        assert isinstance(a, QTensor)
        assert isinstance(b, QTensor)
        if (part.scheme, b.format, b.scale.dtype) != (first.scheme, a.format, a.scale.dtype):
            raise UnsupportedError(
                f"experts 0 and {e} of {weight.names[0]} have different formats: {first}; {part}.\n"
                f"The experts of a layer run as one product: quantize all of them with one scheme."
            )
    bias = getattr(layer, f"{name}_bias", None)
    stacked = QTensor.stack([part.weight for part in experts])  # type: ignore[misc]
    return QuantizedGroupedLinear.from_qtensor(stacked, bias, first.scheme, dtype=weight.dtype)


def _serve_float(layer: Any, moe: Any, weights: dict[str, LayerWeight]) -> None:
    for name, weight in weights.items():
        setattr(layer, f"{name}_weight", nn.Parameter(weight.dense(), requires_grad=False))
        weight.clear()
    layer._replace_quant_method(UnquantizedFusedMoEMethod(moe))  # noqa: SLF001 - vLLM's own way, see its runner
    layer.quant_method.process_weights_after_loading(layer)
