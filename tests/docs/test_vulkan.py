"""The page of the plugin `vulkan` agrees with the plugin: what it serves, refuses and reads."""

from __future__ import annotations

from dataclasses import replace

import pages
import pytest
import torch
from plugin_page import PluginPage, request

import qcore

pytest.importorskip("qcore_vulkan")

from qcore_vulkan import plugin

REFUSED = {
    "tensors on another device than the CPU": request(device=torch.device("cuda")),
    "float64 activations or results": request(x_dtype=torch.float64, out_dtype=torch.float64),
    "an int8 result of float activations": request(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8),
    "a group of more than 16384 codes that is not a multiple of 32": request(
        weight=qcore.Format("int8", 32771), k=1 << 16
    ),
    "rows that are longer than a buffer of the device": request(k=1 << 31),
    "a convolution in channel groups whose weight does not fit into one buffer": replace(
        request("conv2d"), in_channels=1 << 18, out_channels=1 << 18, groups=2
    ),
    "fp8 activations": request(scheme="wfp8afp8"),
    "int8 activations with a table": request(scheme="wfp8a16", activation=qcore.DynamicInt8()),
    "experts, each of which is larger than a buffer of the device": replace(
        request("grouped_linear"), n=1 << 16, k=1 << 16
    ),
    "a convolution with a stride, padding or dilation above 65535": replace(request("conv2d"), stride=(1 << 16, 1)),
}
ELSEWHERE = {"no loader, no driver, no device with the features that the shaders need"}
"""Refused before a request is looked at; tests/vulkan/test_probe.py holds the reasons."""


class TestPage(PluginPage):
    name, hooks, refused, elsewhere = "vulkan", plugin, REFUSED, ELSEWHERE

    def test_the_functional_ops_that_are_named_exist(self):
        named = pages.named(pages.sections(self.page)["Supported schemes"].split("[functional ops]")[1])
        ops = {name for name in named if name.startswith(("linear_", "conv2d_", "embedding_"))}
        assert len(ops) == 7
        assert all(hasattr(torch.ops.qcore, name) for name in ops)
