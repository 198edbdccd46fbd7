"""`qcore.fuse_`: siblings share a weight and a call, and stay layers of their own."""

import copy
import gc
import pickle
import re
import threading

import pytest
import torch
from torch import nn

import qcore
from qcore.nn import QuantizedLinear
from qcore.nn.siblings import SiblingLinear, join

SCHEMES = ("w4a16-g32", "w8a16", "w8a8", "w8a8-aasym", "w4a8-g32-asym", "w8a8-static(0.02,3)", "wnf4a16-g64")


class Attention(nn.Module):
    """q, k, v and their concatenation; of ``other``, if it is given, keys and values."""

    def __init__(self, bias=(False, False, False), k=128):
        super().__init__()
        self.q_proj = nn.Linear(k, 96, bias=bias[0])
        self.k_proj = nn.Linear(k, 32, bias=bias[1])
        self.v_proj = nn.Linear(k, 64, bias=bias[2])

    def forward(self, x, other=None):
        y = x if other is None else other
        return torch.cat(
            [self.q_proj(x).flatten(0, -2), self.k_proj(y).flatten(0, -2), self.v_proj(y).flatten(0, -2)], -1
        )


def attention(scheme="w4a16-g32", bias=(False, False, False), dtype=torch.float32):
    torch.manual_seed(0)
    model = Attention(bias).to(dtype).eval()
    qcore.quantize_(model, scheme)
    return model


def calls_of(model, monkeypatch):
    """Counts the calls of the kernels that a model's siblings are bound to."""
    counted = []
    for layer in (model.q_proj, model.k_proj, model.v_proj):
        bound = layer._primary
        kernel = bound.kernel

        def call(*args, kernel=kernel, **params):
            counted.append(1)
            return kernel(*args, **params)

        monkeypatch.setattr(bound, "kernel", call)
    return counted


@pytest.fixture
def x():
    return torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(1))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bias", [(False, False, False), (True, True, True), (False, True, False)])
@torch.no_grad()
def test_results_and_state_stay(scheme, bias, x):
    model = attention(scheme, bias)
    expected, state = model(x), {name: t.clone() for name, t in model.state_dict().items()}
    assert qcore.fuse_(model) == [("q_proj", "k_proj", "v_proj")]
    for _ in range(3):
        close(model(x), expected)
    found = model.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    close(model.k_proj(x), expected[:, 96:128].reshape(3, 5, 32))
    assert all(isinstance(layer, QuantizedLinear) for layer in model.children())
    assert model.q_proj.siblings == tuple(model.children())


@torch.no_grad()
def test_one_call_computes_all(monkeypatch, x):
    model = attention()
    qcore.fuse_(model)
    model(x)  # proves the kernel
    counted = calls_of(model, monkeypatch)
    for _ in range(4):
        model(x)
    assert len(counted) == 4
    model(x.clone())
    assert len(counted) == 5


@torch.no_grad()
def test_a_changed_input_is_another_one(x):
    model = attention()
    alone = copy.deepcopy(model)
    qcore.fuse_(model)
    model.q_proj(x)
    x.mul_(2)
    close(model.k_proj(x), alone.k_proj(x))


@torch.no_grad()
def test_inference_tensors_change_unseen(x):
    model = attention()
    single = copy.deepcopy(model)
    qcore.fuse_(model)
    with torch.inference_mode():
        y = x + 0
        torch.testing.assert_close(model(y), single(y))
        queries = model.q_proj(y)
        y.mul_(2)
        torch.testing.assert_close(model.k_proj(y), single.k_proj(y))
        torch.testing.assert_close(queries * 2, model.q_proj(y))


def test_the_packed_weight_is_held_once():
    model = attention()
    before = qcore.report(model).bytes_after
    qcore.fuse_(model)
    assert qcore.report(model).bytes_after <= 1.1 * before
    packed = [set(map(id, layer._primary.packed.values())) for layer in model.children()]
    assert packed[0] == packed[1] == packed[2]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copies_are_siblings_of_their_own(make, x):
    model = attention(bias=(True, True, True))
    qcore.fuse_(model)
    expected = model(x)
    made = make(model)
    assert set(map(id, made.q_proj.siblings)) == set(map(id, made.children()))
    close(made(x), expected)
    made.q_proj.weight = qcore.quantize(torch.zeros(96, 128), "int4-g32")
    assert made(x)[:, :96].abs().max() <= made.q_proj.bias.abs().max()
    close(model(x), expected)


