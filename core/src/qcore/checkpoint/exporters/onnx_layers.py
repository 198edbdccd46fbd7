"""Quantized layers as modules that torch's ONNX exporter can trace; see `onnx_weights` for their operators."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, unfold

from ...formats import ZeroPoint
from ...nn import QuantizedConv2d, QuantizedEmbedding, QuantizedExperts, QuantizedGroupedLinear, QuantizedLinear
from ...nn.base import QuantizedModule
from ...nn.geometry import pad
from ...nn.scaled_embedding import QuantizedScaledEmbedding
from ...weights.activations import (
    Activation,
    DynamicFP8,
    DynamicInt8,
    StaticFP8,
    StaticInt8,
    dynamic_parameters,
    fp8_scale,
    quantize_fp8,
    quantize_int8,
)
from ..importers.base import LayerRefused
from .onnx_weights import UNSIGNED, DequantizedWeight, ONNXWeight, onnx_weight, symbolic, unsigned


class _Rounded(nn.Module):
    """x after quantization and dequantization, float32; x itself for a layer with float activations."""

    scale: Tensor
    zero: Tensor

    def __init__(self, activation: Activation | None) -> None:
        super().__init__()
        self.activation = activation
        if isinstance(activation, StaticInt8):
            self.register_buffer("scale", torch.tensor(activation.scale, dtype=torch.float32))
            self.register_buffer("zero", torch.tensor(activation.zero_point + UNSIGNED, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """X float32 ``(..., K)``."""
        activation = self.activation
        if isinstance(activation, StaticInt8):  # the pair of operators that runtimes look for
            codes = symbolic("QuantizeLinear", [x, self.scale, self.zero], x.shape, torch.uint8)
            return symbolic("DequantizeLinear", [codes, self.scale, self.zero], x.shape)
        if isinstance(activation, DynamicInt8):
            scale, zero = dynamic_parameters(x, activation.symmetric)
            codes = quantize_int8(x, scale, zero).float()
            return (codes if zero is None else codes - zero) * scale
        if isinstance(activation, (DynamicFP8, StaticFP8)):
            scale = fp8_scale(activation, x)
            return quantize_fp8(x, scale).float() * scale
        return x


class ONNXLinear(nn.Module):
    """Replaces a `QuantizedLinear`."""

    def __init__(self, layer: QuantizedLinear, weight: ONNXWeight) -> None:
        super().__init__()
        self.rounded, self.weight, self.bias = _Rounded(layer.scheme.activation), weight, _bias(layer)

    def forward(self, x: Tensor) -> Tensor:
        """X float32 ``(..., K)`` to ``(..., N)``."""
        y = self.weight.matmul(self.rounded(x))
        return y if self.bias is None else y + self.bias


class ONNXIntegerLinear(nn.Module):
    """Replaces a `QuantizedLinear` with symmetric int8 per token and per channel: MatMulInteger of ONNX.

    ``codes``: uint8 ``(K, N)``; ``zero``: their zero point, a scalar, and that of x; ``scales``: float32 ``(N,)``.
    """

    codes: Tensor
    zero: Tensor
    scales: Tensor

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        weight = layer.weight
        self.register_buffer("codes", unsigned(weight.codes().t()))
        self.register_buffer("zero", torch.tensor(UNSIGNED, dtype=torch.uint8))
        self.register_buffer("scales", weight.scales().reshape(-1))
        self.bias = _bias(layer)

    @staticmethod
    def holds(layer: QuantizedLinear) -> bool:
        """Whether the products of a layer are products of int8 codes only."""
        format, activation = layer.scheme.weight, layer.scheme.activation
        integer = format.element.is_integer and format.zero is ZeroPoint.NONE
        per_channel = format.groups(layer.weight.shape[1]) == 1
        symmetric = isinstance(activation, DynamicInt8) and activation.symmetric
        return integer and per_channel and symmetric and layer.weight.order is None

    def forward(self, x: Tensor) -> Tensor:
        """X float32 ``(..., K)`` to ``(..., N)``."""
        scale, _ = dynamic_parameters(x)
        codes = unsigned(quantize_int8(x, scale, None))
        inputs, shape = [codes, self.codes, self.zero, self.zero], (*x.shape[:-1], self.codes.shape[1])
        y = symbolic("MatMulInteger", inputs, shape, torch.int32).float() * self.scales * scale
        return y if self.bias is None else y + self.bias


class ONNXEmbedding(nn.Module):
    """Replaces a `QuantizedEmbedding`; ``factor``: of rows that are multiplied by a number."""

    def __init__(self, weight: ONNXWeight, factor: float | None = None) -> None:
        super().__init__()
        self.weight, self.factor = weight, factor

    def forward(self, indices: Tensor) -> Tensor:
        """Rows ``(*indices.shape, K)``."""
        rows = self.weight.rows(indices.long())
        return rows if self.factor is None else rows * self.factor


class ONNXConv2d(nn.Module):
    """Replaces a `QuantizedConv2d`: Conv of a dequantized weight, or products of receptive fields with own scales."""

    def __init__(self, layer: QuantizedConv2d, weight: ONNXWeight) -> None:
        super().__init__()
        self.geometry, self.weight, self.bias = layer._geometry, weight, _bias(layer)  # noqa: SLF001
        self.rounded, self.per_field = _Rounded(layer.scheme.activation), _has_own_scales(layer)

    def forward(self, x: Tensor) -> Tensor:
        """X float32 ``(B, IC, H, W)`` to ``(B, OC, OH, OW)``."""
        at = self.geometry
        x = pad(x, at.outer_padding, at.padding_mode)
        height, width = at.kernel_size
        if not self.per_field:
            dense = self.weight.dense().view(-1, height, width, at.in_channels // at.groups).permute(0, 3, 1, 2)
            return conv2d(self.rounded(x), dense, self.bias, at.stride, at.padding, at.dilation, at.groups)
        fields = unfold(x, at.kernel_size, at.dilation, at.padding, at.stride)  # (B, IC * KH * KW, positions)
        fields = fields.reshape(x.shape[0], at.in_channels, height * width, -1).permute(0, 3, 2, 1).flatten(2)
        y = self.weight.matmul(self.rounded(fields)).transpose(1, 2)
        y = y if self.bias is None else y + self.bias.view(-1, 1)
        rows = (x.shape[2] + 2 * at.padding[0] - at.dilation[0] * (height - 1) - 1) // at.stride[0] + 1
        return y.reshape(x.shape[0], y.shape[1], rows, -1)


def _has_own_scales(layer: QuantizedConv2d) -> bool:
    """Whether each receptive field has activation parameters of its own."""
    return isinstance(layer.scheme.activation, (DynamicInt8, DynamicFP8))


def _bias(layer: QuantizedModule) -> nn.Parameter | None:
    return None if layer.bias is None else nn.Parameter(layer.bias.detach().float(), requires_grad=False)


def replace_layers(model: nn.Module, *, standard: bool) -> tuple[Mapping[str, tuple[int, ...]], Mapping[str, str]]:
    """Replace the quantized layers of a model in place.

    Returns the names of buffers that are int4 in the graph, with their shapes there, and why layers cannot be written,
    by name.
    """
    shared: dict[object, ONNXWeight] = {}
    packed: dict[str, tuple[int, ...]] = {}
    refused: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        part_of_refused = name.rpartition(".")[0] in refused
        if part_of_refused or not isinstance(module, (QuantizedModule, QuantizedExperts)):
            continue
        try:
            made = _replacement(module, shared, standard)
        except LayerRefused as reason:
            refused[name] = str(reason)
            continue
        model.set_submodule(name, made)
        weight = getattr(made, "weight", None)
        if isinstance(weight, ONNXWeight):
            packed |= {f"{name}.weight.{key}": shape for key, shape in weight.int4_initializers.items()}
    return packed, refused


def _replacement(module: nn.Module, shared: dict[object, ONNXWeight], standard: bool) -> nn.Module:
    """The module that replaces a quantized layer. Raises `LayerRefused`."""
    if isinstance(module, (QuantizedExperts, QuantizedGroupedLinear)):
        raise LayerRefused("it holds several experts in one tensor")
    assert isinstance(module, QuantizedModule)
    if module.scheme.output is not None:
        raise LayerRefused(f"its scheme {module.scheme} returns int8 results")
    if type(module) is QuantizedLinear:
        if ONNXIntegerLinear.holds(module):
            return ONNXIntegerLinear(module)
        return ONNXLinear(module, _weight_of(module, shared, standard=standard))
    if type(module) in (QuantizedEmbedding, QuantizedScaledEmbedding):
        factor = module.factor(torch.float32) if isinstance(module, QuantizedScaledEmbedding) else None
        return ONNXEmbedding(_weight_of(module, shared, standard=standard), factor)
    if type(module) is QuantizedConv2d:
        if not _has_own_scales(module):
            return ONNXConv2d(module, DequantizedWeight(module.weight, unsigned_codes=_is_static(module)))
        if module.groups > 1:
            raise LayerRefused("it quantizes activations for each of several channel groups")
        return ONNXConv2d(module, _weight_of(module, shared, standard=standard))
    raise LayerRefused(f"{type(module).__name__} is not supported in ONNX")


def _weight_of(module: QuantizedModule, shared: dict[object, ONNXWeight], *, standard: bool) -> ONNXWeight:
    """The form of a layer's weight, one for all layers that share it and quantize x alike."""
    static = _is_static(module)
    key = (id(module._store), standard, static)  # noqa: SLF001
    if key not in shared:
        rows = any(isinstance(user, QuantizedEmbedding) for user in module._store.users)  # noqa: SLF001
        shared[key] = onnx_weight(module.weight, standard=standard, rows=rows, unsigned_codes=static)
    return shared[key]


def _is_static(module: QuantizedModule) -> bool:
    """Whether runtimes may join its QuantizeLinear, DequantizeLinear and product into a product of integers."""
    return isinstance(module.scheme.activation, StaticInt8)
