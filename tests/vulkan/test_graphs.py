"""Whole models as one program on a Vulkan device: ``torch.compile(model, backend="qcore_vulkan")``."""

import copy
import gc
from importlib import import_module
from pathlib import Path

import pytest
import torch
from graph_backends import check_replaced_memory
from tiny_models import Decoder, Encoder, decoded
from torch import nn

import qcore
from qcore import graphs
from qcore_vulkan import builder
from qcore_vulkan.graphs.backend import qcore_vulkan

PYPROJECT = Path(__file__).parents[2] / "plugins/vulkan/pyproject.toml"

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_torch_finds_it_by_name():
    lines = PYPROJECT.read_text("utf-8").splitlines()
    name, _, place = next(line.partition(" = ") for line in lines if line.startswith("qcore_vulkan = "))
    module, _, function = place.strip('"').partition(":")
    assert getattr(import_module(module), function).__name__ == name


@pytest.mark.alternate
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "bias", "dtype"), [
    (None, False, torch.float32), (None, True, torch.bfloat16), ("w4a16-g32-asym", True, torch.float32),
    ("w8a8", False, torch.bfloat16),
])  # fmt: skip
def test_a_decoder_is_one_submission_a_step(device, scheme, bias, dtype):
    torch.manual_seed(0)
    model = Decoder(bias=bias, layers=2).eval().to(dtype)
    if scheme:
        qcore.quantize_(model, scheme)
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_vulkan)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    wanted = decoded(expected)
    assert (decoded(compiled) - wanted).norm() <= tolerance * wanted.norm()
    found = graphs.explain(compiled)
    assert not found.host
    assert all(len(report.parts) == 1 and report.states == 4 and not report.copied for report in found.reports)
    model.reset()  # writes of torch are seen
    before = device.stats().submissions
    assert (decoded(compiled) - wanted).norm() <= tolerance * wanted.norm()
    assert device.stats().submissions == before + 3


@torch.no_grad()
def test_caches_stay_on_the_device_until_they_are_asked_for(device):
    torch.manual_seed(0)
    model = Decoder(layers=1).eval()
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_vulkan)
    decoded(expected)
    decoded(compiled)
    cache, wanted = model.layers[0].attention.keys, expected.layers[0].attention.keys
    assert cache.isnan().all()
    graphs.synchronize(model)
    torch.testing.assert_close(cache, wanted, rtol=1e-4, atol=1e-4)
    submissions = device.stats().submissions
    graphs.synchronize(model)  # nothing has changed
    assert device.stats().submissions == submissions


@torch.no_grad()
def test_an_encoder():
    torch.manual_seed(0)
    model = Encoder(layers=1).eval()
    qcore.quantize_(model, "w8a16")
    compiled = torch.compile(copy.deepcopy(model), backend=qcore_vulkan)
    ids, mask = torch.randint(0, 96, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    torch.testing.assert_close(compiled(ids, mask), model(ids, mask), rtol=1e-4, atol=1e-5)
    assert not graphs.explain(compiled).host
    assert graphs.explain(compiled).submissions == 1


@torch.no_grad()
def test_greedy_text_is_the_same():
    torch.manual_seed(0)
    model = Decoder(layers=2, length=64).eval()
    compiled = torch.compile(copy.deepcopy(model), backend=qcore_vulkan)

    def text(run):
        ids, found = torch.tensor([[3, 1, 4, 1, 5]]), []
        positions = torch.arange(5)
        for _ in range(24):
            ids = run(ids, positions)[:, -1].argmax(-1, keepdim=True)
            found.append(int(ids))
            positions = positions[-1:] + 1
        return found

    assert text(compiled) == text(model)


LINEAR = ["w8a16-g32", "w4a16", "w4a8-g32-asym-aasym", "w8a8-static(0.03,5)"]


@torch.no_grad()
@pytest.mark.parametrize("scheme", LINEAR)
@pytest.mark.parametrize(("k", "n"), [(77, 20), (64, 33)])
def test_linear_layers(scheme, k, n):
    torch.manual_seed(0)
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(k, n), scheme)
    x = torch.randn(2, 3, k)
    y, expected = torch.compile(layer, backend=qcore_vulkan)(x), layer(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_rows_that_are_views():
    torch.manual_seed(0)
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(12, 7, bias=False), "w8a16")

    def views(x):
        return layer(x.mT) + layer(x.mT[1:3]).sum() + layer(x.mT[:, 1, :] * 2)[:, None] + layer(x[:1, :, 0])

    x = torch.randn(4, 12, 12)
    torch.testing.assert_close(torch.compile(views, backend=qcore_vulkan)(x), views(x), rtol=1e-4, atol=1e-4)


