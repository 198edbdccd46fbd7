"""The page of the plugin `xpu` agrees with the plugin, asked as on a machine that has the device and its Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plugin_page import PluginPage, request

import qcore

pytest.importorskip("qcore_xpu")

from qcore_xpu import aten, device, linear, plugin, triton_linear

XPU = torch.device("xpu")


def refused(contract="linear", scheme="w8a16", **changes):
    return request(contract, scheme, torch.bfloat16, device=XPU, **changes)


def convolution(channels, groups=1, taps=3):
    shape = {"in_channels": channels, "out_channels": channels, "groups": groups, "kernel_size": (taps, taps)}
    return replace(refused("conv2d", "w8a8"), **shape)


REFUSED = {
    "tensors on another device than `xpu`": replace(refused(), device=torch.device("cpu")),
    "float64 activations or results": refused(x_dtype=torch.float64, out_dtype=torch.float64),
    "an int8 result of float activations": refused(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8),
    "a group size that is not a multiple of 32, except for `w4a16`": refused(weight=qcore.Format("int8", 20), k=80),
    "`w4a16` in groups of fewer than 8 columns": refused(scheme="w4a16", weight=qcore.Format("int4", 7), k=70),
    "a convolution with int8 activations in channel groups with columns longer than 4096, unless there are at most 32 "
    "groups, each with a multiple of 16 output channels": convolution(1000, groups=2),
    "a convolution with int8 activations and columns longer than 16384": convolution(4096),
}
WITHOUT_DPAS = (
    "`w4a8`, `w8a8` in groups and convolutions with int8 activations, but for depthwise ones, on a GPU without "
    "matrix units that Triton can use: sub-groups of 8 (Arc A770), or none"
)
ELSEWHERE = {
    "no Intel GPU, a build of torch without XPU, a driver that torch cannot use",  # tests/xpu/test_probe.py
    "kernels in Triton if Triton for XPU is missing",
    WITHOUT_DPAS,  # tests/xpu/test_device.py
}


@pytest.fixture(autouse=True)
def complete(monkeypatch):
    """A build of torch with every op for XPU, its Triton, and a GPU with matrix units."""
    monkeypatch.setattr(aten, "missing", lambda _: "")
    monkeypatch.setattr(triton_linear, "why_not_triton", lambda: "")
    for module in (device, triton_linear):
        monkeypatch.setattr(module, "why_not_int8", lambda _: "")


class TestPage(PluginPage):
    name, hooks, device, dtype = "xpu", plugin, "xpu", torch.bfloat16
    refused, elsewhere = REFUSED, ELSEWHERE

    def test_float32_takes_the_kernels_that_the_page_names(self):
        names = {self.answer(request("linear", s, device=XPU)).kernel.name for s in ("w4a16-g128", "w8a16", "w8a8")}
        assert names == {"xpu.dense_w4a16", "xpu.dense_w8a16", "xpu.w8a8"}

    def test_every_kernel_has_a_row_that_says_what_computes_it(self):
        told = self.told("Kernels", slice(1))
        assert all(name in told or f"{name.split('_')[0]}_*" in told for name in set(self.served().values()))

    def test_widths_of_padding_are_those_of_the_kernel(self):
        for group, more in ((48, "33%"), (20, "60%")):
            made = linear.kernel(refused(scheme="w4a16", weight=qcore.Format("int4", group), k=group * 4))
            assert f"{more} more weight" in made.note

    def test_without_triton_torch_ops_serve_what_needs_it(self, monkeypatch):
        monkeypatch.setattr(triton_linear, "why_not_triton", lambda: "no Triton")
        assert isinstance(self.answer(refused(scheme="w4a8")), qcore.Refusal)
        assert self.answer(refused(scheme="w4a16")).kernel.name == "xpu.w4a16"
