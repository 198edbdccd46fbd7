from __future__ import annotations

import io
import pickle

import pytest
import torch
from linear_layers import FLOAT_SCHEMES, SCHEMES, _without, dense, made
from torch import nn

import qcore
from qcore.errors import FormatError
from qcore.nn import QuantizedLinear


@pytest.mark.parametrize("scheme", FLOAT_SCHEMES)
@pytest.mark.parametrize("bias", [True, False])
def test_result_is_that_of_the_dequantized_weight(scheme, bias):
    layer, x = made(scheme, bias=bias), torch.randn(5, 64)
    with torch.no_grad():
        first, second = layer(x), layer(x)  # the first call takes another way than the ones after it
    torch.testing.assert_close(first.double(), dense(layer, x), atol=1e-5, rtol=1e-5)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    layer = made(dtype=dtype)
    x = torch.randn(5, 64, dtype=dtype)
    y = layer(x)
    assert y.dtype == layer.weight.dtype == dtype
    torch.testing.assert_close(y.double(), dense(layer, x), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_an_x_of_another_dtype_gives_that_dtype(dtype):
    layer = made()
    x = torch.randn(5, 64).to(dtype)
    for _ in range(2):
        assert layer(x).dtype == dtype
    torch.testing.assert_close(layer(x).double(), dense(layer, x), atol=3e-2, rtol=3e-2)
    assert layer(x.float()).dtype == torch.float32


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (2, 3, 64), (2, 0, 64), (2, 1, 3, 64)])
def test_shapes(scheme, shape):
    layer = made(scheme)
    x = torch.randn(shape)
    y = layer(x)
    assert y.shape == (*shape[:-1], 16)
    rows = torch.stack([layer(row) for row in x.reshape(-1, 64)]) if x.numel() else y.reshape(-1, 16)
    torch.testing.assert_close(y.reshape(-1, 16), rows, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strides_of_x_do_not_matter(scheme):
    layer, x = made(scheme), torch.randn(64, 6)
    torch.testing.assert_close(layer(x.t()), layer(x.t().contiguous()), atol=1e-5, rtol=1e-5)
    wide = torch.randn(6, 128)
    torch.testing.assert_close(layer(wide[:, ::2]), layer(wide[:, ::2].contiguous()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 63), (64, 1), ()])
def test_a_wrong_last_dimension_is_named(shape):
    with pytest.raises(FormatError, match=r"x has shape .*its last dimension must be in_features = 64"):
        made()(torch.randn(shape))


def test_an_x_that_is_not_floating_is_named():
    layer = made()
    for dtype in (torch.int64, torch.int8, torch.bool):
        with pytest.raises(FormatError, match=r"x has dtype[\s\S]*int8"):
            layer(torch.ones(2, 64, dtype=dtype))


def test_int8_codes_under_a_static_scheme_are_taken_as_they_are():
    qt = qcore.quantize(torch.randn(16, 64), "int8")
    layer = QuantizedLinear.from_qtensor(qt, scheme=qcore.Scheme(qt.format, activation=qcore.StaticInt8(0.1, 3)))
    codes = torch.randint(-128, 128, (5, 64)).to(torch.int8)
    y = layer(codes)
    assert y.dtype == torch.float32
    expected = ((codes.double() - 3) * 0.1) @ qt.dequantize(torch.float64).t()
    torch.testing.assert_close(y.double(), expected, atol=1e-3, rtol=1e-4)


def test_output_codes():
    qt = qcore.quantize(torch.randn(16, 64), "int8")
    scheme = qcore.Scheme(qt.format, activation=qcore.DynamicInt8(), output=qcore.OutputInt8(0.5, 2))
    y = QuantizedLinear.from_qtensor(qt, scheme=scheme)(torch.randn(5, 64, requires_grad=True))
    assert (y.dtype, y.requires_grad) == (torch.int8, False)


