"""The ops of the plugin in graphs, and the ops of torch_xla, torchao and ExecuTorch when the plugin serves them."""

from __future__ import annotations

import pytest
import torch
from op_formulas import OPS, _arguments, _brute_force, _qga4w, samples
from torch import nn

import qcore
from qcore.errors import FormatError
from qcore.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedGroupedLinear, QuantizedLinear
from qcore_vulkan import device, ops

torch.manual_seed(0)
SAMPLES = list(samples())
OURS = torch.ops.qcore_vulkan


def submissions():
    return device.get().stats().submissions


@pytest.mark.parametrize(("name", "arguments"), SAMPLES, ids=[name for name, _ in SAMPLES])
def test_ops_of_the_seed_systems_run_on_the_device(name, arguments):
    op = getattr(OPS, name)
    with qcore.using("torch"):
        expected = op(*arguments)
    before = submissions()
    with qcore.using("vulkan", strict=True):
        result = op(*arguments)
    assert submissions() > before
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    within_a_code = 1 if result.dtype == torch.int8 else 1e-3
    torch.testing.assert_close(result.float(), expected.float(), atol=within_a_code, rtol=1e-3)


@pytest.mark.parametrize("lead", [(3,), (2, 2)])
def test_parameters_per_token(lead):
    torch.manual_seed(0)
    p = _qga4w(lead)
    tokens = torch.Size(lead).numel()
    scale, zero = torch.rand(tokens) + 0.2, torch.randint(-20, 20, (tokens,), dtype=torch.int32)
    with qcore.using("vulkan", strict=True):
        y = OPS.linear_qta8a_qga4w(*_arguments(p))
        codes = OPS.linear_qta8a_qga4w_qta8o(*_arguments(p), scale, zero)
    exact = _brute_force(p)
    torch.testing.assert_close(y.double(), exact, atol=1e-3, rtol=1e-4)
    shape = (*lead, 1)
    expected = ((exact / scale.double().view(shape)).round() + zero.view(shape)).clamp(-128, 127)
    assert codes.dtype == torch.int8
    assert (codes.double() - expected).abs().max() <= 1
    assert (codes.double() == expected).float().mean() > 0.9


def test_parameters_for_another_number_of_tokens_are_an_error():
    from qcore_vulkan.calls import per_token

    with pytest.raises(FormatError, match=r"\(3,\); there are 4 tokens"):
        per_token("x_scale", torch.ones(3), 4)
    assert per_token("x_zero_point", torch.zeros(4), 4).dtype == torch.int32


def linear(scheme="w8a16"):
    torch.manual_seed(0)
    with qcore.using("vulkan"):
        return QuantizedLinear.from_float(nn.Linear(64, 16), scheme).requires_grad_(False)


def conv(scheme="w8a8"):
    torch.manual_seed(0)
    with qcore.using("vulkan"):
        return QuantizedConv2d.from_float(nn.Conv2d(4, 6, 3, padding=1), scheme).requires_grad_(False)


def table():
    torch.manual_seed(0)
    with qcore.using("vulkan"):
        return QuantizedEmbedding.from_float(nn.Embedding(20, 64), "w4a16-g32")


