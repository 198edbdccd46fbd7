"""What layers do with an x that they cannot read, and with a bias that somebody put there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import qcore
from qcore import FormatError
from qcore.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:.*Sparse CSR tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:.*quantize_per_tensor"),
]


def linear(scheme="w8a16", bias=True):
    return QuantizedLinear.from_float(nn.Linear(64, 16, bias=bias), scheme)


def conv2d():
    return QuantizedConv2d.from_float(nn.Conv2d(4, 8, 3), "w8a16")


def embedding():
    return QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w8a16")


LAYERS = {
    "linear": (linear, lambda: torch.randn(3, 64)),
    "conv2d": (conv2d, lambda: torch.randn(1, 4, 5, 5)),
    "embedding": (embedding, lambda: torch.tensor([[1, 2], [3, 4]])),
}
WRONG = {
    "sparse": (
        lambda x: x.to_sparse(),
        "must be a dense tensor, not one of layout torch.sparse_coo; call its to_dense",
    ),
    "csr": (lambda x: x.flatten()[None].to_sparse_csr(), "must be a dense tensor, not one of layout torch.sparse_csr"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "must be a dense tensor, not one of layout torch._mkldnn"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0]]), "must be a dense tensor, not a nested one"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        "not one of torch's own quantized",
    ),
    "meta": (lambda x: x.to("meta"), "on meta, the weight on cpu; bring both to one device"),
    "complex": (lambda x: torch.complex(x.float(), x.float()), "dtype torch.complex64"),
    "bool": (lambda x: x > 0, "dtype torch.bool"),
    "int16": (lambda x: x.short(), "dtype torch.int16"),
    "float8": (lambda x: x.float().to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
    "int8": (lambda x: x.to(torch.int8), "dtype (torch.)?int8"),
    "list": (lambda x: x.tolist(), "must be a torch.Tensor, not a list"),
    "numpy": (lambda x: x.numpy(), "must be a torch.Tensor, not a ndarray"),
    "none": (lambda x: None, "must be a torch.Tensor, not a NoneType"),
}


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", LAYERS)
def test_an_x_that_no_kernel_reads_is_refused_by_its_name(name, kind, first, add_kernel):
    make, draw = LAYERS[name]
    add_kernel("mine")
    layer, x = make(), draw()
    expected = make_reference(layer, x) if not first else None
    wrong, words = WRONG[kind]
    with pytest.raises(FormatError, match=words):
        layer(wrong(x))
    y = layer(x)
    assert layer.decision.plugin == "mine"
    assert expected is None or torch.equal(y, expected)


def make_reference(layer, x):
    layer(x)
    return layer(x)


def test_a_layer_on_another_device_than_x_says_where_both_are(monkeypatch):
    layer, x = linear(), torch.randn(3, 64)
    layer(x)
    # Stands for a second GPU: what matters is that the index counts, on the shortest way too.
    layer._store.device = torch.device("cpu", 1)
    with pytest.raises(FormatError, match="x is on meta, the weight on cpu:1"):
        layer(x.to("meta"))
    assert torch.equal(layer(x), layer(x))  # a device without index is any of its kind


BIASES = {
    "one": (lambda n: torch.ones(1), r"bias has shape \(1,\); this weight needs"),
    "short": (lambda n: torch.ones(n - 1), "bias has shape .*; this weight needs"),
    "long": (lambda n: torch.ones(n + 1), "bias has shape .*; this weight needs"),
    "rows": (lambda n: torch.ones(3, n), r"bias has shape \(3, "),
    "scalar": (lambda n: torch.tensor(1.0), r"bias has shape \(\)"),
    "int64": (lambda n: torch.ones(n, dtype=torch.int64), "bias has dtype torch.int64"),
    "complex": (lambda n: torch.ones(n, dtype=torch.complex64), "bias has dtype torch.complex64"),
    "sparse": (lambda n: torch.ones(n).to_sparse(), "bias must be a dense tensor"),
    "meta": (lambda n: torch.ones(n, device="meta"), "bias is on meta, the weight on cpu"),
}
WAYS = {
    "assigned": lambda layer, bias: setattr(layer, "bias", nn.Parameter(bias, requires_grad=False)),
    "data": lambda layer, bias: layer.bias.__setattr__("data", bias),
    "swapped": lambda layer, bias: torch.utils.swap_tensors(layer.bias, nn.Parameter(bias, requires_grad=False)),
    "in the table": lambda layer, bias: layer._parameters.__setitem__("bias", bias),
}


# torch itself lets nobody put such a tensor behind one that is neither.
PLACED = [(kind, way) for kind in BIASES for way in WAYS if way != "data" or kind not in ("sparse", "meta")]


@pytest.mark.parametrize(("kind", "way"), PLACED)
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_a_bias_that_does_not_fit_is_refused_at_the_call(name, kind, way):
    make, draw = LAYERS[name]
    layer, x, (bias, words) = make().requires_grad_(False), draw(), BIASES[kind]
    layer(x)
    WAYS[way](layer, bias(len(layer.bias)))
    with pytest.raises(FormatError, match=words):
        layer(x)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_strided_bias_is_added_as_it_is(way, grad):
    layer, x, bias = linear(), torch.randn(3, 64), torch.randn(32)[::2]
    layer.requires_grad_(False)
    layer(x)
    WAYS[way](layer, bias)
    layer.requires_grad_(grad)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.dequantize(), bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("before", [True, False])
def test_a_bias_that_comes_or_goes_binds_anew(before):
    layer, x = linear(bias=before), torch.randn(3, 64)
    layer(x)
    layer.bias = None if before else nn.Parameter(torch.randn(16))
    assert layer.decision.request.bias is not before
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.dequantize(), layer.bias), atol=1e-4, rtol=1e-4)


class Twice(nn.Module):
    def forward(self, value):
        return 2 * value


def parametrized(layer):
    parametrize.register_parametrization(layer, "bias", Twice())
    return layer


@pytest.mark.parametrize("change", [parametrized, lambda layer: prune.random_unstructured(layer, "bias", 0.5)])
def test_a_bias_that_is_computed_counts(change):
    layer, x = linear(), torch.randn(3, 64)
    layer(x)
    change(layer)
    with torch.no_grad():
        expected = F.linear(x, layer.weight.dequantize(), layer.bias)
        torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_made_under_inference_mode_work_outside(name):
    make, draw = LAYERS[name]
    with torch.inference_mode():
        layer = make()
    x = draw()
    y = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)
    if x.is_floating_point():
        x = x.requires_grad_()
        layer(x).sum().backward()
        assert x.grad.isfinite().all()
    assert torch.equal(copy.deepcopy(layer)(x.detach()), y)


@pytest.mark.parametrize("name", LAYERS)
def test_a_shallow_copy_is_a_layer_of_its_own_on_the_same_weight(name):
    make, draw = LAYERS[name]
    layer, x = make(), draw()
    y, twin = layer(x), copy.copy(layer)
    assert torch.equal(twin(x), y)
    assert twin._store is layer._store
    twin.to(torch.bfloat16)
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight.data, twin.weight.data)


def test_a_scheme_with_parameters_per_token_makes_no_layer():
    weight = qcore.quantize(torch.randn(16, 64), "int8")
    for scheme in ("w8a8-token", "w8a8-o8t"):
        with pytest.raises(FormatError, match="per-token parameters are passed with each call"):
            QuantizedLinear.from_qtensor(weight, scheme=scheme)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stride": 0}, "stride is 0"),
        ({"stride": 1.0}, "stride is 1.0"),
        ({"padding": (-1, 0)}, r"padding is \(-1, 0\)"),
        ({"dilation": (0, 1)}, r"dilation is \(0, 1\)"),
        ({"kernel_size": 0}, "kernel_size is 0"),
        ({"groups": 0}, "groups=0"),
        ({"groups": 3}, "columns|groups=3"),
    ],
)
def test_geometry_that_means_nothing_makes_no_convolution(change, words):
    weight = qcore.quantize(torch.randn(8, 36), "int8")
    with pytest.raises(FormatError, match=words):
        QuantizedConv2d.from_qtensor(weight, **{"in_channels": 4, "kernel_size": 3, **change})


class ReadsATable(nn.Module):
    """As DeBERTa's relative positions: the weight of a layer is normalized, and not looked up."""

    def __init__(self, width=32):
        super().__init__()
        self.rel_embeddings, self.norm, self.out = nn.Embedding(8, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return self.out(x + self.norm(self.rel_embeddings.weight))


def test_a_model_that_reads_a_weight_is_told_which_to_exclude():
    model, x = nn.Sequential(ReadsATable(), nn.Sequential(ReadsATable())), torch.randn(8, 32)
    qcore.quantize_(model, "w8a16")
    with pytest.raises(TypeError, match=r"layer_norm.*\n.*exclude='\*\.rel_embeddings'\)"):
        model(x)
    again = nn.Sequential(ReadsATable(), nn.Sequential(ReadsATable()))
    qcore.quantize_(again, "w8a16", exclude="*.rel_embeddings")
    assert again(x).shape == x.shape


class ScalesAWeight(nn.Module):
    """As RWKV and Perceiver, which call methods of the weight of a layer."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        self.out.weight.div_(2)
        return self.out(x)


def test_methods_of_a_weight_are_named_with_the_layer():
    model = nn.Sequential(ScalesAWeight())
    qcore.quantize_(model, "w8a16")
    with pytest.raises(AttributeError, match=r"no attribute 'div_'; dequantize.*exclude='\*\.out'\)"):
        model(torch.randn(8, 32))
    with pytest.raises(AttributeError, match=r"dense tensor\.$"):
        model[0].out.weight.ds_id  # noqa: B018 - a name that a tool looks for
