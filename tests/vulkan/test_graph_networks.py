"""Whole networks of images as one program on a Vulkan device."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import qcore
from qcore import graphs
from qcore_vulkan.graphs.backend import qcore_vulkan

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    """A basic block of ResNet: two convolutions beside a shortcut."""

    def __init__(self, channels, columns, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, columns, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(columns, columns, 3, 1, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(columns), nn.BatchNorm2d(columns), nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != columns:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, columns, 1, stride, bias=False), nn.BatchNorm2d(columns)
            )

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x += shortcut
        return self.relu(x)


class ResNet18(nn.Module):
    """The wiring of ResNet-18 with ``width`` channels in the first stage."""

    def __init__(self, width, classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for stage, (before, after) in enumerate(pairwise(sizes)):
            blocks += [Block(before, after, 2 if stage else 1), Block(after, after, 1)]
        self.layers, self.avgpool = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


class MobileBlocks(nn.Module):
    """Depthwise convolutions, gates by channel, a branch of pooled means and one of group norms."""

    def __init__(self):
        super().__init__()
        self.spread, self.own = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm, self.gate = nn.BatchNorm2d(12), nn.Sequential(nn.Conv2d(12, 4, 1), nn.SiLU(), nn.Conv2d(4, 12, 1))
        self.pool, self.groups = nn.AvgPool2d(3, 1, 1), nn.GroupNorm(3, 12)

    def forward(self, x):
        x = nn.functional.hardswish(self.norm(self.own(self.spread(x))))
        x = x * self.gate(nn.functional.adaptive_avg_pool2d(x, 1)).sigmoid()
        x = torch.cat((self.pool(x), self.groups(x)), 1)
        return nn.functional.adaptive_avg_pool2d(x, (2, 3)).flatten(1)


def trained(model):
    """A model in evaluation, whose norms have statistics and weights of their own."""
    for norm in (one for one in model.modules() if isinstance(one, nn.BatchNorm2d)):
        for tensor in (norm.running_mean, norm.bias.data):
            tensor.normal_(0, 0.2)
        for tensor in (norm.running_var, norm.weight.data):
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def is_whole(model):
    """Whether the device runs all of a model as one submission."""
    found = graphs.explain(model)
    return not found.host and not found.refused and found.submissions == len(found.reports) == 1


@pytest.mark.alternate
@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: ResNet18(8), MobileBlocks])
@pytest.mark.parametrize("scheme", [None, "w8a16", "w8a8", "w4a16-g32"])
def test_networks_are_one_submission(device, make, scheme):
    torch.manual_seed(0)
    model, x = trained(make()), torch.randn(2, 3, 40, 33)
    if scheme:
        qcore.quantize_(model, scheme)
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend=qcore_vulkan)
    y, wanted = compiled(x), expected(x)
    assert is_whole(compiled)
    assert (y - wanted).norm() <= (2e-2 if scheme == "w8a8" else 1e-4) * wanted.norm()
    before = device.stats().submissions
    compiled(x)
    assert device.stats().submissions == before + 1
