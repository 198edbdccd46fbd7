from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import qcore
from qcore.errors import FormatError
from qcore.nn import QuantizedLinear

SCHEMES = ["w8a16", "w4a16-g32", "w4a16-g32-asym", "w4a16-g32-fzp", "w8a8", "w4a8-g32-asym"]
FLOAT_SCHEMES = SCHEMES[:4]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def made(scheme="w4a16-g32", k=64, n=16, bias=True, dtype=torch.float32):
    return QuantizedLinear.from_float(nn.Linear(k, n, bias=bias, dtype=dtype), scheme)


def dense(layer, x, dtype=torch.float64):
    """The layer without rounding: float64 products with the dequantized weight."""
    y = x.to(dtype) @ layer.weight.dequantize(dtype).t()
    return y if layer.bias is None else y + layer.bias.detach().to(dtype)


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
        with pytest.raises(FormatError, match="it must be floating, or int8 codes under a static scheme"):
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
    with pytest.raises(FormatError, match="needs numbers: give them as StaticInt8"):
        made("w8a8-static")


def test_nan_in_the_weight_names_the_layer():
    linear = nn.Linear(64, 16)
    linear.weight.data[3, 5] = float("nan")
    with pytest.raises(FormatError, match=r"block\.fc"):
        QuantizedLinear.from_float(linear, "w8a16", name="block.fc")


def test_weight_answers_what_model_code_asks_and_unpacks_on_demand(add_kernel):
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


# State dicts


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


def _without(state, key):
    return {name: value for name, value in state.items() if name != key}


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_whole_and_apart(add_kernel, copied):
    add_kernel("mine")
    layer, x = made("w4a16-g32-asym"), torch.randn(3, 64)
    expected = layer(x)
    other = copied(layer)
    assert torch.equal(other(x), expected)
    assert other.decision.plugin == "mine"
    other.load_state_dict({name: torch.zeros_like(t) for name, t in other.state_dict().items()})
    assert torch.equal(layer(x), expected)


# Moving


@pytest.mark.parametrize(
    "move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()]
)
def test_casting_never_touches_codes_or_scales(add_kernel, move):
    add_kernel("mine")
    layer = made("w4a16-g32-asym")
    before = {name: tensor.clone() for name, tensor in layer.weight.tensors().items()}
    move(layer)
    after = layer.weight.tensors()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )


def test_casting_changes_what_is_computed_in():
    layer = made().to(torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert layer.decision.request.x_dtype == torch.bfloat16
    assert layer(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_dtype_that_is_left_leaves_no_packed_weight(add_plugin, stub):
    def offer(request):
        return qcore.Offer(stub(f"mine.{request.x_dtype}".replace("torch.", ""), request))

    add_plugin("mine", linear=offer)
    layer = made()
    layer.to(torch.bfloat16)
    assert list(layer._store._packs) == ["mine.bfloat16"]
    assert all("bfloat16" in name for name, _ in layer.named_buffers())


def test_meta_and_back(add_kernel):
    add_kernel("mine")
    layer, x = made("w4a16-g32-asym"), torch.randn(2, 64)
    expected, state = layer(x), layer.state_dict()
    layer.to("meta")
    assert layer.decision is None
    assert layer.weight.device.type == "meta"
    with torch.device("meta"):
        fresh = made("w4a16-g32-asym")
    assert fresh.weight.device.type == "meta"
    fresh.to_empty(device="cpu")
    for target in (fresh, layer.to_empty(device="cpu")):
        target.load_state_dict(state)
        assert torch.equal(target(x), expected)
        assert target.decision.plugin == "mine"


def test_meta_and_assign():
    source, x = made(), torch.randn(2, 64)
    with torch.device("meta"):
        layer = made()
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(x), source(x))


def test_fresh_memory_need_not_be_a_valid_weight(monkeypatch):
    with torch.device("meta"):
        layer = made("w4a16-g32-asym", bias=False)

    def garbage(tensor):
        made = torch.empty_like(tensor, device="cpu")
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(99)

    layer._apply(garbage)
    assert layer.weight.device.type == "cpu"


def test_a_copy_into_a_layer_on_meta_says_that_it_does_nothing():
    with torch.device("meta"):
        layer = made(bias=False)
    with pytest.warns(UserWarning, match="is a no-op"):
        layer.load_state_dict(made(bias=False).state_dict())


# Gradients


def _gradients(layer, x, weights):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    (layer(x) * weights).sum().backward()
    return x.grad, None if layer.bias is None else layer.bias.grad.clone()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (0, 64)])
