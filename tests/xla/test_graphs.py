"""Whole models as one XLA program: ``torch.compile(model, backend="qcore_xla")``."""

import copy
import gc
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest
import torch
from graph_backends import check_calls_that_only_write, check_counted, check_replaced_memory, part_of
from tiny_models import Counter, Decoder, Encoder, decoded
from torch import nn

import qcore
from qcore import graphs
from qcore_xla.graphs import lowering, program, special, states
from qcore_xla.graphs.backend import qcore_xla

HELPERS = str(Path(__file__).parents[1] / "helpers")
PYPROJECT = Path(__file__).parents[2] / "plugins/xla/pyproject.toml"


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_torch_finds_it_by_name():
    name, _, place = next(
        line.partition(" = ") for line in PYPROJECT.read_text("utf-8").splitlines() if line.startswith("qcore_xla = ")
    )
    module, _, function = place.strip('"').partition(":")
    assert getattr(import_module(module), function).__name__ == name


@pytest.mark.alternate
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "bias", "dtype"), [
    (None, False, torch.float32), ("w4a16-g32-asym", True, torch.float32), ("w8a8", False, torch.bfloat16),
])  # fmt: skip
def test_a_decoder_is_one_program_and_its_caches_stay(scheme, bias, dtype):
    torch.manual_seed(0)
    model = Decoder(bias=bias, layers=1).eval().to(dtype)
    if scheme:
        qcore.quantize_(model, scheme)
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_xla)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    wanted = decoded(expected)
    y = decoded(compiled)
    assert (y - wanted).norm() <= tolerance * wanted.norm()
    keys = model.layers[0].attention.keys
    torch.testing.assert_close(keys, expected.layers[0].attention.keys, rtol=tolerance, atol=tolerance)
    found = graphs.explain(compiled)
    assert not found.host
    assert all(len(report.parts) == 1 and report.states == 2 and not report.copied for report in found.reports)
    place = keys.data_ptr()
    model.reset()  # writes of torch are seen
    assert (decoded(compiled) - wanted).norm() <= tolerance * wanted.norm()
    assert keys.data_ptr() == place  # updated in place


@torch.no_grad()
def test_an_encoder():
    torch.manual_seed(0)
    model = Encoder(layers=1).eval()
    qcore.quantize_(model, "w8a16")
    compiled = torch.compile(copy.deepcopy(model), backend=qcore_xla)
    ids, mask = torch.randint(0, 96, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    torch.testing.assert_close(compiled(ids, mask), model(ids, mask), rtol=1e-5, atol=1e-5)
    assert not graphs.explain(compiled).host


LINEAR = [
    "w8a16-g32",
    "w4a16",
    "w4a8-g32-asym-aasym",
    "w8a8-static(0.03,5)",
    "w8a8-static(0.03,5)-o8(0.05,-3)",
    "wfp8a16-g32",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "wnf4a16",
    "wnf4a16-g64",
    "wfp4_bnba16-g16",
    "wfp8afp8",
    "wfp8afp8-g32",
    "wfp8afp8-static(0.01)",
    "w4afp8-g16-asym",
]


@torch.no_grad()
@pytest.mark.parametrize("scheme", LINEAR)
@pytest.mark.parametrize(("k", "n"), [(77, 20)])
def test_linear_layers(scheme, k, n):
    torch.manual_seed(0)
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(k, n), scheme)
    x = torch.randn(2, 3, k)
    y, expected = torch.compile(layer, backend=qcore_xla)(x), layer(x)
    assert y.dtype == expected.dtype
    if y.dtype == torch.int8:  # a quotient on the edge between two codes
        assert (y.int() - expected.int()).abs().max() <= 1
    else:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_a_weight_with_an_order_of_columns():
    torch.manual_seed(0)
    weight = qcore.quantize(torch.randn(12, 64), "int4-g32").derived(order=torch.randperm(64).to(torch.int32))
    layer, x = qcore.nn.QuantizedLinear.from_qtensor(weight), torch.randn(3, 64)
    torch.testing.assert_close(torch.compile(layer, backend=qcore_xla)(x), layer(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "groups"), [("w8a8", 1), ("w4a16-g32", 2), ("wfp8afp8-g8", 2)])
def test_convolutions(scheme, groups):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, stride=(2, 1), padding=(1, 2), groups=groups)
    layer, x = qcore.nn.QuantizedConv2d.from_float(conv, scheme), torch.randn(2, 4, 7, 6)
    torch.testing.assert_close(torch.compile(layer, backend=qcore_xla)(x), layer(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("scheme", "rows"), [("w4a16-g32", 5), ("nvfp4", 30), ("wfp8afp8", 5)])
def test_experts(scheme, rows):
    torch.manual_seed(0)
    bias = torch.randn(3, 8)
    layer = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 40), scheme, bias=bias)
    x, ends = torch.randn(rows, 40), torch.tensor([2, 2, rows - 1], dtype=torch.int32)
    y = torch.compile(layer, backend=qcore_xla)(x, ends)
    torch.testing.assert_close(y, layer(x, ends), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_replaced_is_taken_at_the_next_call(dtype):
    check_replaced_memory(qcore_xla, dtype)


@torch.no_grad()
def test_an_index_out_of_range_is_an_error():
    torch.manual_seed(0)
    table = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(9, 32), "w8a16")
    compiled = torch.compile(table, backend=qcore_xla)
    torch.testing.assert_close(compiled(torch.tensor([8, 0])), table(torch.tensor([8, 0])))
    with pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([9, 0]))
    with pytest.warns(qcore.QcoreWarning, match="32 bits"), pytest.raises(IndexError):  # torch's
        compiled(torch.tensor([1 << 40, 0]))


