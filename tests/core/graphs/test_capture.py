"""Models through the front half of a graph backend, with a back half that runs parts in torch."""

import copy
import warnings

import pytest
import torch
from graph_backends import TorchParts
from tiny_models import Decoder, Encoder, decoded
from torch import nn

import qcore
from qcore import graphs
from qcore.graphs import Role, base_name
from qcore.nn.graph_ops import captures_layers

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def ops_of(part):
    return [base_name(node.target) for node in part.nodes]


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8", None])
def test_a_decoder_in_one_part_with_caches_as_states(scheme):
    torch.manual_seed(0)
    model = Decoder().eval()
    if scheme:
        qcore.quantize_(model, scheme)
    expected, other = copy.deepcopy(model), TorchParts()
    y = decoded(other.compiled(model))
    torch.testing.assert_close(y, decoded(expected), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(model.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.attention.keys, theirs.attention.keys, rtol=1e-5, atol=1e-5)
    found = graphs.explain(model)
    assert not found.host
    assert all(len(report.parts) == 1 and report.states == 4 for report in found.reports)
    if scheme:  # a projection each, the head, and the table that is tied to it
        assert ops_of(other.parts[0]).count("linear") == 15
        assert ops_of(other.parts[0]).count("embedding") == 1


@torch.no_grad()
def test_patterns_are_recognized_on_request():
    torch.manual_seed(0)
    model, plain, named = Decoder().eval(), TorchParts(), TorchParts(recognized=("rms_norm", "rope", "attention"))
    expected = decoded(copy.deepcopy(model))
    torch.testing.assert_close(decoded(plain.compiled(copy.deepcopy(model))), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decoded(named.compiled(model)), expected, rtol=1e-5, atol=1e-5)
    assert {"rope", "rms_norm"}.isdisjoint(ops_of(plain.parts[0]))
    found = ops_of(named.parts[0])
    assert (found.count("rms_norm"), found.count("rope"), found.count("attention")) == (5, 4, 2)
    heads = {
        tuple(argument.meta["val"].shape[1] for argument in node.args[:2])
        for node in named.parts[0].nodes if base_name(node.target) == "attention"
    }  # fmt: skip
    assert heads == {(4, 2)}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_round_before_the_weight(dtype):
    torch.manual_seed(0)
    model, other = Decoder().eval().to(dtype), TorchParts(recognized=("rms_norm",))
    norm, x = model.norm, torch.randn(2, 3, 64, dtype=dtype)
    assert torch.equal(other.compiled(norm)(x), norm(x))
    assert ops_of(other.parts[0]) == ["rms_norm"]


@torch.no_grad()
def test_rms_norm_of_float64_stays_in_float64():
    x, other = torch.randn(5, 16, dtype=torch.float64), TorchParts(recognized=("rms_norm",))
    found, expected = other.compiled(lambda x: nn.functional.rms_norm(x, (16,)))(x), nn.functional.rms_norm(x, (16,))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_what_only_looks_like_a_pattern_is_left():
    def mean_of_another(x):
        return x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5)

    def along_rows(x):
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)

    def not_halves(x):
        return x * 2 + torch.cat((-x[..., 3:], x[..., :3]), -1) * x

    for function in (mean_of_another, along_rows, not_halves):
        other, x = TorchParts(recognized=("rms_norm", "rope", "attention")), torch.randn(5, 8)
        torch.testing.assert_close(other.compiled(function)(x), function(x))
        assert {"rope", "rms_norm"}.isdisjoint(ops_of(other.parts[0]))


@torch.no_grad()
def test_refused_nodes_run_in_torch_and_are_listed():
    torch.manual_seed(0)
    model, other = Decoder().eval(), TorchParts(refused=("silu", "cos"))
    expected = decoded(copy.deepcopy(model), (4,))
    torch.testing.assert_close(decoded(other.compiled(model), (4,)), expected, rtol=1e-5, atol=1e-5)
    (report,) = graphs.explain(model).reports
    assert sorted(node.op for node in report.host) == ["cos", "silu", "silu"]
    assert {node.reason for node in report.host} == {"no kernel for silu", "no kernel for cos"}
    assert ["F.silu(self.gate_proj(y))" in node.line for node in report.host].count(True) == 2, report.host
    assert len(report.parts) == 4  # before cos, beside it to the first silu, between the two, after
    assert "torch: 2 silu: no kernel for silu" in str(report)