@torch.no_grad()
def test_moves_and_casts(x):
    model = attention()
    expected = model(x)
    qcore.fuse_(model)
    model.bfloat16()
    found = model(x.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    model.to("meta")
    assert {layer.weight.device.type for layer in model.children()} == {"meta"}


@torch.no_grad()
def test_state_dicts_load_into_siblings_and_back(x):
    other = Attention()
    qcore.quantize_(other, "w4a16-g32")
    model = attention()
    qcore.fuse_(model)
    model.load_state_dict(other.state_dict())
    close(model(x), other(x))
    assert model.q_proj.siblings
    fresh = attention()
    fresh.load_state_dict(model.state_dict())
    close(fresh(x), other(x))


@torch.no_grad()
def test_a_weight_of_another_format_separates(x):
    model = attention()
    expected = model(x)
    qcore.fuse_(model)
    weight = qcore.quantize(model.k_proj.weight.dequantize(), "int8")
    model.k_proj.weight = weight
    assert not model.q_proj.siblings
    found = model(x)
    close(found[:, :96], expected[:, :96])
    close(found[:, 96:128], (x @ weight.dequantize().t()).flatten(0, 1))


@torch.no_grad()
def test_layers_that_read_other_inputs_are_separated(x):
    model, other = attention(), torch.randn(3, 5, 128)
    expected = model(x, other)
    qcore.fuse_(model)
    for _ in range(4):
        close(model(x, other), expected)
    assert not model.q_proj.siblings
    close(model(x, other), expected)


def test_cross_attention_keeps_its_queries_apart():
    model = nn.ModuleDict({"encoder_attn": Attention(), "self_attn": Attention()})
    qcore.quantize_(model, "w4a16-g32")
    found = qcore.fuse_(model)
    assert found == [
        ("encoder_attn.k_proj", "encoder_attn.v_proj"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ]


@torch.no_grad()
def test_results_do_not_outlive_their_input(x):
    model = attention()
    qcore.fuse_(model)
    model.q_proj(x)
    group = model.q_proj._group
    assert group._local.results is not None
    del x
    gc.collect()
    assert group._local.results is not None  # the fixture holds x
    model.q_proj(torch.randn(2, 128))
    gc.collect()
    assert group._local.results is None


def test_threads_do_not_take_each_other_s_results(x):
    model = attention()
    with torch.no_grad():
        expected = model(x)
        qcore.fuse_(model)
        model(x)
    wrong = []

    def run():
        with torch.no_grad():
            wrong.extend(1 for _ in range(20) if not torch.allclose(model(x), expected, rtol=1e-5, atol=1e-5))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gradients_of_inputs_and_biases(x):
    model = attention(bias=(True, True, True))
    alone = copy.deepcopy(model)
    qcore.fuse_(model)
    for made in (model, alone):
        own = x.clone().requires_grad_()
        y = made.q_proj(own)
        (y.mul(2).sum() + made.k_proj(own).square().sum() + made.v_proj(own).sum()).backward()
        made.grads = [own.grad, *(layer.bias.grad for layer in made.children())]
    for found, expected in zip(model.grads, alone.grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-aasym"])
@torch.no_grad()
def test_compiled_siblings_are_one_product(scheme, monkeypatch, x):
    from torch._inductor.graph import GraphLowering

    model = attention(scheme, bias=(True, True, True))
    expected = model(x)
    qcore.fuse_(model)
    graphs, original = [], GraphLowering.__init__

    def lower(self, module, *args, **more):
        graphs.append(module.graph)
        original(self, module, *args, **more)

    monkeypatch.setattr(GraphLowering, "__init__", lower)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        close(torch.compile(model, fullgraph=True)(x), expected)
    (graph,) = graphs
    products = [str(n.target) for n in graph.nodes if is_product(n)]
    assert len(products) == 1, products


def is_product(node):
    """An op of qcore's if the processor has a kernel for it, otherwise one of torch's over more than one column."""
    if re.search(r"^qcore|^aten\.linear", str(node.target)):
        return True
    if not re.search(r"^aten\.(_int_|add|b)?mm", str(node.target)):
        return False
    first = node.args[1 if "addmm" in str(node.target) else 0].meta["val"]
    return first.shape[-1] > 1  # zero points of tokens times sums of the weight's rows: a correction


def test_only_identical_pure_calls_are_merged():
    from qcore.model.merging import merge_identical_calls

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    calls = [
        graph.call_function(torch.ops.aten.add.Tensor, (x, 1)),
        graph.call_function(torch.ops.aten.add.Tensor, (x, 1)),
        graph.call_function(torch.ops.aten.add.Tensor, (x, 1), {"alpha": 2}),
        graph.call_function(torch.ops.aten.bernoulli.p, (x, 0.5)),
        graph.call_function(torch.ops.aten.bernoulli.p, (x, 0.5)),
    ]
    graph.output(tuple(calls))
    assert merge_identical_calls(graph) == 1
    (output,) = graph.find_nodes(op="output")
    assert output.args[0][0] is output.args[0][1]
    assert len({*output.args[0]}) == 4


@pytest.mark.parametrize("change", ["scheme", "dtype", "tied", "columns", "output", "meta"])
def test_unlike_layers_stay_alone(change):
    model = Attention()
    schemes = {"*": "w8a8-o8(0.1,0)" if change == "output" else "w4a16-g32"}
    if change == "columns":
        model.q_proj, model.k_proj = nn.Linear(64, 96, bias=False), nn.Linear(96, 32, bias=False)
    if change == "tied":
        model.other, model.k_proj = nn.Linear(128, 96, bias=False), nn.Linear(128, 96, bias=False)
        model.other.weight, model.third = model.q_proj.weight, model.k_proj
        model.fourth = nn.Linear(128, 96, bias=False)
        model.fourth.weight = model.k_proj.weight
    if change == "scheme":
        schemes = {"q_proj": "w8a16", "k_proj": "w4a16-g64", "v_proj": "w4a16-g32"}
    qcore.quantize_(model, schemes)
    if change == "dtype":
        model.q_proj.bfloat16()
        model.k_proj.half()
    if change == "meta":
        model.to("meta")
    assert qcore.fuse_(model) == []
    assert not any(isinstance(layer, SiblingLinear) for layer in model.modules())


def test_own_groups_and_wrong_ones():
    model = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(64, 32)})
    qcore.quantize_(model, "w4a16-g32")
    assert qcore.fuse_(model) == []
    with pytest.raises(qcore.FormatError, match="two names"):
        qcore.fuse_(model, groups=["ab", ("a",)])
    assert qcore.fuse_(model, groups=[("a", "b")]) == [("a", "b")]
    assert qcore.fuse_(model, groups=[("a", "b")]) == []


def test_hooks_and_modes_stay(x):
    model = attention()
    seen = []
    model.k_proj.register_forward_hook(lambda _module, _args, out: seen.append(out.shape))
    qcore.fuse_(model)
    with torch.no_grad():
        model(x)
    assert seen == [(3, 5, 32)]
    assert not model.k_proj.training


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shapes", [[(16,), (48,)], [(1, 32), (32,)], [(32,), (32, 1)]])
def test_each_bias_is_checked_before_they_are_joined(shapes, compiled):
    layers = [qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, 32), "w8a16") for _ in shapes]
    model = torch.nn.ModuleList(join(layers))
    for layer, shape in zip(model, shapes, strict=True):
        layer.bias = torch.nn.Parameter(torch.ones(shape), requires_grad=False)

    def run(x):
        return [layer(x) for layer in model]

    run = torch.compile(run, backend="eager") if compiled else run
    with pytest.raises((qcore.FormatError, torch._dynamo.exc.Unsupported), match=r"bias has .* needs \(32,\)"):
        run(torch.randn(3, 64))