@torch.no_grad()
def test_another_weight_is_taken_at_the_next_call():
    torch.manual_seed(0)
    layer, x = qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), "w8a16"), torch.randn(3, 32)
    compiled = torch.compile(layer, backend=qcore_xla)
    compiled(x)
    layer.weight = qcore.quantize(torch.randn(16, 32), "int8")
    layer.bias.add_(1)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)


SHARED = torch.zeros(8)


@torch.no_grad()
@pytest.mark.parametrize(("count", "reason"), [
    (torch.zeros(3), ""), (torch.zeros(3, dtype=torch.int64), ""), (torch.zeros((), dtype=torch.int64), ""),
    (SHARED[2:5], "does not own"), (torch.zeros(6, dtype=torch.int64)[2:], "does not own"),
    (torch.zeros(2, 3).T, "does not own"),
])  # fmt: skip
def test_states(count, reason):
    assert reason in states.why_not(count)
    assert bool(reason) == bool(states.why_not(count))
    check_counted(qcore_xla, count)


@torch.no_grad()
@pytest.mark.parametrize("count", [torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(8)[2:5]])
def test_a_program_counts_its_writes(count):
    """As eager code does: autograd and other backends tell by it that a saved tensor has changed."""
    compiled = torch.compile(Counter(count), backend=qcore_xla)
    compiled(torch.ones(3).to(count.dtype))  # may give the tensor other memory, which counts, too
    for _ in range(3):
        before = count._version
        compiled(torch.ones(3).to(count.dtype))
        assert count._version == before + 1


@torch.no_grad()
def test_a_state_that_is_viewed_is_copied():
    count = torch.zeros(3)
    view = count[:2]
    compiled = torch.compile(Counter(count), backend=qcore_xla)
    compiled(torch.ones(3))
    assert torch.equal(view, torch.ones(2))


@torch.no_grad()
def test_memory_of_a_state_outlives_the_model():
    model = Counter(torch.zeros(3))
    torch.compile(model, backend=qcore_xla)(torch.ones(3))
    count = model.count
    del model
    torch._dynamo.reset()
    gc.collect()
    assert torch.equal(count + 1, torch.full((3,), 2.0))
    known = len(program._states._known)
    del count
    gc.collect()
    assert len(program._states._known) == known - 1


def test_needs_no_gradients():
    layer = nn.Linear(4, 3)
    with pytest.warns(qcore.QcoreWarning, match="inference only"):
        torch.compile(layer, backend=qcore_xla)(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None


SECOND = """
import sys
sys.path.append(sys.argv[1])
import jax, torch
import qcore
from tiny_models import Decoder
from qcore_xla.graphs.backend import qcore_xla
import jax._src.monitoring as monitoring
events = []
monitoring.register_event_listener(lambda name, **_: events.append(name))
model = Decoder(layers=1).eval()
qcore.quantize_(model, "w4a16-g32")
compiled = torch.compile(model, backend=qcore_xla)
with torch.no_grad():
    for start, ids in ((0, torch.ones(1, 5, dtype=torch.long)), (5, torch.ones(1, 1, dtype=torch.long))):
        compiled(ids, torch.arange(start, start + ids.shape[1]))
assert jax.config.jax_compilation_cache_dir is None
print(events.count("/jax/compilation_cache/cache_hits"), events.count("/jax/compilation_cache/cache_misses"))
"""


def test_a_second_start_compiles_nothing():
    found = [
        subprocess.run(
            [sys.executable, "-c", SECOND, HELPERS], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    (first_hits, first_misses), (hits, misses) = found
    assert first_hits == misses == "0"
    assert hits == first_misses == "2"  # the prompt, and one token


@torch.no_grad()
def test_a_program_that_a_special_rule_keeps_from_compiling(monkeypatch):
    def refused(x, *_):
        return jax.ffi.ffi_call("nobody_has_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    monkeypatch.setitem(special.SPECIAL, "cpu", {"exp": refused})
    part, x = part_of(torch.exp, torch.ones(3)), torch.ones(3)
    made = program.Program(part)
    with pytest.raises(graphs.PartRefused, match="nobody_has_this"):
        made([x])
    made = program.Program(part)
    made._plain = lowering.lowered(part, "cpu", {}, special=False)
    with pytest.warns(qcore.QcoreWarning, match="without kernels for GPUs"):
        torch.testing.assert_close(made([x])[0], x.exp())
    torch.testing.assert_close(made([x * 2])[0], (x * 2).exp())


@torch.no_grad()
def test_calls_that_only_write_run():
    check_calls_that_only_write(qcore_xla, graphs.synchronize)


@torch.no_grad()
def test_what_a_rule_does_not_take_runs_in_torch(monkeypatch):
    def gelu(x, **_):
        raise NotImplementedError("not for this x")

    monkeypatch.setitem(lowering.RULES, "gelu", gelu)
    model, x = nn.Sequential(nn.Linear(32, 16), nn.GELU()), torch.randn(3, 32)
    qcore.quantize_(model, "w8a16")
    compiled = torch.compile(model, backend=qcore_xla)
    with pytest.warns(qcore.QcoreWarning, match="gelu in qcore_xla: NotImplementedError: not for this x"):
        torch.testing.assert_close(compiled(x), model(x))
    assert {node.op for node in graphs.explain(compiled).host} >= {"linear", "gelu"}