def test_from_float_keeps_mode_bias_and_hooks():
    linear = nn.Linear(64, 16).eval()
    seen = []
    linear.register_forward_hook(lambda module, args, out: seen.append("after"))
    linear.register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True)
    linear.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    layer = QuantizedLinear.from_float(linear, "w8a16")
    assert layer.bias is linear.bias
    assert not layer.training
    layer(torch.randn(2, 64, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_from_qtensor_checks_the_bias():
    qt = qcore.quantize(torch.randn(16, 64), "int8")
    with pytest.raises(FormatError, match=r"bias has shape \(64,\); this weight needs \(16,\)"):
        QuantizedLinear.from_qtensor(qt, torch.zeros(64))
    layer = QuantizedLinear.from_qtensor(qt, torch.zeros(16), dtype=torch.bfloat16)
    assert isinstance(layer.bias, nn.Parameter)
    assert layer(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_scheme_without_its_numbers_says_where_they_come_from():
    with pytest.raises(FormatError, match="lacks its scale and zero point: give them as StaticInt8"):
        made("w8a8-static")


def test_nan_in_the_weight_names_the_layer():
    linear = nn.Linear(64, 16)
    linear.weight.data[3, 5] = float("nan")
    with pytest.raises(FormatError, match=r"block\.fc"):
        QuantizedLinear.from_float(linear, "w8a16", name="block.fc")


def test_weight_answers_model_code_and_unpacks_on_demand(add_kernel):
    add_kernel("mine")
    layer = made(dtype=torch.bfloat16)
    weight = layer.weight
    assert (weight.shape, weight.size(0), weight.dim()) == ((16, 64), 16, 2)
    assert (weight.dtype, weight.device.type) == (torch.bfloat16, "cpu")
    assert "data" not in vars(weight)
    assert weight.dequantize().shape == (16, 64)
    assert "data" in vars(weight)
    assert isinstance(weight, qcore.QTensor)
    with pytest.raises(AttributeError, match="a quantized weight has no attribute 'grad'; dequantize"):
        _ = weight.grad
    with pytest.raises(TypeError, match=r"Use qcore\.linear"):
        nn.functional.linear(torch.randn(1, 64), weight)
    assert type(pickle.loads(pickle.dumps(weight))) is qcore.QTensor


def test_the_repr_says_what_serves():
    assert "scheme=w4a16-g32, kernel=torch." in repr(made())


@pytest.mark.parametrize("fault", ["stub", "fallback"])
@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16"])
def test_state_dict_is_neutral_whatever_is_packed(add_kernel, scheme, fault):
    if fault == "stub":
        add_kernel("mine")
    linear = nn.Linear(64, 16)
    layer = QuantizedLinear.from_float(linear, scheme)
    layer(torch.randn(2, 64))
    expected = qcore.quantize(linear.weight, layer.scheme.weight, layer.scheme.quantizer)
    state = layer.state_dict()
    assert set(state) == {"bias", *(f"weight.{part}" for part in expected.tensors())}
    for name, tensor in expected.tensors().items():
        assert torch.equal(state[f"weight.{name}"], tensor)
    assert all(name.startswith("packed_") for name, _ in layer.named_buffers())


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(add_kernel, assign):
    add_kernel("mine")
    source, target = made(), made()
    x = torch.randn(3, 64)
    before = target(x)
    state = source.state_dict()
    assert target.load_state_dict(state, assign=assign) == ([], [])
    assert torch.equal(target(x), source(x))
    assert not torch.equal(target(x), before)
    shares = target.bias.data_ptr() == state["bias"].data_ptr()
    assert shares == assign


def test_copied_weights_do_not_follow_the_source():
    source, target = made(), made()
    state = source.state_dict()
    target.load_state_dict(state)
    x = torch.randn(3, 64)
    before = target(x)
    state["weight.scale"].zero_()
    assert torch.equal(target(x), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: _without(s, "weight.scale"), r"Missing key\(s\) in state_dict: \"weight.scale\""),
        (lambda s: {**s, "weight.more": s["bias"]}, r"Unexpected key\(s\) in state_dict: \"weight.more\""),
        (lambda s: {**s, "weight.data": s["weight.data"][:8]}, r"weight: data has dtype .* and shape \(8, 32\)"),
        (lambda s: {**s, "weight.scale": s["weight.scale"].double()}, "weight: scale has dtype torch.float64"),
        (lambda s: {**s, "weight.scale": s["weight.scale"] * float("nan")}, "weight: scale holds NaN or Inf"),
        (lambda s: {**s, "weight.zero": s["weight.scale"]}, "but a zero point was given"),
        (
            lambda s: {"weight": torch.randn(16, 64), "bias": s["bias"]},
            r"Unexpected key\(s\) in state_dict: \"weight\"",
        ),
        (lambda s: {**s, "weight.data": "text"}, "data is a str"),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_changes_nothing(change, words):
    layer, x = made(), torch.randn(3, 64)
    before = layer(x)
    with pytest.raises(RuntimeError, match=words):
        layer.load_state_dict(change(dict(made().state_dict())))
    assert torch.equal(layer.weight.dequantize(), layer.weight.dequantize())
    with torch.no_grad():
        layer.bias.copy_(layer.bias)
    assert layer(x).shape == before.shape


def test_a_checkpoint_of_another_format_is_refused():
    with pytest.raises(RuntimeError, match=r"weight: .*data has dtype torch.int8"):
        made("w4a16-g32").load_state_dict(made("w8a16-g32").state_dict())


def test_static_numbers_travel_in_the_state_dict():
    qt = qcore.quantize(torch.randn(16, 64), "int8")

    def static(scale, zero):
        scheme = qcore.Scheme(
            qt.format, activation=qcore.StaticInt8(scale, zero), output=qcore.OutputInt8(scale, -zero)
        )
        return QuantizedLinear.from_qtensor(qt, scheme=scheme)

    source, target, x = static(0.1, 3), static(1.0, 0), torch.randn(3, 64)
    target.load_state_dict(source.state_dict())
    assert target.scheme == source.scheme
    assert torch.equal(target(x), source(x))
    bad = {**source.state_dict(), "input_scale": torch.tensor(-1.0)}
    with pytest.raises(RuntimeError, match=r"scale is -1\.0; it must be positive"):
        target.load_state_dict(bad)


def test_torch_save_and_load_with_weights_only():
    source, target = made("w4a16-g32-asym"), made("w4a16-g32-asym")
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 64)
    assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a16", "w4a16-g32-asym/plain_int32"])
def test_a_qtensor_loads_with_weights_only(scheme):
    weight = made(scheme).weight
    file = io.BytesIO()
    torch.save({"w": weight}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["w"]
    assert type(found) is qcore.QTensor
    assert found.format == weight.format
    assert torch.equal(found.dequantize(), weight.dequantize())