@torch.no_grad()
def test_lines_of_host_nodes_are_those_of_the_model():
    """Not of a mode around its calls."""
    torch.manual_seed(0)
    model, other = Decoder().eval(), TorchParts(refused=("silu",))
    with torch.device("cpu"):
        decoded(other.compiled(model), (4,))
    (report,) = graphs.explain(model).reports
    assert {node.line for node in report.host} == {
        "return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))"
    }


@torch.no_grad()
def test_small_parts_stay_in_torch():
    other = TorchParts(refused=("sin",), fewest=3)

    def function(x):
        y = (x * 2 + 1).exp().sin()
        return y * 3

    x = torch.randn(4)
    torch.testing.assert_close(other.compiled(function)(x), function(x))
    assert [ops_of(part) for part in other.parts] == [["mul", "add", "exp"]]


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        before = self.count * 1
        self.count.add_(x)
        return before, self.count.sin(), self.count


@torch.no_grad()
@pytest.mark.parametrize("refused", [(), ("sin",), ("add",), ("mul",)])
def test_values_before_and_after_a_write(refused):
    model, expected = Counter(), Counter()
    compiled = TorchParts(refused=refused).compiled(model)
    for step in range(3):
        x = torch.full((3,), float(step))
        for mine, theirs in zip(compiled(x), expected(x), strict=True):
            torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(model.count, expected.count)
    model.count.zero_()
    expected.count.zero_()
    torch.testing.assert_close(compiled(x)[1], expected(x)[1])


def test_calls_that_need_gradients_run_in_torch_with_a_reason():
    model, other = nn.Linear(4, 3), TorchParts()
    compiled, x = other.compiled(model), torch.randn(2, 4)
    with pytest.warns(qcore.QcoreWarning, match=r"inference only.*torch\.inference_mode"):
        compiled(x).sum().backward()
    torch.testing.assert_close(model.bias.grad, torch.full((3,), 2.0))
    assert "gradients" in graphs.explain(compiled).refused[0]
    with torch.no_grad():
        compiled(x)
    assert len(other.parts) == 1


def test_a_backend_that_fails_is_replaced_by_torch():
    model = nn.Linear(4, 3)
    compiled, x = TorchParts(fails=True).compiled(model), torch.randn(2, 4)
    with torch.no_grad(), pytest.warns(qcore.QcoreWarning, match="ValueError: the device is on fire"):
        torch.testing.assert_close(compiled(x), model(x))
    assert graphs.explain(model).refused == ("ValueError: the device is on fire",)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        compiled(x)  # says so once


@torch.no_grad()
def test_a_program_for_each_length():
    model, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), TorchParts()
    compiled = other.compiled(model, dynamic=True)
    for length in (3, 5, 9, 5, 3):
        x = torch.randn(length, 4)
        torch.testing.assert_close(compiled(x), model(x))
    assert [part.outputs[0].meta["val"].shape[0] for part in other.parts] == [3, 5, 9]
    assert {report.sizes for report in graphs.explain(model).reports} == {(3,), (5,), (9,)}


@torch.no_grad()
def test_layers_of_one_kind_share_a_graph():
    torch.manual_seed(0)
    other = TorchParts()
    backend = graphs.torch_compile_backend(other)
    layers = [qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), "w8a8") for _ in range(3)]
    for layer in layers:
        expected = layer(x := torch.randn(2, 32))
        layer.compile(backend=backend)
        torch.testing.assert_close(layer(x), expected)
    assert len(other.parts) == 1
    (place,) = [one for one in other.parts[0].inputs if one.role is Role.WEIGHT]
    assert tuple(graphs.weight_of(place.value).shape) == (16, 32)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-static(0.05,3)", "w8a8-static(0.05,3)-o8(0.1,-4)", "wfp8a16"])
