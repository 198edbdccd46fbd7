from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qcore
from qcore.errors import FormatError
from qcore.nn import QuantizedConv2d

SCHEMES = ["w8a16", "w4a16-g32-asym", "w8a8", "w4a8-g32"]


def kernel_of(layer):
    """The dequantized weight as torch's convolution takes it."""
    kh, kw = layer.kernel_size
    return layer.weight.dequantize(torch.float32).view(layer.out_channels, kh, kw, -1).permute(0, 3, 1, 2)


def float_twin(conv, layer):
    twin = copy.deepcopy(conv)
    twin.weight.data = kernel_of(layer).to(conv.weight.dtype)
    return twin


def tolerance(scheme):
    # Quantized activations err by half a step of each pixel's column.
    return {"atol": 5e-2, "rtol": 5e-2} if "a8" in scheme else {"atol": 1e-4, "rtol": 1e-4}


GEOMETRIES = [
    {"kernel_size": 3},
    {"kernel_size": 1},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "groups": 4, "bias": False},
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": (2, 4), "padding": "same"},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 3, "padding": "valid"},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch, of the float convolution
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_result_is_that_of_the_float_convolution(scheme, geometry):
    conv = nn.Conv2d(4, 8, **geometry)
    layer, x = QuantizedConv2d.from_float(conv, scheme), torch.randn(2, 4, 9, 8)
    torch.testing.assert_close(layer(x), float_twin(conv, layer)(x), **tolerance(scheme))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [2, (1, 0), "same"])
@pytest.mark.parametrize("size", [3, (2, 3)])
def test_padding_modes(mode, padding, size):
    conv = nn.Conv2d(4, 8, size, padding=padding, padding_mode=mode)
    layer, x = QuantizedConv2d.from_float(conv, "w8a16"), torch.randn(2, 4, 9, 8)
    torch.testing.assert_close(layer(x), float_twin(conv, layer)(x), atol=1e-4, rtol=1e-4)


def test_symmetric_zeros_are_left_to_the_kernel():
    same = QuantizedConv2d.from_float(nn.Conv2d(4, 8, (3, 5), padding="same"), "w8a16")
    assert (same.padding, same._outer_padding) == ((1, 2), ())
    assert QuantizedConv2d.from_float(nn.Conv2d(4, 8, 2, padding="same"), "w8a16")._outer_padding == (0, 1, 0, 1)


@pytest.mark.parametrize("shape", [(4, 9, 8), (0, 4, 9, 8)])
def test_unbatched_and_empty(shape):
    conv = nn.Conv2d(4, 8, 3)
    layer, x = QuantizedConv2d.from_float(conv, "w8a16"), torch.randn(shape)
    torch.testing.assert_close(layer(x), float_twin(conv, layer)(x), atol=1e-4, rtol=1e-4)


def test_memory_formats():
    layer, x = QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3), "w8a16"), torch.randn(2, 4, 9, 8)
    torch.testing.assert_close(layer(x.to(memory_format=torch.channels_last)), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32", "w8a8", "w8a8-static(0.05,3)", "w8a8-o8(0.1,2)"])
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("kernel", [1, 3])
def test_results_have_the_strides_of_torchs(scheme, channels, kernel):
    conv = nn.Conv2d(channels, 8, kernel)
    layer = QuantizedConv2d.from_float(conv, scheme)
    x = torch.randn(2, channels, 9, 8)
    last = torch.empty(2, 9, 8, channels).copy_(x.movedim(1, -1)).movedim(-1, 1)
    with torch.no_grad():
        for image in (x, last, x[0], last[..., ::2]):
            assert layer(image).stride() == conv(image).stride()
            weight = (layer.weight, layer.bias) if image.dim() == 4 else ()
            if weight and scheme == "w8a16":
                y = qcore.conv2d(image, *weight, kernel_size=(kernel, kernel))
                assert y.stride() == conv(image).stride()
    padded, pixel = nn.Conv2d(channels, 8, 3, padding=3), torch.randn(2, channels, 1, 1)
    assert QuantizedConv2d.from_float(padded, scheme)(pixel).stride() == padded(pixel).stride()
    layer(x).view(2, -1)  # as a model may that was written for torch.nn.Conv2d


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    conv = nn.Conv2d(4, 8, 3, dtype=dtype)
    layer, x = QuantizedConv2d.from_float(conv, "w8a16"), torch.randn(2, 4, 9, 8, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    expected = F.conv2d(x.float(), kernel_of(layer), conv.bias.float())
    torch.testing.assert_close(y.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (9, 8), (2, 4, 9)])
def test_a_wrong_shape_is_named(shape):
    layer = QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3), "w8a16")
    with pytest.raises(FormatError, match=r"it must be \(B, 4, H, W\) or \(4, H, W\)"):
        layer(torch.randn(shape))


