"""The bridge between torch and JAX: no copies, nothing stale, nothing kept too long, threads and forks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import qcore
from qcore.contracts import EMBEDDING, LINEAR
from qcore.weights.schemes import Scheme
from qcore_xla import calls
from qcore_xla.engines.jax import ENGINE, JaxEngine, _array
from qcore_xla.kernels.embedding import XlaEmbedding
from qcore_xla.kernels.linear import XlaLinear
from qcore_xla.memo import Memo


@pytest.fixture
def layer(problem):
    here = problem("w8a16", rows=4, n=64, k=128)
    kernel = XlaLinear(here.request)
    return here, kernel, kernel.pack(here.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32])
def test_arrays_share_memory(dtype):
    tensor = torch.zeros(64, 64, dtype=dtype)
    assert _array(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_results_share_memory_with_nothing_that_jax_uses_again(layer):
    here, kernel, packed = layer
    first = kernel(here.x, packed, None)
    kept = first.clone()
    first.zero_()
    assert torch.equal(kernel(here.x, packed, None), kept)


def test_a_weight_that_is_written_to_is_seen(layer):
    here, kernel, packed = layer
    before = kernel(here.x, packed, None)
    packed["scale"].mul_(2)
    torch.testing.assert_close(kernel(here.x, packed, None), before * 2)


def test_a_bias_that_is_written_to_is_seen(layer):
    here, kernel, packed = layer
    bias = torch.zeros(64)
    before = kernel(here.x, packed, bias)
    bias.add_(1)
    torch.testing.assert_close(kernel(here.x, packed, bias), before + 1)


def test_badly_aligned_weights_are_copied_and_stay_true(layer):
    here, kernel, packed = layer
    flat = torch.zeros(packed["scale"].numel() + 1)
    scale = flat[1:].view_as(packed["scale"]).copy_(packed["scale"])
    moved = {**packed, "scale": scale}
    expected = kernel(here.x, packed, None)
    assert torch.equal(kernel(here.x, moved, None), expected)
    scale.mul_(2)
    torch.testing.assert_close(kernel(here.x, moved, None), expected * 2)


def test_arrays_go_with_their_tensors():
    engine = JaxEngine()
    tensor = torch.zeros(64, 64)
    array = weakref.ref(engine._arrays.get(tensor))
    assert engine._arrays.get(tensor) is array()
    del tensor
    gc.collect()
    assert array() is None
    assert not engine._arrays._known


def test_what_inference_tensors_become_is_not_kept():
    made = []
    memo = Memo(lambda tensor: (made.append(tensor) or len(made), False))
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert [memo.get(tensor), memo.get(tensor)] == [1, 2]
    assert not memo._known


def test_inputs_that_need_gradients(layer):
    here, kernel, packed = layer
    with torch.enable_grad():
        y = kernel(here.x.clone().requires_grad_(), packed, torch.zeros(64, requires_grad=True))
    assert not y.requires_grad  # qcore supplies them


def test_an_input_may_be_overwritten_at_once(layer):
    here, kernel, packed = layer
    expected = kernel(here.x, packed, None)
    for _ in range(20):
        x = here.x.clone()
        y = kernel(x, packed, None)
        x.fill_(float("nan"))
        assert torch.equal(y, expected)


def test_threads_share_what_is_compiled(layer):
    here, kernel, packed = layer
    expected, found = kernel(here.x, packed, None), []

    def work():
        found.extend(kernel(here.x, packed, None) for _ in range(5))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 40
    assert all(torch.equal(one, expected) for one in found)


FORK = """
import os, sys, warnings, torch, qcore
warnings.simplefilter("ignore")
from qcore.contracts import LINEAR
from qcore_xla.kernels.linear import XlaLinear
scheme = qcore.Scheme.parse("w8a16")
kernel = XlaLinear(LINEAR.request_for(scheme, torch.device("cpu"), torch.float32, 64, 128))
packed = kernel.pack(qcore.quantize(torch.randn(64, 128), scheme.weight, "absmax"))
kernel(torch.randn(4, 128), packed, None)
child = os.fork()
if child == 0:
    try:
        kernel(torch.randn(4, 128), packed, None)
    except qcore.PluginError as error:
        os._exit(7 if "spawn" in str(error) else 1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_is_told_what_to_do():
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "7", run.stderr


FORKED_BEFORE = """
import os, sys
import jax, jax.numpy as jnp
import qcore_xla.plugin
jnp.ones(3).block_until_ready()
child = os.fork()
if child == 0:
    import torch, qcore
    from qcore_xla.kernels.linear import XlaLinear
    from qcore.contracts import LINEAR
    scheme = qcore.Scheme.parse("w8a16")
    kernel = XlaLinear(LINEAR.request_for(scheme, torch.device("cpu"), torch.float32, 64, 128))
    packed = kernel.pack(qcore.quantize(torch.randn(64, 128), scheme.weight, "absmax"))
    try:
        kernel(torch.randn(4, 128), packed, None)
    except qcore.PluginError as error:
        os._exit(7 if "spawn" in str(error) else 1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_whoever_had_jax_in_use_before_the_fork():
    run = subprocess.run([sys.executable, "-c", FORKED_BEFORE], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "7", run.stderr


def test_rows_are_filled_up_to_few_different_numbers():
    assert [calls.bucket(rows) for rows in (1, 4, 5, 16, 17, 256, 257)] == [4, 4, 16, 16, 32, 256, 512]


def test_old_programs_are_dropped(problem, monkeypatch):
    from qcore_xla.engines import jax as engine

    here = problem("w8a16", rows=1, k=1384)  # a size of no other test, so that its programs are new
    kernel = XlaLinear(here.request)
    packed, form = kernel.pack(here.weight), kernel._call.form_on_cpu
    kernel(here.x, packed, None)
    first = engine.compiled(kernel._call.body, form)
    monkeypatch.setattr(engine, "_MOST_PROGRAMS", 2)
    monkeypatch.setattr(engine, "_programs", 2)
    y = kernel(here.x.expand(17, -1), packed, None)
    assert engine._programs == 1
    assert engine.compiled(kernel._call.body, form) is not first
    assert all(made is not first for _, _, made in engine._jitted.values())
    torch.testing.assert_close(y[:1], kernel(here.x, packed, None))
    assert engine._programs == 2


def test_long_inputs_are_cut(problem, monkeypatch):
    here = problem("w4a8-g32-asym-token-o8t", rows=11)
    kernel = XlaLinear(here.request)
    packed = kernel.pack(here.weight)
    monkeypatch.setattr(calls, "MOST_ROWS", 4)
    assert LINEAR.judge(here, kernel(here.x, packed, here.bias, **here.given)).ok


def test_an_index_out_of_range_is_an_error():
    request = EMBEDDING.request_for(Scheme.parse("w8a16"), torch.device("cpu"), torch.float32, 5, 8)
    kernel = XlaEmbedding(request)
    packed = kernel.pack(qcore.quantize(torch.randn(5, 8), "int8"))
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=rf"span {min(0, wrong)}\.\.{max(4, wrong)}, but the table has 5 rows"):
            kernel(torch.tensor([0, wrong, 4]), packed)


def test_the_engine_serves_the_cpu_here():
    assert ENGINE.why_not(torch.device("cpu")) == ""


def test_starting_jax_leaves_the_current_gpu_as_it_was(monkeypatch):
    import jax

    from qcore_xla.engines import jax as engine

    now = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: now.__setitem__(0, index))
    monkeypatch.setattr(jax, "devices", lambda: now.__setitem__(0, 1))  # as JAX does with two GPUs
    engine._start_on_gpus.cache_clear()
    engine._start_on_gpus()
    engine._start_on_gpus.cache_clear()
    assert now == [0]