def test_nodes_carry_the_scheme_with_its_numbers(scheme):
    layer, other = qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), scheme), TorchParts()
    x = torch.randn(3, 32)
    torch.testing.assert_close(other.compiled(layer)(x), layer(x))
    (node,) = other.parts[0].nodes
    assert graphs.scheme_of(node.args[3]) == layer.scheme


@torch.no_grad()
def test_every_kind_of_layer_is_a_node():
    torch.manual_seed(0)
    conv = qcore.nn.QuantizedConv2d.from_float(nn.Conv2d(4, 6, 3, 2, 1, groups=2, padding_mode="reflect"), "w8a8")
    grouped = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 32), "w8a16")
    table = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(9, 32), "w4a16-g32")
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    cases = [
        (conv, (torch.randn(2, 4, 7, 7),), "conv2d"),
        (grouped, (torch.randn(5, 32), ends), "grouped_linear"),
        (table, (torch.tensor([[1, 8]]),), "embedding"),
    ]
    for layer, args, name in cases:
        other = TorchParts()
        torch.testing.assert_close(other.compiled(layer)(*args), layer(*args))
        assert name in ops_of(other.parts[0])


@torch.no_grad()
def test_siblings_ask_for_one_product():
    torch.manual_seed(0)
    model = Decoder(layers=1).eval()
    qcore.quantize_(model, "w8a16")
    expected, other = decoded(copy.deepcopy(model), (3,)), TorchParts()
    assert len(qcore.fuse_(model)) == 2
    torch.testing.assert_close(decoded(other.compiled(model), (3,)), expected, rtol=1e-5, atol=1e-5)
    assert ops_of(other.parts[0]).count("linear") == 5  # qkv, o, gate and up, down, head


@torch.no_grad()
def test_a_layer_with_another_weight_is_taken_at_the_next_call():
    torch.manual_seed(0)
    layer, other = qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), "w8a16"), TorchParts()
    compiled, x = other.compiled(layer), torch.randn(3, 32)
    compiled(x)
    layer.weight = qcore.quantize(torch.randn(16, 32), "int8")
    torch.testing.assert_close(compiled(x), layer(x))


@torch.no_grad()
def test_an_encoder_of_any_length():
    torch.manual_seed(0)
    model, other = Encoder().eval(), TorchParts()
    compiled = other.compiled(model)
    for batch, length in ((2, 7), (1, 12)):
        ids, mask = torch.randint(0, 96, (batch, length)), torch.ones(batch, length, dtype=torch.long)
        mask[0, 4:] = 0
        torch.testing.assert_close(compiled(ids, mask), model(ids, mask), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_other_compilers_see_what_they_saw():
    layer, x = qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), "w8a16"), torch.randn(2, 32)
    seen = []

    def look(module, inputs):
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    torch.testing.assert_close(torch.compile(layer, backend=look)(x), layer(x))
    assert not any("qcore_graph" in target for target in seen)
    assert not captures_layers()


def test_options_are_refused():
    with pytest.raises(Exception, match="takes no mode and no options"), torch.no_grad():
        TorchParts().compiled(nn.Linear(2, 2), options={"a": 1})(torch.ones(1, 2))


