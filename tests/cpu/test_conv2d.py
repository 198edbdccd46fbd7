"""Convolutions whose windows have a scale each."""

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

import qcore
from qcore_cpu import native

assert not native.fault()

from qcore_cpu import ops  # noqa: E402 - they exist once the library is loaded


def windows_of(x, conv):
    """The windows of an image as rows of (kernel height, kernel width, channels)."""
    (kh, kw), (sh, sw), (dh, dw), (ph, pw) = conv.kernel_size, conv.stride, conv.dilation, conv.padding
    padded = pad(x.permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph))
    height, width = padded.shape[1] - dh * (kh - 1), padded.shape[2] - dw * (kw - 1)
    taps = [
        padded[:, i * dh : i * dh + height : sh, j * dw : j * dw + width : sw] for i in range(kh) for j in range(kw)
    ]
    return torch.cat(taps, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("channels", "geometry"), [
    (64, {"kernel_size": 3, "padding": 1}), (128, {"kernel_size": 3, "padding": 1, "stride": 2}),
    (4, {"kernel_size": 3, "padding": 1}), (80, {"kernel_size": (2, 5), "padding": (3, 2), "stride": (2, 3)}),
    (36, {"kernel_size": (5, 4), "padding": 4}), (16, {"kernel_size": (1, 3), "stride": 4}),
    (68, {"kernel_size": 3, "padding": 2, "dilation": (2, 1)}), (64, {"kernel_size": 3, "padding": 1, "dilation": 2}),
])  # fmt: skip
def test_windows_that_share_their_scale_and_others(channels, geometry, dtype):
    """Neighbours with one scale take codes from each other; NaN, Inf and zeros stand between them."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 40, bias=False, **geometry).to(dtype)
    x = torch.randn(2, channels, 9, 17).to(dtype).contiguous(memory_format=torch.channels_last)
    x *= torch.tensor([1, 1, 1, 1, 1, 8, 0.01])[torch.randint(7, (2, 1, 9, 17))].to(dtype)  # pixels that rule others
    x[0, :, 2:6, 5:10] = 0
    x[1, 1, 4, 8], x[1, 2, 4, 15], x[1, 0, 0, 2] = float("nan"), float("inf"), 60000
    layer = qcore.nn.QuantizedConv2d.from_float(conv, "w8a8")
    rows = qcore.nn.QuantizedLinear.from_float(linear_of(conv), "w8a8")
    with torch.no_grad():
        found, expected = layer(x), rows(windows_of(x, conv)).permute(0, 3, 1, 2)
    assert (qcore.report(layer).kernels(), qcore.report(rows).kernels()) == ({"cpu.conv2d": 1}, {"cpu.linear": 1})
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "scheme", ["w8a8", "w4a8-asym", "w8a8-aasym", "w4a8-g32-aasym", "w8a8-static(0.02,5)", "w8a8-g16-fzp"]
)
@pytest.mark.parametrize(("channels", "outputs", "groups", "geometry"), [
    (40, 40, 40, {"kernel_size": 3, "padding": 1}), (40, 80, 40, {"kernel_size": 5, "padding": (0, 2), "stride": 2}),
    (7, 7, 7, {"kernel_size": (23, 24), "padding": 16}), (64, 5, 1, {"kernel_size": 1}),
    (6, 15, 3, {"kernel_size": (2, 5), "padding": (3, 2), "stride": (2, 3)}),
    (32, 36, 4, {"kernel_size": 3, "padding": 2, "dilation": (2, 1)}),
    (3, 33, 1, {"kernel_size": 7, "padding": 3, "stride": 5}), (64, 32, 8, {"kernel_size": 1, "stride": 3}),
    (2, 2, 2, {"kernel_size": (1, 3), "padding": (2, 9)}),
])  # fmt: skip
def test_few_channels_give_what_linear_layers_give(channels, outputs, groups, geometry, scheme, dtype):
    """Each channel group is a linear layer on its windows, of which some hold NaN, Inf, zeros and large numbers."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, outputs, groups=groups, **geometry).to(dtype)
    x = torch.randn(2, channels, 9, 17).to(dtype)
    x *= torch.tensor([1, 1, 1, 1, 1, 8, 0.01])[torch.randint(7, (2, 1, 9, 17))].to(dtype)
    x[0, :, 2:6, 5:10] = 0
    x[1, 1, 4, 8], x[1, channels - 1, 4, 15] = float("nan"), float("inf")
    layer = qcore.nn.QuantizedConv2d.from_float(conv, scheme)
    assert type(layer.decision.kernel).__name__ == "CpuPlaneConv2d"
    own, expected = outputs // groups, []
    for g in range(groups):
        part = nn.Conv2d(channels // groups, own, **geometry).to(dtype)
        part.weight.data, part.bias.data = (t.data[g * own : (g + 1) * own] for t in (conv.weight, conv.bias))
        windows = windows_of(x[:, g * channels // groups : (g + 1) * channels // groups], part)
        expected.append(qcore.nn.QuantizedLinear.from_float(linear_of(part), scheme)(windows))
    found, expected = layer(x), torch.cat(expected, -1).permute(0, 3, 1, 2)
    # A code next to a tie, a last bit.
    rounding = {torch.bfloat16: 0.008, torch.float16: 0.002, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)
    last = layer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, found, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-asym", "w8a8-o8(0.1,-3)", "w8a8-static(0.02,5)-o8(0.1,-3)"])
@pytest.mark.parametrize("outputs", [1, 4, 16, 17, 48, 72])
@pytest.mark.parametrize(("channels", "geometry"), [
    (8, {"kernel_size": 1}), (24, {"kernel_size": 1, "stride": 2}), (56, {"kernel_size": 1, "padding": 1}),
    (96, {"kernel_size": 1, "bias": False}), (16, {"kernel_size": 3, "padding": 1}),
    (8, {"kernel_size": (3, 5), "padding": (1, 4), "stride": (2, 1)}),
    (24, {"kernel_size": 3, "padding": (2, 1), "dilation": (1, 2)}),
])  # fmt: skip
def test_short_rows_of_channels(channels, geometry, outputs, scheme, dtype):
    """Whole and partial vectors of values, codes and results, in both formats of images."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, outputs, **geometry).to(dtype)
    x = torch.randn(2, channels, 9, 61).to(dtype)
    x *= torch.tensor([1, 1, 1, 8, 0.01])[torch.randint(5, (2, 1, 9, 61))].to(dtype)
    x[0, :, 2:6, 5:10] = 0
    if "static" not in scheme:  # whose code of NaN is any
        x[1, 1, 4, 8], x[1, channels - 1, 4, 15] = float("nan"), float("inf")
    layer = qcore.nn.QuantizedConv2d.from_float(conv, scheme)
    expected = qcore.nn.QuantizedLinear.from_float(linear_of(conv), scheme)(windows_of(x, conv)).permute(0, 3, 1, 2)
    rounding = {torch.bfloat16: 0.008, torch.float16: 0.002, torch.float32: 1e-5}[dtype]  # a code next to a tie
    rounding = 1 if "o8" in scheme else rounding
    for form in (torch.channels_last, torch.contiguous_format):
        found = layer(x.contiguous(memory_format=form))
        assert found.is_contiguous(memory_format=form)
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)
    some = x.contiguous(memory_format=torch.channels_last)[1:, :, 3:6, 7:11]  # not contiguous; few positions
    alone = layer(x[1:, :, 3:6, 7:11].clone())
    torch.testing.assert_close(layer(some), alone, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", [
    "w8a8-aasym", "w4a8-asym-aasym", "w8a8-fzp-aasym", "w8a8-g32", "w8a8-g64-asym-aasym", "w4a8-g32-fzp-aasym",
    "w4a8-g128-asym", "w8a8-g96-aasym-o8(0.1,-3)", "w4a8-g32-static(0.02,5)", "w8a8-g64-fzp-static(0.02,0)",
])  # fmt: skip
@pytest.mark.parametrize("outputs", [6, 17, 48])
@pytest.mark.parametrize(("channels", "geometry"), [
    (104, {"kernel_size": 1}), (40, {"kernel_size": 1, "stride": 2, "padding": 1}),
    (64, {"kernel_size": 3, "padding": 1}), (8, {"kernel_size": (3, 5), "padding": (1, 4), "stride": (2, 1)}),
    (3, {"kernel_size": 7, "padding": 3, "stride": 2}),
    (24, {"kernel_size": 3, "padding": (2, 1), "dilation": (1, 2)}), (5, {"kernel_size": 3, "bias": False}),
])  # fmt: skip
def test_windows_with_zero_points_and_groups(channels, geometry, outputs, scheme, dtype):
    """Windows are rows of a linear layer, to the bit: zero points, padding, columns in groups, some of them in part."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, outputs, **geometry).to(dtype)
    x = torch.randn(2, channels, 9, 41).to(dtype) + torch.randint(-2, 3, (2, 1, 9, 41))
    x *= torch.tensor([1, 1, 1, 8, 0.01])[torch.randint(5, (2, 1, 9, 41))]
    x[0, :, 2:6, 5:10] = 0
    if "static" not in scheme:  # whose code of NaN is any
        x[1, 1, 4, 8], x[1, channels - 1, 4, 15], x[1, 0, 0, 2] = float("nan"), float("-inf"), -60000
        x[1, 0, 7, 30] = -x[1, 1, 4, 8]
        if dtype is not torch.float16:
            x[0, 0, 8, 30], x[0, 1, 8, 30] = 3e38, -3e38  # whose range is Inf
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    layer = qcore.nn.QuantizedConv2d.from_float(conv, scheme)
    rows = qcore.nn.QuantizedLinear.from_float(linear_of(conv), scheme)
    exact = layer.decision.kernel.windows_last  # else planes
    assert exact == (channels % 8 == 0 or ("static" not in scheme and native.lanes() == 16))
    found, expected = layer(x), rows(windows_of(x, conv)).permute(0, 3, 1, 2)
    rounding = {torch.bfloat16: 0.008, torch.float16: 0.002, torch.float32: 1e-5}[dtype]  # a code next to a tie
    rounding = 0 if exact else 1 if "o8" in scheme else rounding
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", [
    "w8a8", "w4a8-asym", "w8a8-asym", "w8a8-aasym", "w4a8-asym-aasym", "w8a8-static(0.02,5)", "w8a8-aasym-o8(0.1,-3)",
])  # fmt: skip
@pytest.mark.parametrize(("channels", "size", "geometry"), [
    (36, 4, {"kernel_size": 3, "padding": 1}), (40, 8, {"kernel_size": (2, 5), "padding": (3, 2), "stride": (2, 3)}),
    (48, 16, {"kernel_size": 3, "padding": 2, "dilation": (1, 2)}), (64, 4, {"kernel_size": 1, "bias": False}),
    (17, 1, {"kernel_size": 3, "padding": 1, "stride": 2}), (256, 8, {"kernel_size": 3, "padding": 1}),
    (16, 1, {"kernel_size": (19, 24), "padding": 16}), (33, 1, {"kernel_size": 5, "padding": 2}),
    (48, 1, {"kernel_size": 7, "padding": 3, "stride": (3, 1), "dilation": (1, 2)}),
])  # fmt: skip
def test_channels_of_small_groups_are_lanes(channels, size, geometry, scheme, dtype, monkeypatch):
    """What planes give, to the bit: parts of lines, padding, NaN, Inf, zeros, and a range beyond the largest float."""
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, channels, groups=channels // size, **geometry).to(dtype)
    x = torch.randn(2, channels, 9, 61) + torch.randint(-2, 3, (2, channels, 1, 1))
    x *= torch.tensor([1, 1, 1, 1, 1, 8, 0.01])[torch.randint(7, (2, 1, 9, 61))]
    x[0, :, 2:6, 5:10] = 0
    if "static" not in scheme:  # whose code of NaN is any
        x[1, 1, 4, 8], x[1, channels - 1, 4, 15] = float("nan"), float("inf")
        if dtype is not torch.float16:
            x[0, 0, 8, 50], x[0, 0, 8, 51] = 3e38, -3e38
    x = x.to(dtype)
    layer = qcore.nn.QuantizedConv2d.from_float(conv, scheme)
    kernel = layer.decision.kernel
    assert kernel.channelwise == (size == 1 or (size <= native.lanes() and scheme != "w8a8-asym"))
    last, turned = layer(x.contiguous(memory_format=torch.channels_last)), layer(x)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert turned.is_contiguous()
    monkeypatch.setattr("qcore_cpu.conv2d._MOST_TURNED", 0)
    planes = layer(x)
    for found in (last, turned):
        torch.testing.assert_close(found, planes, rtol=0, atol=0, equal_nan=True)


def linear_of(conv):
    weight = conv.weight.detach().permute(0, 2, 3, 1).flatten(1)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data = weight.contiguous()
    if conv.bias is not None:
        layer.bias = nn.Parameter(conv.bias.detach().clone())
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 16, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("columns", [1, 15, 16, 32, 49, 65, 128])
def test_transposed_copies(rows, columns, dtype):
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    x = torch.randint(-30000, 30000, (3, rows, columns), dtype=bits).view(dtype)  # NaN among them
    assert torch.equal(ops.transposed(x).view(bits), x.view(bits).transpose(1, 2))


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a16-g32", "w8a8-static(0.03,2)-o8(0.1,-3)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(8, 8), (1, 1), (1, 9), (16, 5)])
def test_either_format_of_images(scheme, dtype, size):
    """The same results; in the format of x, so that later code may take a view."""
    torch.manual_seed(0)
    layer = qcore.nn.QuantizedConv2d.from_float(nn.Conv2d(40, 37, 3, padding=1).to(dtype), scheme)
    x = torch.randn(2, 40, *size).to(dtype)
    last = x.contiguous(memory_format=torch.channels_last)
    found, expected = layer(x), layer(last)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.is_contiguous()
    assert expected.is_contiguous(memory_format=torch.channels_last)
    sliced = torch.cat((x, x), 3)[..., : size[1]]
    torch.testing.assert_close(layer(sliced), expected, rtol=0, atol=0)
