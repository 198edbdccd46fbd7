"""What is refused is refused beforehand, with a reason, and served by torch ops; never by an error of a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import qcore
from qcore.contracts import CONTRACTS, Conv2dRequest
from qcore.nn import QuantizedConv2d, QuantizedLinear
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_vulkan import device, eligibility, plugin
from qcore_vulkan.steps import convolution

CPU = torch.device("cpu")
KERNELS = {
    "linear": plugin.qcore_linear,
    "conv2d": plugin.qcore_conv2d,
    "embedding": plugin.qcore_embedding,
    "grouped_linear": plugin.qcore_grouped_linear,
}


def request_of(contract: str, scheme: str, n: int = 24, k: int = 96):
    return CONTRACTS[contract].request_for(Scheme.parse(scheme), CPU, torch.float32, n, k)


def conv(scheme: str = "w8a16", channels: int = 8, out: int = 32, **sizes) -> Conv2dRequest:
    return replace(request_of("conv2d", scheme, out, channels), kernel_size=(3, 3), **sizes)


def refusal(request) -> str:
    answer = KERNELS[request.contract](request)
    assert isinstance(answer, qcore.Refusal)
    return answer.reason


def is_served(request) -> bool:
    return isinstance(KERNELS[request.contract](request), qcore.Offer)


@pytest.mark.parametrize("contract", KERNELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_served(contract, scheme):
    # Indices are not quantized, and experts return floats.
    if contract in ("linear", "conv2d") or "a16" in scheme or (contract == "grouped_linear" and "-o8" not in scheme):
        assert is_served(request_of(contract, scheme))


def test_other_devices_and_dtypes():
    linear = request_of("linear", "w8a16")
    assert "these are on meta" in refusal(replace(linear, device=torch.device("meta")))
    assert "activations of dtype float64" in refusal(replace(linear, x_dtype=torch.float64))
    assert "results of dtype float64" in refusal(replace(linear, out_dtype=torch.float64))
    assert "use a scheme such as w8a8-o8" in refusal(replace(linear, output=qcore.OutputInt8(1.0, 0)))


@pytest.mark.parametrize("contract", KERNELS)
@pytest.mark.parametrize(("n", "k"), [(0, 5), (5, 0)])
def test_weights_without_elements(contract, n, k):
    assert "nothing to compute" in refusal(request_of(contract, "w8a16", n, k))


@pytest.mark.parametrize("contract", KERNELS)
def test_groups_that_do_not_divide(contract):
    """20000 columns of one scale are two groups of 10000 for the device, which are no whole blocks of 32."""
    reason = refusal(request_of(contract, "w8a16-g20000", 8, 40000))
    assert "group size 20000 cannot be divided" in reason
    assert is_served(request_of(contract, "w8a16-g32768", 8, 65536))
    assert is_served(request_of(contract, "w8a16", 8, 40000))


def test_groups_that_do_not_divide_are_served_by_torch_ops():
    layer = nn.Linear(40000, 8)
    with qcore.using("vulkan,torch"):
        quantized = QuantizedLinear.from_float(layer, "w8a16-g20000").requires_grad_(False)
    torch.testing.assert_close(quantized(torch.ones(2, 40000)), layer(torch.ones(2, 40000)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("axis", [0, 1])
def test_windows_whose_numbers_do_not_fit(name, axis):
    for value, served in ((65535, True), (65536, False)):
        sizes = [1, 1]
        sizes[axis] = value
        request = conv(**{name: tuple(sizes)})
        assert is_served(request) == served
        if not served:
            assert "a stride, padding or dilation of 65536" in refusal(request)


def test_a_wide_stride():
    """As wide as the numbers go, and one more: with 16 bits it would be 0."""
    torch.manual_seed(0)
    for stride, plugins in ((65535, "vulkan"), (65536, "vulkan,torch")):
        layer = nn.Conv2d(2, 3, (1, 2), stride=(1, stride))
        with qcore.using(plugins, verify="off"):  # the comparison below verifies
            quantized = QuantizedConv2d.from_float(layer, "w8a16").requires_grad_(False)
        x = torch.randn(1, 2, 1, 2 * stride + 2)
        torch.testing.assert_close(quantized(x), layer(x), rtol=1e-2, atol=1e-2)


def test_columns_too_long_to_find_the_way_in(monkeypatch):
    monkeypatch.setattr(convolution, "_MOST_COLUMNS", 71)
    assert "columns of 72 values" in refusal(conv())
    assert is_served(request_of("conv2d", "w8a16", 8, 96))  # its columns are pixels


def small(monkeypatch, largest: int) -> None:
    """No device here takes more than this at once."""
    known = [replace(one, limits=replace(one.limits, max_storage_range=largest)) for one in device.devices()]
    monkeypatch.setattr(device, "devices", lambda: known)


def test_channel_groups_whose_weight_needs_parts(monkeypatch):
    """32 rows of 4 * 9 codes, padded to 64. Without groups the weight may be in parts."""
    small(monkeypatch, 32 * 64)
    assert is_served(conv(groups=2))
    small(monkeypatch, 32 * 64 - 1)
    assert "2 channel groups must fit into one buffer" in refusal(conv(groups=2))
    assert is_served(conv())


def test_rows_longer_than_a_buffer(monkeypatch):
    small(monkeypatch, 4096)
    for contract in KERNELS:
        assert is_served(request_of(contract, "w8a16", 8, 512))
        assert "rows of 544 values" in refusal(request_of(contract, "w8a16", 8, 544))
    assert "rows of 1152 values" in refusal(conv(channels=128, out=128, groups=128))


def test_the_device_that_takes_least_counts(monkeypatch):
    one = device.get().description
    less, broken = (replace(one, limits=replace(one.limits, max_storage_range=size)) for size in (5000, 3000))
    monkeypatch.setattr(device, "devices", lambda: [one, less, replace(broken, missing="something")])
    assert eligibility.largest_range() == 5000
    monkeypatch.setattr(device, "devices", list)
    assert eligibility.largest_range() > 5000
