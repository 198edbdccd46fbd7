"""peft's LoRA layers over quantized layers."""

# ruff: noqa: SLF001 - reads the geometry of qcore's own convolution; peft's interface for layers is private

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..nn.base import QuantizedModule
from ..nn.conv2d import QuantizedConv2d
from ..nn.embedding import QuantizedEmbedding
from ..nn.linear import QuantizedLinear
from ..nn.scaled_embedding import QuantizedScaledEmbedding
from .dora import DoraVariant
from .merging import Unmerged, Update

_OWN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weight unchanged."""


def base_of(module: nn.Module) -> nn.Module:
    """Return the layer that an adapter of peft wraps; other modules are their own base."""
    base: nn.Module = module.get_base_layer() if isinstance(module, lora.BaseTunerLayer) else module
    return base


class _OverQuantized:
    """The differences of LoRA over a quantized layer: sizes, refusals, merging. A mixin for peft's classes."""

    _unmerged: Unmerged | None = None
    lora_variant: dict[str, Any]
    merged_adapters: list[str]

    def get_base_layer(self) -> Any:
        return super().get_base_layer()  # type: ignore[misc]

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        columns, rows = _sizes(module)
        return columns, rows

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None}

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> Any:
        """Return peft's object for a variant such as DoRA; raises `UnsupportedError` if it needs a float weight."""
        base = self.get_base_layer()
        if base.scheme.output is not None:
            raise UnsupportedError(f"a layer of scheme {base.scheme} returns int8 codes; LoRA cannot add to them.")
        if config.init_lora_weights not in _OWN_STARTS:
            raise UnsupportedError(
                f"init_lora_weights={config.init_lora_weights!r} starts from the float weight or changes it, but the "
                f"weight of this {type(base).__name__} is quantized.\n"
                f"Use True, 'gaussian', 'orthogonal' or 'eva', or quantize after peft has initialized the adapter."
            )
        try:
            return super().resolve_lora_variant(config=config, **kwargs)  # type: ignore[misc]
        except ValueError as error:
            known = " or use_dora" if self.lora_variants.keys() - {()} else ""
            raise UnsupportedError(
                f"this variant of LoRA is not supported over a {type(base).__name__}: {error}.\n"
                f"Use plain LoRA (use_rslora as well){known}, or leave the layer float."
            ) from error

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:  # noqa: ARG002
        """Merge adapters into the weight: dequantize, add in float32, quantize again in the same scheme.

        The only loss is one rounding to the grid of the scheme; `unmerge` restores the original bits, which are kept
        until then. Every merge is checked for NaN and Inf, as with ``safe_merge``, before the layer is changed.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self._adapters()]
        if not names:
            return
        base = self.get_base_layer()
        before, everything = self._unmerged or Unmerged.of(base), [*self.merged_adapters, *names]
        with torch.no_grad():
            before.merged(base, map(self._update, everything), self._bias_of(everything), type(base).__name__)
        self._unmerged, self.merged_adapters = before, everything

    def unmerge(self) -> None:
        """Remove every merged adapter: weight, scheme and bias are exactly those from before `merge`."""
        if self._unmerged is not None:
            self._unmerged.put_back(self.get_base_layer())
            self._unmerged = None
        self.merged_adapters = []

    def _adapters(self) -> Any:
        return self.lora_A  # type: ignore[attr-defined]

    def _update(self, name: str) -> Update:
        """Return the function that merges the adapter ``name`` into a weight."""
        delta = self._columns(self.get_delta_weight(name).float())  # type: ignore[attr-defined]
        variant = self.lora_variant.get(name)
        if variant is None:
            return lambda weight: weight + delta
        scale = variant.scale(self, name, delta)
        return lambda weight: scale * (weight + delta)

    def _columns(self, delta: Tensor) -> Tensor:
        """Return a change of the float layer's weight as a change of the quantized layer's, ``(N, K)``."""
        return delta

    def _bias_of(self, names: list[str]) -> Tensor | None:
        """Return the sum that the adapters add to the bias, None for none; `UnsupportedError` if there is no bias."""
        own = [self.lora_B[n].bias * self.scaling[n] for n in names if self.lora_bias.get(n)]  # type: ignore[attr-defined]
        if own and self.get_base_layer().bias is None:
            raise UnsupportedError("an adapter with lora_bias=True cannot be merged into a layer that has no bias.")
        return torch.stack(own).sum(0) if own else None


class LoraLinear(_OverQuantized, lora.Linear):
    """LoRA over a `QuantizedLinear`; plain, rank-stabilized or DoRA, which dequantizes the weight in every forward."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None, ("use_dora",): DoraVariant}


