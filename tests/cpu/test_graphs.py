"""Whole models as native programs: ``torch.compile(model, backend="qcore_cpu")``."""

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from graph_backends import check_calls_that_only_write, check_counted, check_replaced_memory
from tiny_models import Decoder, Encoder, decoded
from torch import nn

import qcore
from qcore import graphs
from qcore_cpu import native

assert not native.fault()
from qcore_cpu.graphs import program  # noqa: E402 - the ops exist once the library is loaded
from qcore_cpu.graphs.backend import qcore_cpu  # noqa: E402

OPS = Path(__file__).with_name("test_graph_ops.py")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_torch_finds_it_by_name():
    assert "qcore_cpu" in torch._dynamo.list_backends(())
    assert torch._dynamo.lookup_backend("qcore_cpu") is qcore_cpu


@pytest.mark.alternate
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "bias", "dtype"), [
    (None, False, torch.float32), ("w4a16-g32-asym", True, torch.float32), ("w8a8", False, torch.bfloat16),
    ("w4a16-g32", True, torch.bfloat16), ("w8a16", False, torch.float16), ("mxfp4", False, torch.float32),
])  # fmt: skip
def test_a_decoder_is_one_program_and_its_caches_stay(scheme, bias, dtype):
    torch.manual_seed(0)
    model = Decoder(bias=bias, layers=2).eval().to(dtype)
    if scheme:
        qcore.quantize_(model, scheme)
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_cpu)
    wanted = decoded(expected)
    y = decoded(compiled)
    assert (y - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    keys = model.layers[1].attention.keys
    assert (keys - expected.layers[1].attention.keys).norm() <= TOLERANCE[dtype] * keys.norm()
    found = graphs.explain(compiled)
    left = {"embedding"} if scheme is None else set()  # of floats
    assert {node.op for node in found.host} == left
    assert all(len(report.parts) == 1 and report.states == 4 and not report.copied for report in found.reports)
    place = keys.data_ptr()
    model.reset()  # writes of torch are seen
    assert (decoded(compiled) - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    assert keys.data_ptr() == place


@torch.no_grad()
def test_steps_write_caches_in_place(monkeypatch):
    torch.manual_seed(0)
    model = Decoder(layers=1, length=256).eval()
    qcore.quantize_(model, "w8a16")
    compiled = torch.compile(model, backend=qcore_cpu)
    made, build = [], program.Program
    monkeypatch.setattr(program, "Program", lambda part: made.append(build(part)) or made[-1])
    decoded(compiled, (5, 1))
    keys = model.layers[0].attention.keys
    assert len(made) == 2
    for one in made:
        lowered = one._lowered
        assert lowered.arena < keys.nbytes  # no copy of a cache
        assert sum(isinstance(segment, tuple) for segment in lowered.segments) <= 2


@torch.no_grad()
def test_an_encoder():
    torch.manual_seed(0)
    model = Encoder(layers=2).eval()
    qcore.quantize_(model, "w8a16")
    compiled = torch.compile(copy.deepcopy(model), backend=qcore_cpu)
    for rows, length in ((2, 7), (3, 12)):
        ids, mask = torch.randint(0, 96, (rows, length)), torch.ones(rows, length, dtype=torch.long)
        mask[1, 4:] = 0
        torch.testing.assert_close(compiled(ids, mask), model(ids, mask), rtol=1e-5, atol=1e-5)


LINEAR = [
    "w8a16-g32", "w4a16", "w4a16-g32-fzp", "w4a8-g32-asym-aasym", "w8a8-static(0.03,5)", "w8a8-static(0.03,0)",
    "w8a8-static(0.03,5)-o8(0.05,-3)", "wfp8a16-g32", "mxfp4", "nvfp4", "wnf4a16-g64", "w4afp8-g16-asym",
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", LINEAR)
def test_linear_layers(scheme, bias):
    torch.manual_seed(0)
    layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(77, 20, bias), scheme)
    x = torch.randn(2, 3, 77)
    y, expected = torch.compile(layer, backend=qcore_cpu)(x), layer(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert not graphs.explain(layer).host


@torch.no_grad()
def test_layers_of_other_kernels_run_on_theirs():
    torch.manual_seed(0)
    with qcore.using("torch"):
        layer = qcore.nn.QuantizedLinear.from_float(nn.Linear(64, 32), "w4a16-g32")
        x = torch.randn(3, 64)
        expected = layer(x)
    model = nn.Sequential(layer, nn.SiLU())
    torch.testing.assert_close(torch.compile(model, backend=qcore_cpu)(x), nn.functional.silu(expected))


@torch.no_grad()
def test_other_layers():
    torch.manual_seed(0)
    conv = qcore.nn.QuantizedConv2d.from_float(nn.Conv2d(8, 16, 3, padding=1), "w8a8")
    image = torch.randn(2, 8, 7, 6)
    y = torch.compile(nn.Sequential(conv, nn.ReLU()), backend=qcore_cpu)(image)
    torch.testing.assert_close(y, conv(image).relu(), rtol=1e-5, atol=1e-5)
    experts = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(3, 8, 40), "w4a16-g32")
    x, ends = torch.randn(5, 40), torch.tensor([2, 2, 4], dtype=torch.int32)
    torch.testing.assert_close(torch.compile(experts, backend=qcore_cpu)(x, ends), experts(x, ends))
    table = qcore.nn.QuantizedEmbedding.from_float(nn.Embedding(9, 32), "w8a16")
    compiled = torch.compile(table, backend=qcore_cpu)
    assert torch.equal(compiled(torch.tensor([8, 0])), table(torch.tensor([8, 0])))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(torch.tensor([9, 0]))


@torch.no_grad()
def test_another_weight_is_taken_at_the_next_call():
    torch.manual_seed(0)
    layer, x = qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), "w8a16"), torch.randn(3, 32)
    compiled = torch.compile(layer, backend=qcore_cpu)
    compiled(x)
    for _ in range(3):
        layer.weight = qcore.quantize(torch.randn(16, 32), "int8")
        layer.bias.add_(1)
        torch.testing.assert_close(compiled(x), layer(x))


