"""Weights in device memory: what a handle stands for, when memory is free again, and what happens when it is lost."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import qcore
from qcore.errors import FormatError, PluginError, QcoreWarning
from qcore.formats import PLAIN, PLAIN_INT32, ZeroPoint
from qcore.nn import QuantizedEmbedding, QuantizedLinear
from qcore.resolving.explaining import plain_request
from qcore.resolving.verification import difference
from qcore_vulkan import calls, device, native, weights

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def kernel_for(weight):
    from qcore_vulkan.linear import VulkanLinear

    request = plain_request(qcore.Scheme(weight.format), n=weight.shape[0], k=weight.shape[1], dtype=torch.float32)
    return VulkanLinear(request)


def small_weight(n=16, k=64, fmt="int8", **more):
    torch.manual_seed(0)
    return qcore.quantize(torch.randn(n, k), fmt, **more)


def vulkan_linear(n=16, k=64, scheme="w8a16"):
    """A layer that records no gradients: those that do are bound anew, by the settings of that moment."""
    torch.manual_seed(0)
    with qcore.using("vulkan"):
        return QuantizedLinear.from_float(nn.Linear(k, n).requires_grad_(False), scheme)


def alive():
    gc.collect()
    return device.get().stats().buffers


def inject(what):
    opened = device.get()
    opened.check(opened.library.qv_inject(opened.handle, what))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero", list(ZeroPoint), ids=str)
@pytest.mark.parametrize(("bits", "layout"), [("int4", PLAIN), ("int4", PLAIN_INT32), ("int8", PLAIN)])
@pytest.mark.parametrize(("n", "k", "group"), [(16, 64, None), (3, 77, 32), (9, 168, 128), (1, 5, 7), (20, 96, 96)])
def test_what_goes_in_comes_out(bits, layout, zero, dtype, n, k, group):
    generator = torch.Generator().manual_seed(0)
    fmt = qcore.Format(bits, group, zero, PLAIN)
    low, high = (-8, 8) if bits == "int4" else (-128, 128)
    codes = torch.randint(low, high, (n, k), generator=generator).to(torch.int8)
    scale = (torch.rand(fmt.groups(k), n, generator=generator) + 0.1).to(dtype)
    shift = None
    if zero is ZeroPoint.INT:
        shift = torch.randint(low, high, scale.shape, generator=generator).to(torch.int8)
    elif zero is ZeroPoint.FLOAT:
        shift = torch.randn(scale.shape, generator=generator).to(dtype)
    weight = qcore.QTensor.from_codes(codes, scale, shift, fmt).convert(layout)
    kernel = kernel_for(weight)
    assert not difference(kernel.unpack(kernel.pack(weight)), weight)


class TestHandle:
    def test_memory_is_free_when_the_last_tensor_dies(self):
        before = alive()
        kernel = kernel_for(small_weight())
        packed = kernel.pack(small_weight())
        assert alive() > before
        view = packed["weight"].detach().view(1, 1)
        del packed
        assert alive() > before
        assert weights.find(view).k == 64
        del view
        assert alive() == before

    def test_a_clone_finds_the_weight_but_does_not_own_it(self):
        kernel = kernel_for(small_weight())
        packed = kernel.pack(small_weight())
        cloned = copy.deepcopy(packed)
        expected = kernel(X, packed, None)
        assert torch.equal(kernel(X, cloned, None), expected)
        del packed
        gc.collect()
        with pytest.raises(PluginError, match=r"has been freed.*\n.*Pack the weight again"):
            kernel(X, cloned, None)
        with pytest.raises(PluginError, match="freed"):
            kernel.unpack(cloned)

    def test_programs_and_biases_go_with_the_weight(self):
        before = device.get().stats()
        kernel = kernel_for(small_weight())
        packed = kernel.pack(small_weight())
        kernel(X, packed, torch.ones(16))
        assert device.get().stats().programs > before.programs
        del packed
        gc.collect()
        after = device.get().stats()
        assert (after.buffers, after.programs) == (before.buffers, before.programs)

    def test_another_weight_is_an_error(self):
        kernel = kernel_for(small_weight())
        with pytest.raises(FormatError, match=r"\(16, 64\).*\n.*\(8, 64\)"):
            kernel.pack(small_weight(8))

    def test_it_counts_the_bytes_on_the_device(self):
        layer = vulkan_linear(128, 256)
        held = qcore.report(layer).bytes_after
        assert 128 * 256 <= held < 1.2 * 128 * 256


class TestModules:
    def test_memory_goes_with_the_module(self):
        before = alive()
        layer = vulkan_linear()
        layer(X)
        assert layer.decision.plugin == "vulkan"
        del layer
        assert alive() == before

    def test_copies_have_memory_of_their_own(self):
        layer = vulkan_linear()
        expected = layer(X)
        with qcore.using("vulkan"):
            copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        del layer
        gc.collect()
        for module in (copied, pickled):
            assert module.decision.plugin == "vulkan"
            assert torch.equal(module(X), expected)

    def test_a_state_dict_holds_the_weight_itself(self):
        layer = vulkan_linear(scheme="w4a16-g32-asym")
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = QuantizedLinear.from_float(nn.Linear(64, 16), "w4a16-g32-asym")
        other.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(other(X), layer(X))

    def test_moving_to_another_dtype_packs_anew(self):
        layer = vulkan_linear()
        expected, before = layer(X), alive()
        with qcore.using("vulkan"):
            layer.to(torch.bfloat16)
        result = layer(X.bfloat16())
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.float(), expected, atol=0.05, rtol=0.05)
        assert alive() <= before + 1  # the bias in its new dtype

    def test_tied_layers_share_the_memory(self):
        with qcore.using("vulkan"):
            table = QuantizedEmbedding.from_float(nn.Embedding(32, 64), "w8a16")
            before = alive()
            head = QuantizedLinear(table._store, table.scheme, None, torch.float32)
        assert head.decision.plugin == table.decision.plugin == "vulkan"
        assert alive() == before

    def test_gradients_flow_through_it(self):
        layer = vulkan_linear()
        x = X.clone().requires_grad_()
        before = device.get().stats().submissions
        with qcore.using("vulkan"):
            layer(x).sum().backward()
        assert device.get().stats().submissions > before
        expected = layer.weight.dequantize(torch.float32).sum(0).expand_as(x)
        torch.testing.assert_close(x.grad, expected)


class TestOutOfMemory:
    def test_the_next_plugin_serves(self):
        torch.manual_seed(0)
        model = nn.Linear(64, 16)
        inject(native.INJECT_OUT_OF_MEMORY)
        with pytest.warns(QcoreWarning, match="is disabled for"), qcore.using("linear=vulkan,torch"):
            # Named in the order, the plugin would have to serve: ask as if its rank had decided.
            layer = _by_rank(model)
        assert layer.decision.plugin == "torch"
        torch.testing.assert_close(layer(X), model(X), atol=0.05, rtol=0.05)

    def test_asked_for_by_name_it_is_an_error(self):
        inject(native.INJECT_OUT_OF_MEMORY)
        with qcore.using("vulkan"), pytest.raises(PluginError, match="memory"):
            QuantizedLinear.from_float(nn.Linear(64, 16), "w8a16")

    def test_calls_go_on_with_fewer_rows(self, monkeypatch):
        layer = vulkan_linear()
        expected = layer(X)
        run, most = calls.Program.run, 2

        def short(program, inputs, outputs):
            if outputs[0].shape[0] > most:
                raise native.OutOfMemory("no room for so many rows")
            return run(program, inputs, outputs)

        monkeypatch.setattr(calls.Program, "run", short)
        assert torch.equal(layer(X), expected)
        most = 0
        with pytest.raises(native.OutOfMemory):
            layer(X)

    def test_rows_that_are_too_many_for_one_go(self, monkeypatch):
        layer = vulkan_linear()
        x = torch.randn(50, 64)
        expected = layer(x)
        monkeypatch.setattr(calls, "LARGEST", 7 * 64 * 4)
        before = device.get().stats().submissions
        torch.testing.assert_close(layer(x), expected)
        assert device.get().stats().submissions - before == 8


def _by_rank(model):
    """A layer for which vulkan is the best offer without being named."""
    from qcore_vulkan import plugin

    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(plugin.probe, "rank", lambda: qcore.OFFLOAD + 999)
        with qcore.using("embedding=torch"):
            return QuantizedLinear.from_float(model, "w8a16")
    finally:
        patch.undo()


class TestLostDevice:
    def test_the_next_call_opens_it_again(self):
        layer = vulkan_linear()
        expected, lost = layer(X), device.get()
        inject(native.INJECT_LOST)
        with pytest.raises(PluginError, match="lost"):
            layer(X)
        assert lost.lost
        fresh = vulkan_linear()
        assert device.get() is not lost
        assert torch.equal(fresh(X), expected)

    def test_weights_that_were_on_it_are_gone(self):
        layer = vulkan_linear()
        inject(native.INJECT_LOST)
        with pytest.raises(PluginError):
            layer(X)
        with pytest.raises(PluginError, match=r"Load the checkpoint again.*QCORE_VULKAN_HOST_COPY=1"):
            layer(X)

    def test_a_copy_on_the_host_brings_them_back(self, monkeypatch):
        monkeypatch.setenv("QCORE_VULKAN_HOST_COPY", "1")
        layer = vulkan_linear()
        expected = layer(X)
        inject(native.INJECT_LOST)
        with pytest.raises(PluginError, match="lost"):
            layer(X)
        assert torch.equal(layer(X), expected)
        assert torch.equal(layer(X), expected)


def test_threads_and_a_lost_device(monkeypatch):
    monkeypatch.setenv("QCORE_VULKAN_HOST_COPY", "1")
    layers = [vulkan_linear(n) for n in (16, 24, 32)]
    expected = [layer(X) for layer in layers]
    inject(native.INJECT_LOST)
    with pytest.raises(PluginError, match="lost"):
        layers[0](X)
    start, wrong = threading.Barrier(6), []

    def work(number):
        start.wait()
        for turn in range(6):
            which = (number + turn) % 3
            if not torch.equal(layers[which](X), expected[which]):
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_process_is_refused():
    code = """
import os, torch, qcore
from qcore.nn import QuantizedLinear
with qcore.using("vulkan"):
    layer = QuantizedLinear.from_float(torch.nn.Linear(64, 16).requires_grad_(False), "w8a16")
x = torch.zeros(1, 64)
layer(x)
if os.fork() == 0:
    try:
        layer(x)
    except qcore.errors.PluginError as error:
        print("refused:", error, flush=True)
    os._exit(0)
os.wait()
print(layer(x).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "refused: " in done.stdout
    assert "fork" in done.stdout
    assert "torch.Size([1, 16])" in done.stdout


def test_the_end_of_a_program_is_quiet():
    code = """
import torch, qcore
from qcore.nn import QuantizedLinear
with qcore.using("vulkan"):
    layer = QuantizedLinear.from_float(torch.nn.Linear(64, 16).requires_grad_(False), "w8a16")
layer(torch.zeros(1, 64))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not done.stderr


def test_no_warning_is_left():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vulkan_linear()(X)