def test_gradients_are_those_of_the_dense_weight(scheme, shape):
    layer, x = made(scheme), torch.randn(shape)
    weights = torch.randn(*shape[:-1], 16)
    dx, dbias = _gradients(layer, x, weights)
    torch.testing.assert_close(dx, weights @ layer.weight.dequantize(torch.float32), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dbias, weights.reshape(-1, 16).sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(dtype):
    layer, x = made(dtype=dtype), torch.randn(5, 64, dtype=dtype)
    dx, dbias = _gradients(layer, x, torch.ones(5, 16, dtype=dtype))
    assert dx.dtype == dbias.dtype == dtype
    torch.testing.assert_close(
        dx.float(), layer.weight.dequantize(torch.float32).sum(0).expand(5, 64), atol=3e-2, rtol=3e-2
    )


def test_gradients_through_a_kernel_that_torch_cannot_see_into(add_plugin, stub):
    class Opaque(stub):
        def __call__(self, x, packed, bias, **given):
            with torch.no_grad():
                return super().__call__(x.detach(), packed, bias, **given).detach()

    add_plugin("mine", linear=lambda request: qcore.Offer(Opaque("mine.k", request)))
    layer, x = made(bias=False), torch.randn(5, 64)
    dx, _ = _gradients(layer, x, torch.ones(5, 16))
    torch.testing.assert_close(dx, layer.weight.dequantize().sum(0).expand(5, 64), atol=1e-5, rtol=1e-5)


def test_large_weights_are_differentiated_in_pieces(monkeypatch):
    import importlib

    layer, x = made(), torch.randn(5, 64)
    whole, _ = _gradients(layer, x, torch.ones(5, 16))
    monkeypatch.setattr(importlib.import_module("qcore.autograd"), "_CHUNK_ELEMENTS", 64 * 3)
    parts, _ = _gradients(layer, x, torch.ones(5, 16))
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_bound_under_inference_mode_and_trained_afterwards(add_kernel):
    add_kernel("mine")
    layer, x = made(), torch.randn(5, 64)
    with torch.inference_mode():
        layer(x.to(torch.bfloat16))
    assert not any(buffer.is_inference() for buffer in layer.buffers())
    _gradients(layer, x.to(torch.bfloat16), torch.ones(5, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_decides_the_dtype(grad):
    layer, x = made("w4a16-g32"), torch.randn(5, 64, requires_grad=grad)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert layer(x.detach()).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), dense(layer, x), atol=5e-2, rtol=5e-2)
    if grad:
        y.sum().backward()
        assert x.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


# Kernels that fail


def test_a_pack_that_raises_makes_way_with_one_warning(add_kernel):
    add_kernel("mine", fault="pack")
    with qcore.using(verify="off"):
        with pytest.warns(
            qcore.QcoreWarning, match="'mine.stub' .* is out of use for int4-g32/plain: pack raised Runtime"
        ):
            layer = made()
        assert layer.decision.plugin == "torch"
        assert made().decision.plugin == "torch"  # and no second warning


def test_a_first_call_that_raises_makes_way_with_one_warning(add_kernel):
    made_kernels = add_kernel("mine", fault="call")
    with qcore.using(verify="off"):
        layer, x = made(), torch.randn(3, 64)
        assert layer.decision.plugin == "mine"
        with (
            torch.no_grad(),
            pytest.warns(qcore.QcoreWarning, match="its first call raised RuntimeError: no such instruction"),
        ):
            y = layer(x)
        torch.testing.assert_close(y.double(), dense(layer, x), atol=1e-5, rtol=1e-5)
        assert layer.decision.plugin == "torch"
        with torch.no_grad():
            layer(x)
    assert sum(kernel.calls for kernel in made_kernels.values()) == 1


@pytest.mark.parametrize("fault", ["pack", "call"])
def test_a_named_plugin_whose_kernel_fails_fails_loudly(add_kernel, fault):
    add_kernel("mine", fault=fault)
    with (
        qcore.using("mine", verify="off"),
        pytest.raises(qcore.PluginError, match="which you asked for, failed") as caught,
    ):
        made()(torch.randn(2, 64))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_strict_is_obeyed_when_a_layer_is_bound():
    with qcore.using(strict=True), pytest.raises(qcore.UnsupportedError, match="strict"):
        made()


# Compilers


def _counting():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    return graphs, backend


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8"])
def test_one_graph_for_every_row_count(scheme):
    torch._dynamo.reset()
    layer = made(scheme).eval()
    graphs, backend = _counting()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for rows in (2, 3, 17, 300):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1


def test_gradients_through_the_compiler():
    torch._dynamo.reset()
    layer, x, weights = made(), torch.randn(5, 64), torch.randn(5, 16)
    expected = _gradients(layer, x, weights)
    with warnings.catch_warnings():
        # Dynamo itself instantiates every torch.autograd.Function that it traces.
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        compiled(x.clone().requires_grad_())
        x = x.clone().requires_grad_()
        layer.zero_grad()
        (compiled(x) * weights).sum().backward()
    torch.testing.assert_close(x.grad, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.bias.grad, expected[1], atol=1e-5, rtol=1e-5)


def test_export_with_a_dynamic_batch():
    layer = made().eval()
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(layer, (torch.randn(3, 64),), dynamic_shapes=({0: batch},))
    for rows in (1, 3, 50):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)


def test_a_layer_on_meta_cannot_be_compiled_and_says_so():
    torch._dynamo.reset()
    with torch.device("meta"):
        layer = made()
    with pytest.raises(Exception, match="load its weights first"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(2, 64, device="meta"))