class LoraEmbedding(_OverQuantized, lora.Embedding):
    """LoRA over a `QuantizedEmbedding`; plain or rank-stabilized."""

    def _adapters(self) -> Any:
        return self.lora_embedding_A

    def _bias_of(self, names: list[str]) -> Tensor | None:  # noqa: ARG002 - peft has no bias for tables
        return None


class LoraConv2d(_OverQuantized, lora.Conv2d):
    """LoRA over a `QuantizedConv2d` that pads with zeros, equally on both sides; plain or rank-stabilized."""

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1, **kwargs: Any
    ) -> None:
        nn.Module.__init__(self)
        lora.LoraLayer.__init__(self, base_layer, **kwargs)
        base = self.get_base_layer()
        if base._outer_padding:
            raise UnsupportedError(
                f"LoRA over a QuantizedConv2d requires zero padding, equal on both sides; this one has "
                f"padding_mode={base.padding_mode!r} and pads by {base._outer_padding}.\n"
                f"Remove it from target_modules."
            )
        if r % base.groups:
            raise UnsupportedError(f"the rank {r} is not divisible by the {base.groups} groups of the convolution.")
        self._active_adapter = adapter_name
        self._kernel_dim, self.conv_fn = 4, F.conv2d
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **_kwargs: Any) -> None:
        """Add an adapter of rank ``r``: a convolution like the layer's to r channels, then one of 1x1."""
        if r <= 0:
            raise ValueError(f"the rank r of an adapter must be positive, not {r}.")
        self.resolve_lora_variant(config=config)
        base = self.get_base_layer()
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout > 0 else nn.Identity()
        self.lora_dropout[adapter_name] = dropout
        geometry = {key: getattr(base, key) for key in ("kernel_size", "stride", "padding", "dilation")}
        self.lora_A[adapter_name] = nn.Conv2d(base.in_channels, r, bias=False, **geometry)
        self.lora_B[adapter_name] = nn.Conv2d(r, base.out_channels, 1, groups=base.groups, bias=config.lora_bias)
        self.lora_bias[adapter_name], self.use_rslora[adapter_name] = config.lora_bias, config.use_rslora
        self.use_dora[adapter_name] = False
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        if config.init_lora_weights:
            self.reset_lora_parameters(adapter_name, config.init_lora_weights)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def get_delta_weight(self, adapter: str) -> Any:
        """Return the update of an adapter to the float layer's weight, ``(OC, IC, KH, KW)``."""
        if self.get_base_layer().groups > 1:
            raise UnsupportedError(
                "LoRA over a convolution with groups mixes channels of all groups, so it cannot be merged into it."
            )
        return super().get_delta_weight(adapter)

    def _columns(self, delta: Tensor) -> Tensor:
        """``(OC, IC, KH, KW)`` as columns in (KH, KW, IC) order."""
        return delta.permute(0, 2, 3, 1).reshape(delta.shape[0], -1)


ADAPTED: dict[type[nn.Module], Any] = {
    QuantizedLinear: LoraLinear,
    QuantizedEmbedding: LoraEmbedding,
    QuantizedScaledEmbedding: LoraEmbedding,
    QuantizedConv2d: LoraConv2d,
}
"""Class of a quantized layer to the LoRA layer over it."""

_ADOPTABLE = {lora.Linear: LoraLinear, lora.Embedding: LoraEmbedding, lora.Conv2d: LoraConv2d}


def adopt_(model: nn.Module) -> list[str]:
    """Convert LoRA layers of peft whose base was quantized afterwards to those of this module; returns their names.

    `qcore.quantize_` of a model that already has adapters quantizes the layers that they wrap. They run immediately;
    merging needs this call.
    """
    return list(_adopted(model))


def _adopted(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        kind: Any = _ADOPTABLE.get(type(module))
        if kind is not None and kind is ADAPTED.get(type(base_of(module))):
            module.__class__ = kind
            if isinstance(base_of(module), QuantizedLinear):
                module.fan_in_fan_out = False  # of a Conv1D, whose quantized weight is (N, K)
            yield name


def _sizes(module: QuantizedModule) -> tuple[int, int]:
    """Return the sizes that peft calls in_features and out_features."""
    if isinstance(module, QuantizedEmbedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, QuantizedConv2d):
        return module.in_channels, module.out_channels
    assert isinstance(module, QuantizedLinear)
    return module.in_features, module.out_features