@torch.no_grad()
def test_other_memory_of_a_bias_is_seen():
    layers = [qcore.nn.QuantizedLinear.from_float(torch.nn.Linear(64, 32), "w8a16") for _ in range(2)]
    first, second = join(layers)
    x = torch.randn(3, 64)
    before, others = first(x), second(x)
    first.bias.data = first.bias.data + 1.0
    torch.testing.assert_close(first(x), before + 1.0)
    torch.testing.assert_close(second(x), others)


@torch.no_grad()
def test_static_numbers_of_one_member_are_its_own():
    made = [QuantizedLinear.from_float(nn.Linear(64, 32), f"w8a8-static({scale},0)") for scale in (0.05, 0.05, 0.2)]
    first, second = join(made[:2])
    second.load_state_dict(made[2].state_dict())
    for _ in range(4):
        x = torch.randn(3, 64) * 3
        expected = first(x.clone())
        torch.testing.assert_close(first(x), expected)
        torch.testing.assert_close(second(x), made[2](x))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(join([QuantizedLinear.from_float(nn.Linear(64, 32), "w4a16-g32") for _ in "qk"]))

    def forward(self, x):
        found = []
        for layer in self.layers:
            torch._dynamo.graph_break()
            found.append(layer(x))
        return found


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_graph_breaks_and_errors_between_siblings():
    """Dynamo compiles the code that keeps results for siblings as a frame of its own."""
    for _ in range(2):  # the second one meets the code of the first
        model, x = Broken(), torch.randn(3, 64)
        compiled = torch.compile(model, backend="eager")

        def check(x, compiled=compiled, model=model):
            for found, expected in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)

        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check(x.to(dtype))
        with pytest.raises(qcore.FormatError, match="dense"):
            compiled(x.to_sparse())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check(x.half())