class Codes(nn.Module):
    """Layers that pass codes of int8 to each other: a convolution, linear layers, views between them."""

    def __init__(self):
        super().__init__()
        self.conv, self.first = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 16)
        self.second, self.last = nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv(x).flatten(2).mT
        return self.last(self.second(self.first(x)))


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w8a8-static-o8", "w4a8-static-o8"])
def test_codes_of_int8_between_layers(scheme):
    torch.manual_seed(0)
    model, x = Codes().eval(), torch.randn(2, 3, 6, 5)
    qcore.quantize_(model, {"last": "w8a8-static", "*": scheme}, calibration=[x])
    compiled = torch.compile(copy.deepcopy(model), backend=qcore_vulkan)
    y, expected = compiled(x), model(x)
    assert (y - expected).norm() <= 2e-2 * expected.norm()  # a code may be rounded the other way
    found = graphs.explain(compiled)
    assert not found.host
    assert found.submissions == 1


@torch.no_grad()
def test_codes_of_int8_in_and_out():
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 8), "w8a8-static(0.03,5)-o8(0.05,-3)")
    compiled = torch.compile(layer, backend=qcore_vulkan)
    x = torch.randn(20, 32)
    codes = (x / 0.03 + 5).round().clamp(-128, 127).to(torch.int8)
    for given in (x, codes):
        y, expected = compiled(given), layer(given)
        assert y.dtype == torch.int8
        apart = (y.int() - expected.int()).abs()
        assert apart.max() <= 1
        assert apart.sum() <= 2
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_a_weight_that_lives_on_the_device_is_not_copied(device):
    torch.manual_seed(0)
    with qcore.using("vulkan"):
        layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(256, 512, bias=False), "w8a16")
        x = torch.randn(3, 256)
        expected = layer(x)
        gc.collect()
        before = device.stats().bytes
        torch.testing.assert_close(torch.compile(layer, backend=qcore_vulkan)(x), expected)
    assert device.stats().bytes <= before


@torch.no_grad()
def test_a_weight_with_an_order_of_columns():
    torch.manual_seed(0)
    weight = qcore.quantize(torch.randn(12, 64), "int4-g32").derived(order=torch.randperm(64).to(torch.int32))
    layer, x = qcore.nn.QuantizedLinear.from_qtensor(weight), torch.randn(3, 64)
    torch.testing.assert_close(torch.compile(layer, backend=qcore_vulkan)(x), layer(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "groups"), [("w8a8", 1), ("w4a16-g32", 2)])
def test_convolutions(scheme, groups):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, stride=(2, 1), padding=(1, 2), groups=groups)
    layer, x = qcore.nn.QuantizedConv2d.from_float(conv, scheme), torch.randn(2, 4, 7, 6)
    torch.testing.assert_close(torch.compile(layer, backend=qcore_vulkan)(x), layer(x), rtol=1e-4, atol=1e-4)
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_an_index_out_of_range_is_an_error():
    torch.manual_seed(0)
    table = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(9, 32), "w8a16")
    compiled = torch.compile(table, backend=qcore_vulkan)
    torch.testing.assert_close(compiled(torch.tensor([8, 0])), table(torch.tensor([8, 0])))
    for _ in range(2):
        with pytest.raises(IndexError, match="out of range"):
            compiled(torch.tensor([9, 0]))
    with pytest.warns(qcore.QcoreWarning, match="32 bits"), pytest.raises(IndexError):  # torch's
        compiled(torch.tensor([1 << 40, 0]))
    torch.testing.assert_close(compiled(torch.tensor([0, 8])), table(torch.tensor([0, 8])))


@torch.no_grad()
def test_another_weight_is_taken_at_the_next_call():
    torch.manual_seed(0)
    layer, x = qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), "w8a16"), torch.randn(3, 32)
    compiled = torch.compile(layer, backend=qcore_vulkan)
    compiled(x)
    layer.weight = qcore.quantize(torch.randn(16, 32), "int8")
    layer.bias.add_(1)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_replaced_is_taken_at_the_next_call(dtype):
    check_replaced_memory(qcore_vulkan, dtype)