def test_explain_without_graphs():
    assert "call the compiled model first" in str(graphs.explain(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="explain takes modules"):
        graphs.explain("model")


def test_floats_that_differ_between_models_are_constants():
    """Dynamo makes a float of a module dynamic once it has seen two of its values."""

    class Shifted(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.eps, self.weight = eps, nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.weight * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    backend, x = TorchParts(), torch.ones(3, 4) / 10
    with torch.no_grad():
        for eps in (0.5, 0.25, 0.125, 0.0625):
            model = Shifted(eps)
            found = backend.compiled(model)(x)
            torch.testing.assert_close(found, model(x))
            assert not graphs.explain(model).refused


@torch.no_grad()
def test_tensors_without_elements_are_not_joined():
    def grown(x):
        cache = torch.tensor([])
        return torch.cat((cache, x, x[:, :0], x * 2), -1), torch.cat((x[:0], x.bfloat16()))

    x, backend = torch.randn(3, 4), TorchParts()
    for y, expected in zip(backend.compiled(grown)(x), grown(x), strict=True):
        assert y.dtype == expected.dtype
        assert torch.equal(y, expected)
    joined = [node for node in backend.parts[0].nodes if base_name(node.target) == "cat"]
    assert [len(node.args[0]) for node in joined] == [2, 2]  # the second has the dtype of its empty part
    assert "lift_fresh_copy" not in ops_of(backend.parts[0])


class Cache:
    """Counts its calls in a Python integer, as caches with a window do their tokens."""

    def __init__(self):
        self.count, self.sum = 3, torch.zeros(2)


@torch.no_grad()
@pytest.mark.parametrize("uses", [False, True])
def test_a_count_in_an_integer_is_no_constant(uses):
    def step(cache, x):
        cache.count += x.shape[0]
        cache.sum.add_(x.sum(0))
        return cache.sum * cache.count if uses else cache.sum * 2

    other, cache, x = TorchParts(), Cache(), torch.ones(4, 2)
    compiled = other.compiled(step)
    for number in range(1, 6):
        expected = torch.full((2,), 4.0 * number * (3 + 4 * number if uses else 2))
        assert torch.equal(compiled(cache, x), expected)
        assert cache.count == 3 + 4 * number
    assert len(other.parts) == 2  # the first call's count is a constant, that of the second is not


@torch.no_grad()
def test_a_count_that_is_a_size_too_is_a_constant():
    def step(cache, x):
        cache.count += 1
        return x.sum() + x.shape[0]

    other, cache = TorchParts(), Cache()
    compiled = other.compiled(step)
    for number in (4, 5, 6):
        cache.count = number
        assert compiled(cache, torch.ones(number, 2)) == 3 * number
        assert cache.count == number + 1


@torch.no_grad()
def test_layers_that_no_graph_reads_are_named():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.recurrent = nn.Embedding(9, 32), nn.LSTM(32, 32, batch_first=True)
            self.head, self.unused = nn.Linear(32, 9), nn.Linear(32, 9, bias=False)

        def forward(self, ids):
            return self.head(self.recurrent(self.embed(ids))[0])

    model = Tagger().eval()
    qcore.quantize_(model, "w8a16")
    compiled, ids = TorchParts().compiled(model), torch.arange(6).view(2, 3)
    assert not graphs.explain(compiled).outside  # nothing was captured yet
    torch.testing.assert_close(compiled(ids), model(ids))
    found = graphs.explain(compiled)
    assert found.outside == ("recurrent", "unused")
    assert str(found).endswith("torch runs them if the model calls them: recurrent, unused")
    assert not graphs.explain(model.head).outside


class Copying(TorchParts):
    """Returns tensors with memory of their own, as a device does."""

    def compile(self, part):
        run = super().compile(part)
        return lambda values: [y.clone(memory_format=torch.contiguous_format) for y in run(values)]


@torch.no_grad()
@pytest.mark.parametrize("function", [
    lambda x: x[:, 1:].as_strided((3, 2), (2, 1)), lambda x: x.mT.as_strided((2, 5), (3, 2), 1),
    lambda x: x.view(2, 4, 3)[1].as_strided((4,), (2,)), lambda x: x.split(2, 1)[1].as_strided((2, 2), (1, 3)),
    lambda x: x.view(torch.int32).as_strided((3,), (2,)) * 2,
    lambda x: x.mT.contiguous().mT[:, 1:].as_strided((3, 3), (3, 2)), lambda x: x[None].as_strided((2, 2), (1, 1), 20),
])  # fmt: skip
@pytest.mark.parametrize("refused", [(), ("as_strided",)])
@pytest.mark.parametrize("inner", [False, True])
def test_strided_views_read_the_memory_that_they_are_of(function, refused, inner):
    x, backend = torch.arange(24.0).view(2, 3, 4), Copying(refused=refused)

    def call(x):
        return function(x.mT + 1 if inner else x) * 2

    torch.testing.assert_close(backend.compiled(call)(x), call(x))