def test_from_qtensor():
    qt = qcore.quantize(torch.randn(8, 2 * 3 * 2), "int8")
    layer = QuantizedConv2d.from_qtensor(qt, torch.randn(8), in_channels=4, kernel_size=(2, 3), groups=2, padding=1)
    x = torch.randn(1, 4, 6, 6)
    expected = F.conv2d(x, kernel_of(layer), layer.bias, padding=1, groups=2)
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(FormatError, match=r"needs KH\*KW\*IC/groups = 36 columns"):
        QuantizedConv2d.from_qtensor(qt, in_channels=4, kernel_size=3)
    with pytest.raises(FormatError, match="groups=3 must divide"):
        QuantizedConv2d.from_qtensor(qt, in_channels=6, kernel_size=(2, 3), groups=3)


def test_static_activations_pad_with_the_zero_point():
    conv = nn.Conv2d(4, 8, 3, padding=1)
    scheme = qcore.Scheme(qcore.Format("int8"), activation=qcore.StaticInt8(0.05, 40))
    layer, x = QuantizedConv2d.from_float(conv, scheme), torch.randn(1, 4, 5, 5)
    rounded = ((x / 0.05).round() + 40).clamp(-128, 127).sub(40) * 0.05
    torch.testing.assert_close(layer(x), float_twin(conv, layer)(rounded), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("stride", "groups"), list(itertools.product((1, 2), (1, 2))))
def test_gradients(stride, groups):
    conv = nn.Conv2d(4, 8, 3, stride=stride, padding=1, groups=groups)
    layer = QuantizedConv2d.from_float(copy.deepcopy(conv), "w4a16-g32-asym")
    twin = float_twin(conv, layer)
    grads = []
    for module in (layer, twin):
        x = torch.linspace(-1, 1, 2 * 4 * 9 * 8).view(2, 4, 9, 8).requires_grad_()
        module(x).square().sum().backward()
        grads.append((x.grad, module.bias.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_gradients_flow_through_outer_padding():
    layer = QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), "w8a16")
    x = torch.randn(1, 4, 5, 5, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_state_dict_meta_and_copies(add_kernel):
    add_kernel("mine")
    conv = nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular")
    layer, x = QuantizedConv2d.from_float(conv, "w4a16-g32-asym"), torch.randn(1, 4, 5, 5)
    assert layer.decision.plugin == "mine"
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        fresh = QuantizedConv2d.from_float(copy.deepcopy(conv).to("meta"), "w4a16-g32-asym")
    fresh.to_empty(device="cpu").load_state_dict(torch.load(file, weights_only=True))
    for other in (fresh, copy.deepcopy(layer)):
        assert torch.equal(other(x), layer(x))


def test_compile():
    torch._dynamo.reset()
    layer = QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3, padding="same"), "w8a16").eval()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for batch in (2, 3):
            x = torch.randn(batch, 4, 9, 8)
            torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)


def test_autocast():
    layer = QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3), "w8a16")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 4, 5, 5)).dtype == torch.bfloat16


def test_the_repr_says_the_geometry():
    text = repr(QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3, stride=2, padding=1), "w8a16"))
    assert "4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)" in text
    assert "scheme=w8a16, kernel=torch." in text