@torch.no_grad()
def test_parts_between_nodes_of_the_host():
    def model(x):
        return torch.special.i0(x.exp().sin()).mul(2).cos()

    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, backend=qcore_vulkan)(x), model(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_float_weights_of_16_bits_stay_so(device):
    table, layer = nn.Embedding(33, 63).half(), nn.Linear(63, 65).half()
    model = nn.Sequential(table, layer)
    compiled, ids = torch.compile(model, backend=qcore_vulkan), torch.tensor([[3, 32], [0, 1]])
    gc.collect()
    before = device.stats().bytes
    torch.testing.assert_close(compiled(ids), model(ids), rtol=4e-3, atol=4e-3)
    assert device.stats().bytes - before < 2 * (33 * 63 + 63 * 65) + 4 * 65 + 64
    layer.weight.mul_(2)
    torch.testing.assert_close(compiled(ids), model(ids), rtol=4e-3, atol=4e-3)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_change_take_no_more_memory(device, dtype):
    layer, x = nn.Linear(32, 16).to(dtype), torch.randn(3, 32, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    compiled = torch.compile(layer, backend=qcore_vulkan)
    compiled(x)
    gc.collect()
    before = device.stats()
    for _ in range(3):
        layer.weight.add_(1)
        torch.testing.assert_close(compiled(x), layer(x), rtol=tolerance, atol=tolerance)
    assert (device.stats().bytes, device.stats().programs) == (before.bytes, before.programs)


@torch.no_grad()
def test_a_weight_that_is_replaced_is_freed(device):
    layer, x = qcore.nn.QuantizedLinear.from_float(nn.Linear(64, 64, bias=False), "w8a16"), torch.randn(3, 64)
    compiled = torch.compile(layer, backend=qcore_vulkan)
    compiled(x)
    gc.collect()
    before = device.stats().bytes
    for _ in range(3):
        layer.weight = qcore.quantize(torch.randn(64, 64), "int8")
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)
        gc.collect()
    assert device.stats().bytes == before


@torch.no_grad()
def test_out_of_memory_is_an_error_that_names_what_was_wanted(device):
    from qcore_vulkan import native
    from qcore_vulkan.graphs import residents

    layer, x = nn.Linear(40, 30), torch.randn(2, 40)
    device.inject(native.INJECT_OUT_OF_MEMORY)
    with pytest.raises(native.OutOfMemory, match=r"float32 \(30, 40\) of a compiled model"):
        residents.static(device, layer.weight)
    device.inject(native.INJECT_OUT_OF_MEMORY)
    compiled = torch.compile(layer, backend=qcore_vulkan)
    with pytest.warns(qcore.QcoreWarning, match="runs in torch: OutOfMemory: no room"):
        y = compiled(x)
    torch.testing.assert_close(y, layer(x))


def test_needs_no_gradients():
    layer = nn.Linear(4, 3)
    with pytest.warns(qcore.QcoreWarning, match="inference only"):
        torch.compile(layer, backend=qcore_vulkan)(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.alternate
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "preparation"), [("w8a8", "quantize"), ("w4a16-g32", None)])
def test_steps_of_a_block_run_side_by_side(device, monkeypatch, scheme, preparation):
    programs, plain = [], builder.Program

    def noted(*args):
        programs.append(plain(*args))
        return programs[-1]

    torch.manual_seed(0)
    counts = {}
    for layers in (1, 2):
        torch._dynamo.reset()
        model = Decoder(layers=layers).eval()
        qcore.quantize_(model, scheme)
        wanted = decoded(copy.deepcopy(model))
        with monkeypatch.context() as patched:
            patched.setattr(builder, "Program", noted)
            found = decoded(torch.compile(model, backend=qcore_vulkan))
        assert (found - wanted).norm() <= 1e-4 * wanted.norm()
        steps = programs[-1].steps
        names = [step.name for step in steps]
        counts[layers] = sum(step.barrier for step in steps), names.count("rows"), names.count(preparation)
    waits, norms, preparations = (b - a for a, b in zip(counts[1], counts[2], strict=True))
    # Queries, keys and values share one preparation and run together, as gates do; norms add the residuals.
    assert norms == 2
    assert preparations == (4 if preparation else 0)
    assert waits == 9 + preparations


@torch.no_grad()
def test_constants_that_only_torch_computes():
    quantile = torch.distributions.Normal(0, 1).icdf
    model = nn.Sequential(nn.Linear(8, 4))
    model.register_forward_hook(lambda _, __, y: torch.relu(y - quantile(torch.tensor(0.6)) * y.std(-1, keepdim=True)))
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_vulkan)
    for _ in range(2):
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x), expected(x), rtol=1e-5, atol=1e-5)
    found = graphs.explain(model)
    assert found.submissions == 1
    assert not found.host + found.refused, str(found)
