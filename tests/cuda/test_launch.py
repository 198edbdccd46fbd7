"""The quick way to launch, with a kernel that computes on the CPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from fake_triton import Metadata

from qcore_cuda.runtime import launch as module
from qcore_cuda.runtime.launch import launch


def test_the_second_launch_bypasses_triton(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    for _ in range(3):
        launch(kernel, (4,), x, y, 5, WIDE=True, num_warps=4)
    assert len(kernel.made) == 1
    first, second = kernel.compiled[0].run.calls
    addresses = (x.data_ptr(), y.data_ptr())
    assert first == second == (4, 1, 1, 77, "function", "metadata", None, None, None, *addresses, 5, True)


@pytest.mark.parametrize("change", ["dtype", "alignment", "one", "multiple", "wide", "constant", "option"])
def test_whatever_triton_compiles_for_makes_another_kernel(kernel, change):
    storage = torch.zeros(64)
    x, y, m, meta = storage[:8], torch.zeros(8), 5, {"WIDE": True, "num_warps": 4}
    launch(kernel, (4,), x, y, m, **meta)
    changed = {
        "dtype": {"x": x.half()}, "alignment": {"x": storage[1:9]}, "one": {"m": 1}, "multiple": {"m": 16},
        "wide": {"m": 1 << 40}, "constant": {"meta": {"WIDE": False, "num_warps": 4}},
        "option": {"meta": {"WIDE": True, "num_warps": 8}},
    }[change]  # fmt: skip
    launch(kernel, (4,), changed.get("x", x), y, changed.get("m", m), **changed.get("meta", meta))
    assert len(kernel.made) == 2


def test_shared_memory_is_set_before_a_kernel_is_loaded(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    for _ in range(2):
        launch(kernel, (4,), x, y, 5, WIDE=True, num_warps=4, DYNAMIC=60000)
    (compiled,) = kernel.compiled
    assert compiled.metadata.shared == 4 * 512 + 60000
    assert [call[5] for call in compiled.run.calls] == [(4, 1, 4 * 512 + 60000)]


def test_a_ring_that_triton_would_write_into_is_refused(kernel, monkeypatch):
    monkeypatch.setattr("fake_triton.Compiled.metadata", Metadata(shared=4 * 512 + 16))
    with pytest.raises(RuntimeError, match="more than 2048"):
        launch(kernel, (4,), torch.zeros(8), torch.zeros(8), 5, WIDE=True, num_warps=4, DYNAMIC=60000)


def test_concurrent_first_launches_load_the_same_kernel(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    order, together = [], threading.Barrier(4)
    warmup, start = kernel.warmup, kernel.__class__.__getitem__

    class Slow(kernel.__class__):
        def warmup(self, *args, **meta):
            order.append("asked")
            time.sleep(0.01)
            return warmup(*args, **meta)

        def __getitem__(self, grid):
            order.append("launched")
            return start(self, grid)

    kernel.__class__ = Slow

    def first():
        together.wait()
        launch(kernel, (4,), x, y, 5, WIDE=True, num_warps=4, DYNAMIC=60000)

    threads = [threading.Thread(target=first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["asked", "launched"] * (len(order) // 2)


def test_other_versions_of_triton_launch_the_ordinary_way(kernel, monkeypatch):
    monkeypatch.setattr(module, "_quick", lambda: False)
    x, y = torch.zeros(8), torch.zeros(8)
    for _ in range(2):
        launch(kernel, (4,), x, y, 5, WIDE=True)
    assert len(kernel.made) == 2
