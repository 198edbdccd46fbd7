"""Small quantized models with adapters of peft, and their dense twins."""

from __future__ import annotations

import copy

import peft
import torch
from torch import nn

import qcore

PRE = "base_model.model."


class Net(nn.Module):
    """A table, two linear layers and a convolution."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, dilation=2, groups=groups)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.table(tokens))))
        return self.conv(hidden.view(-1, 4, 8, 8)).flatten(1)


def tokens(count: int = 4) -> torch.Tensor:
    return torch.randint(50, (count, 4), generator=torch.Generator().manual_seed(7))


def quantized_net(scheme: str = "w4a16-g32", **options: int) -> Net:
    torch.manual_seed(0)
    net = Net(**options)
    qcore.quantize_(net, {"conv": "w8a16", "table": "w8a16-g32", "*": scheme})
    return net


def randomized(model: nn.Module, size: float = 0.1) -> nn.Module:
    """Give every adapter a nonzero update."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


ALL = ["table", "up", "down", "conv"]


def adapted(net: nn.Module, targets: list[str] = ALL, **options) -> nn.Module:
    torch.manual_seed(1)
    return randomized(peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=targets, **options)))


def bits(module: qcore.nn.QuantizedLinear) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.weight.tensors().items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def dense_twin(layer: nn.Module) -> nn.Module:
    """The float layer with the dequantized weight of a quantized one."""
    weight = layer.weight.dequantize(torch.float32)
    if isinstance(layer, qcore.nn.QuantizedEmbedding):
        return nn.Embedding.from_pretrained(weight, freeze=False)
    if isinstance(layer, qcore.nn.QuantizedConv2d):
        shape = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        made: nn.Module = nn.Conv2d(*shape, groups=layer.groups, bias=layer.bias is not None)
        weight = weight.view(layer.out_channels, *layer.kernel_size, -1).permute(0, 3, 1, 2)
    else:
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    made.weight = nn.Parameter(weight.contiguous())
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().clone())
    return made


def dense_net(net: Net) -> Net:
    twin = copy.deepcopy(net)
    for name in ALL:
        setattr(twin, name, dense_twin(getattr(net, name)))
    return twin
