"""`QuantizedExperts`: the fused experts of a mixture-of-experts layer, in the form of transformers 5.

transformers keeps the experts of a layer as parameters of three dimensions: ``gate_up_proj`` ``(E, 2I, H)`` and
``down_proj`` ``(E, H, I)``, or transposed (gpt-oss), with or without biases ``<name>_bias`` ``(E, N)``. Its experts
modules describe themselves by attributes: ``num_experts``, ``is_transposed``, ``has_bias``, ``has_gate``, and
``_apply_gate``, the function between the two products (``act_fn`` for experts without a gate). Nothing of transformers
is imported: any module with these attributes is supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..weights.schemes import Scheme
from .base import HOOKS
from .graph_ops import captures_layers
from .grouped_linear import QuantizedGroupedLinear

FUSED, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the three-dimensional expert weights of ``module``: none if it holds no fused experts."""
    own = dict(module._parameters.items())  # noqa: SLF001 - torch's table; a lazy attribute must not be computed
    up = next((name for name in (FUSED, UP) if _is_3d(own.get(name))), "")
    fits = up and _is_3d(own.get(DOWN)) and isinstance(getattr(module, "num_experts", None), int)
    return (up, DOWN) if fits else ()


def _is_3d(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) and parameter.dim() == 3


def why_not_experts(module: nn.Module) -> str:
    """Return why fused experts have no quantized counterpart, or an empty string."""
    if not callable(_between(module)):
        return f"{type(module).__name__} has no {_name_between(module)}, the function between its two products"
    if getattr(module, "has_post_expert_norm", False):
        return f"{type(module).__name__} normalizes the result of each expert, which qcore's experts do not"
    extra = [
        name
        for name, parameter in module._parameters.items()  # noqa: SLF001
        if parameter is not None and name not in {*expert_weights(module), *_bias_names(module)}
    ]
    return f"{type(module).__name__} has parameters that qcore does not support: {', '.join(extra)}" if extra else ""


def _name_between(module: nn.Module) -> str:
    return "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"


def _between(module: nn.Module) -> Any:
    """The function between the two products, which is transformers' own."""
    return getattr(module, _name_between(module), None)


def _bias_names(module: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}_bias" for name in expert_weights(module))


class QuantizedExperts(nn.Module):
    """Fused experts with quantized weights; replaces the experts module of a transformers model.

    Children: ``gate_up_proj`` (or ``up_proj``) and ``down_proj``, each a `QuantizedGroupedLinear`; ``gate``: the float
    module without its weights, whose ``_apply_gate`` or ``act_fn`` is called between the products.
    """

    def __init__(self, gate: nn.Module, up: str, up_proj: QuantizedGroupedLinear, down: QuantizedGroupedLinear) -> None:
        super().__init__()
        self.num_experts = up_proj.num_experts
        self._up = up
        self.gate = gate
        self.add_module(up, up_proj)
        self.add_module(DOWN, down)

    @classmethod
    def from_float(cls, module: nn.Module, scheme: Scheme | str, *, name: str = "experts") -> QuantizedExperts:
        """Quantize the experts of ``module``, which keeps its weights; it is left unchanged.

        Raises `FormatError` for NaN or Inf in a weight, and `UnsupportedError` for a scheme that needs calibration.
        """
        transposed = bool(getattr(module, "is_transposed", False))

        def grouped(which: str) -> QuantizedGroupedLinear:
            weight = getattr(module, which).detach()
            bias = module._parameters.get(f"{which}_bias")  # noqa: SLF001
            dense = weight.transpose(1, 2) if transposed else weight
            return QuantizedGroupedLinear.from_float(dense, scheme, bias=bias, name=f"{name}.{which}")

        return cls.wrap(module, grouped)

    @classmethod
    def wrap(cls, module: nn.Module, grouped: Callable[[str], QuantizedGroupedLinear]) -> QuantizedExperts:
        """Wrap quantized weights with the gate, mode and hooks of ``module``; ``grouped`` makes one by its name."""
        up, down = expert_weights(module)
        made = cls(_without_weights(module), up, grouped(up), grouped(down))
        made.train(module.training)
        for table in HOOKS:
            getattr(made, table).update(getattr(module, table))
        return made

    @property
    def scheme(self) -> Scheme:
        """The scheme of both weights."""
        return self.projections()[DOWN].scheme

    def projections(self) -> dict[str, QuantizedGroupedLinear]:
        """The two quantized weights by name."""
        return {name: self.get_submodule(name) for name in (self._up, DOWN)}  # type: ignore[misc]

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        router_indices: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """Send each token through its experts.

        **Arguments:** ``hidden_states``: ``(..., H)``; ``top_k_index`` (also ``router_indices``): the experts of each
        token, int64 ``(T, k)``, ``num_experts`` for none; ``top_k_weights`` (``routing_weights``): float ``(T, k)``.

        Returns the weighted sum over each token's experts, of the shape and dtype of ``hidden_states``.
        """
        index = top_k_index if top_k_index is not None else router_indices
        weights = top_k_weights if top_k_weights is not None else routing_weights
        assert index is not None
        assert weights is not None
        return self._mixed(hidden_states, index, weights).to(hidden_states.dtype).view(hidden_states.shape)

    def _mixed(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums, float32 ``(T, H)``."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts, k = index.reshape(-1), index.shape[-1]
        # Rows of one expert are contiguous; those of no expert come last, after the last end, and give 0.
        sorted_experts, order = torch.sort(experts, stable=True)
        each = torch.arange(self.num_experts, device=experts.device, dtype=sorted_experts.dtype)
        if captures_layers():  # backends sum more often than they search
            ends = (sorted_experts <= each.unsqueeze(1)).sum(1, dtype=torch.int32)
        else:
            ends = torch.searchsorted(sorted_experts, each, right=True).to(torch.int32)
        x = tokens.index_select(0, order // k)
        projections = self.projections()
        y = projections[DOWN](_between(self.gate)(projections[self._up](x, ends)), ends)
        share = weights.reshape(-1).index_select(0, order).to(y.dtype)
        y = y * torch.where(sorted_experts < self.num_experts, share, 0).unsqueeze(-1)
        # Back to the order of the tokens, and summed over each token's experts.
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        result: Tensor = y.index_select(0, back).view(-1, k, y.shape[-1]).float().sum(1)
        return result


def _without_weights(module: nn.Module) -> nn.Module:
    """A copy of ``module`` without its weights and biases, which its gate does not need."""
    gone = {*expert_weights(module), *_bias_names(module)}
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for table in ("_buffers", "_modules"):
        made.__dict__[table] = dict(module.__dict__[table])
    made.__dict__["_parameters"] = {
        name: None if name in gone else value
        for name, value in module._parameters.items()  # noqa: SLF001
    }
    for hooks in HOOKS:
        made.__dict__[hooks] = type(module.__dict__[hooks])()
    return made
