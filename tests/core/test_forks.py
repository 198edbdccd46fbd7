"""Threads, forks, and layers that are moved while they run."""

from __future__ import annotations

import copy
import os
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import printed

import qcore
from qcore.runtime import forks

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

_HEAD = """
    import os, sys, threading, time, warnings
    from types import ModuleType
    import torch, qcore
    from qcore.runtime import forks
    from qcore.resolving.explaining import plain_request
    from qcore.discovery.registry import Registry, _Entry, registry
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    request = plain_request("w8a16", n=16, k=64, dtype=torch.float32)
    inside, leave = threading.Event(), threading.Event()
    def block_once():
        if not inside.is_set():
            inside.set()
            leave.wait(60)
    def in_child(work):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return "hung"
"""


def _script(body):
    code = textwrap.dedent(_HEAD) + textwrap.dedent(body)
    return printed("-c", code, timeout=120).split()


@needs_fork
@pytest.mark.parametrize("seconds", [5.0, 0.2])
def test_a_child_resolves_although_another_thread_was_resolving(seconds):
    body = f"""
        forks.WAIT_SECONDS = {seconds}
        plugin = ModuleType("slow")
        def offer(request):
            block_once()
            return qcore.Refusal("no")
        plugin.qcore_linear = qcore.hookimpl(offer)
        registry.add("slow", plugin)
        thread = threading.Thread(target=qcore.resolve, args=(request,))
        thread.start()
        inside.wait()
        threading.Timer(1.0, leave.set).start()
        def work():
            assert qcore.resolve(request).plugin == "torch"
            x = torch.ones(2, 64)
            weight = qcore.quantize(torch.ones(16, 64), "int8")
            assert torch.allclose(qcore.linear(x, weight), x @ weight.dequantize().t())
        print(in_child(work))
        thread.join()
        print(qcore.resolve(request).plugin)
    """
    assert _script(body) == ["0", "torch"]


@needs_fork
def test_a_child_skips_a_plugin_another_thread_was_importing():
    body = """
        forks.WAIT_SECONDS = 0.2
        def load():
            block_once()
            return plugin
        plugin = ModuleType("slow")
        plugin.qcore_linear = qcore.hookimpl(lambda request: qcore.Refusal("no"))
        registry._entries = {"slow": _Entry("slow", "qcore-slow", "1", load), "torch": registry.entries()["torch"]}
        thread = threading.Thread(target=qcore.plugins)
        thread.start()
        inside.wait()
        def work():
            status = registry.status("slow")
            assert "when this process was forked" in status.reason, status
            assert qcore.resolve(request).plugin == "torch"
        print(in_child(work))
        leave.set()
        thread.join()
        print(registry.status("slow").state)
    """
    assert _script(body) == ["0", "available"]


@needs_fork
def test_a_child_calls_a_layer_that_another_thread_was_binding():
    body = """
        weight = qcore.quantize(torch.ones(16, 64), "int8")
        layer = qcore.nn.QuantizedLinear.from_qtensor(weight)
        def hold():
            with layer._store.lock:
                block_once()
        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        print(in_child(lambda: layer(torch.ones(2, 64, dtype=torch.float16))))
        leave.set()
        thread.join()
    """
    assert _script(body) == ["0"]


@needs_fork
def test_a_hook_that_forks_goes_on_in_both_processes():
    body = """
        plugin = ModuleType("forks")
        def offer(request):
            if not inside.is_set():
                inside.set()
                pid = os.fork()
                if pid:
                    os.waitpid(pid, 0)
            return qcore.Refusal("no")
        plugin.qcore_linear = qcore.hookimpl(offer)
        plugin.qcore_probe = qcore.hookimpl(lambda: (in_child(lambda: None), qcore.Available())[1])
        registry.add("forks", plugin)
        forks.WAIT_SECONDS = 60
        start = time.monotonic()
        print(qcore.resolve(request).plugin, time.monotonic() - start < 30, flush=True)
    """
    assert _script(body) == ["torch", "True", "torch", "True"]


def test_a_lock_is_reentrant_and_tells_whose_it_is():
    lock = forks.Lock()
    with lock, lock:
        assert lock.is_mine()
        other = threading.Thread(target=lambda: found.append(lock.acquire(0.01)))
        found: list[bool] = []
        other.start()
        other.join()
        assert found == [False]
        lock.renew()
        assert lock.acquire(0.01)
        lock.acquire(0.01)  # for the two that the block gives back
    assert not lock.is_mine()


CHANGES = {
    "dtype": lambda layer, number: layer.to((torch.bfloat16, torch.float32)[number % 2]),
    "load": lambda layer, _: layer.load_state_dict(layer.state_dict()),
    "copy": lambda layer, _: copy.deepcopy(layer),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_runs_while_another_thread_changes_it(change):
    weight = qcore.quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)), "int8-g32")
    layer = qcore.nn.QuantizedLinear.from_qtensor(weight, torch.zeros(24))
    inputs = [torch.linspace(-1, 1, 2 * 64).reshape(2, 64).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    expected = [x.float() @ weight.dequantize().t() for x in inputs]
    done = threading.Event()

    def run():
        while not done.is_set():
            for x, right in zip(inputs, expected, strict=True):
                torch.testing.assert_close(layer(x).float(), right, atol=0.1, rtol=0.05)
                list(layer.named_buffers())
                layer.state_dict()

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(run) for _ in range(3)]
        for number in range(60):
            change(layer, number)
        done.set()
    for each in runs:
        each.result()


def test_who_looks_at_a_layer_meanwhile_sees_it_as_it_was():
    layer = qcore.nn.QuantizedLinear.from_qtensor(qcore.quantize(torch.ones(24, 64), "int8-g32"))
    buffers, bounds = layer.named_buffers(), iter(layer._bounds.values())
    first = next(buffers)
    layer.to(torch.bfloat16)
    layer(torch.ones(2, 64, dtype=torch.float16))
    assert {name for name, _ in (first, *buffers)}
    assert len(list(bounds)) == 1