@torch.no_grad()
def test_layers_of_one_shape_share_a_graph():
    torch.manual_seed(0)
    layers = [qcore.nn.QuantizedLinear.from_float(nn.Linear(32, 16), "w8a16") for _ in range(3)]
    run = torch.compile(lambda layer, x: layer(x) * 2, backend=qcore_cpu)
    x = torch.randn(3, 32)
    for layer in [*layers, *layers]:
        torch.testing.assert_close(run(layer, x), layer(x) * 2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_replaced_is_taken_at_the_next_call(dtype):
    check_replaced_memory(qcore_cpu, dtype)


@torch.no_grad()
@pytest.mark.parametrize("count", [
    torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros((), dtype=torch.int64), torch.zeros(8)[2:5],
    torch.zeros(2, 3).T, torch.zeros(3, dtype=torch.float64),
])  # fmt: skip
def test_states(count):
    check_counted(qcore_cpu, count)


@torch.no_grad()
def test_states_that_take_each_others_values():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.arange(5.0))
            self.register_buffer("b", -torch.arange(5.0))

        def forward(self, x, at):
            before = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(before)
            self.b.index_copy_(0, at, x)
            self.b.index_copy_(0, at + 1, x * 2)
            return before * 2, self.b[:2]

    model = Swapped()
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_cpu)
    for number in range(4):
        args = torch.tensor([7.0 + number]), torch.tensor([number])
        torch.testing.assert_close(compiled(*args), expected(*args), rtol=0, atol=0)
        torch.testing.assert_close(list(model.buffers()), list(expected.buffers()), rtol=0, atol=0)


@torch.no_grad()
def test_a_value_that_is_read_after_a_state_changed():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 3))

        def forward(self, x, at):
            view = self.cache[:2] * 1
            old = self.cache + 0
            self.cache.index_copy_(0, at, x)
            first = self.cache.sum()
            self.cache.index_copy_(0, at, x * 3)
            return old, view, self.cache * 2, first

    model = Late()
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_cpu)
    for number in range(3):
        args = torch.full((1, 3), 1.0 + number), torch.tensor([number])
        torch.testing.assert_close(compiled(*args), expected(*args), rtol=0, atol=0)


@torch.no_grad()
def test_calls_that_only_write_run():
    check_calls_that_only_write(qcore_cpu, graphs.synchronize)


@torch.no_grad()
def test_inputs_of_other_strides():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.SiLU())
    qcore.quantize_(model, "w8a16")
    compiled = torch.compile(model, backend=qcore_cpu, dynamic=False)
    for x in (torch.randn(5, 16), torch.randn(16, 5).T, torch.randn(5, 32)[:, ::2], torch.randn(1, 16).expand(5, 16)):
        torch.testing.assert_close(compiled(x), model(x))


@torch.no_grad()
def test_threads_call_it_at_the_same_time():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.LayerNorm(64)).eval()
    qcore.quantize_(model, "w4a16-g32")
    compiled, inputs = torch.compile(model, backend=qcore_cpu), torch.randn(8, 40, 64)
    compiled(inputs[0])
    wanted, wrong = [model(x) for x in inputs], []

    def work(own):
        with torch.no_grad():
            for i in [own, own + 4] * 20:
                wrong.extend([] if torch.allclose(compiled(inputs[i]), wanted[i], atol=1e-5) else [i])

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


@torch.no_grad()
def test_a_replay():
    torch.manual_seed(0)
    model = Decoder(layers=1).eval()
    qcore.quantize_(model, "w4a16-g32")
    expected, compiled = copy.deepcopy(model), torch.compile(model, backend=qcore_cpu)
    ids = [torch.tensor([[7 * i]]) for i in range(6)]
    for i in range(2):
        compiled(ids[i], torch.tensor([i]))
        expected(ids[i], torch.tensor([i]))
    replay = graphs.make_replay(compiled, ids[2], torch.tensor([2]))
    torch.testing.assert_close(replay.result, expected(ids[2], torch.tensor([2])), rtol=1e-4, atol=1e-4)
    for i in range(3, 6):
        args = ids[i], torch.tensor([i])
        torch.testing.assert_close(replay(*args), expected(*args), rtol=1e-4, atol=1e-4)


def test_needs_no_gradients():
    layer = nn.Linear(4, 3)
    with pytest.warns(qcore.QcoreWarning, match="inference only"):
        torch.compile(layer, backend=qcore_cpu)(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("isa", native.isas()[1:])
def test_other_instruction_sets(isa):
    chosen = ["-k", "rules or attention or row"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(OPS), *chosen]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, native.ISA: isa}, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