class Experts(nn.Module):
    """Three experts with a third of the rows each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        with qcore.using("vulkan"):
            layer = QuantizedGroupedLinear.from_float(torch.randn(3, 16, 64), "w8a8", bias=torch.randn(3, 16))
        self.layer = layer.requires_grad_(False)

    def forward(self, x):
        return self.layer(x, torch.arange(1, 4, dtype=torch.int32) * x.shape[0] // 3)


CALLS = {
    "linear_a16": (linear, lambda n: torch.randn(n, 64)),
    "linear_a8": (lambda: linear("w4a8-g32-aasym"), lambda n: torch.randn(n, 64)),
    "conv2d": (conv, lambda n: torch.randn(n, 4, 7, 6)),
    "embedding": (table, lambda n: torch.randint(0, 20, (n, 3))),
    "grouped_linear": (Experts, lambda n: torch.randn(n, 64)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_names_the_op_and_serves_every_number_of_rows(name):
    make, x = CALLS[name]
    module, targets = make(), set()

    def backend(graph, inputs):
        targets.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 3, 11):
        given = x(rows)
        torch.testing.assert_close(compiled(given), module(given))
    assert f"qcore_vulkan.{name}.default" in targets


@pytest.mark.parametrize("name", CALLS)
def test_export(name):
    make, x = CALLS[name]
    module, given = make(), x(3)
    module(given)
    program = torch.export.export(module, (given,))
    assert f"qcore_vulkan.{name}.default" in str(program.graph)
    torch.testing.assert_close(program.module()(given), module(given))


def test_every_op_has_been_tried():
    assert {name.removeprefix("op_") for name in vars(ops) if name.startswith("op_")} == {
        *CALLS,
        "unpack",
    }  # tried below


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("index", [-1, 20])
def test_an_index_out_of_range_is_an_error(dtype, index):
    module = table()
    for call in (module, lambda x: OURS.embedding(x, module._primary.packed["weight"], 64, torch.float32)):
        with pytest.raises(IndexError, match=r"the table has 20 rows"):
            call(torch.tensor([3, index], dtype=dtype))


def test_no_rows():
    assert linear()(torch.randn(0, 64)).shape == (0, 16)
    assert linear()(torch.randn(2, 0, 64)).shape == (2, 0, 16)
    assert conv()(torch.randn(0, 4, 7, 6)).shape == (0, 6, 7, 6)
    assert table()(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 64)
    weight = linear()._primary.packed["weight"]
    assert OURS.linear_a16(torch.randn(0, 64), weight, None, 16, torch.float32).shape == (0, 16)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.t()[:64].t()[:, :64],
        lambda x: x.flip(0)[:, :64],
        lambda x: x[:1].expand(5, -1)[:, :64],
        lambda x: x[1::2, 3:67],
    ],
    ids=["columns", "slices", "flipped", "expanded", "rows"],
)
def test_strides(view):
    module, x = linear(), view(torch.randn(6, 128))
    torch.testing.assert_close(module(x), module(x.clone(memory_format=torch.contiguous_format)))


def test_images_of_any_strides():
    module, x = conv("w8a16"), torch.randn(1, 8, 9, 9)
    for image in (x[:, ::2], x[:, :4].transpose(2, 3), x[:, :4].contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(module(image), module(image.clone(memory_format=torch.contiguous_format)))


def test_an_image_that_does_not_fit_is_an_error():
    kernel, packed = conv()._primary.kernel, conv()._primary.packed
    with pytest.raises(FormatError, match="IC=4"):
        kernel(torch.randn(1, 3, 8, 8), packed, None)
    with pytest.raises(FormatError, match="smaller"):
        kernel(torch.randn(1, 4, 0, 8), packed, None)


def test_tuning_has_nothing_to_choose_on_a_cpu():
    module = linear()
    module._primary.kernel.tune(torch.randn(3, 64), module._primary.packed, None)


torchs_own = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@torchs_own
def test_gradients_in_one_graph_and_with_the_right_format():
    # The forward passes of these are the same op: a graph must not serve a weight of another format.
    schemes = ("w4a16-g32", "w4a16-g32-asym", "w4a16-g32-fzp", "w4a16-g32-asym/plain_int32", "w8a8", "w8a16")
    for scheme in (*schemes, "wfp8_e5m2a16", "wfp8a16-g32-e8m0", "wfp8a16-g16-e4m3", "mxfp4", "wnf4a16-g64"):
        torch._dynamo.reset()
        with qcore.using("vulkan", strict=True):
            model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 7))
            qcore.quantize_(model, scheme)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (3, 5):
            x = torch.randn(rows, 64, requires_grad=True)
            expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
            found = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torchs_own
def test_gradients_of_a_convolution_in_one_graph():
    with qcore.using("vulkan", strict=True):
        model = nn.Sequential(nn.Conv2d(3, 5, 3))
        qcore.quantize_(model, "w8a16-asym")
    x = torch.randn(2, 3, 7, 7, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
