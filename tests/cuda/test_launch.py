"""The quick way to launch, with a kernel that only takes notes."""

from __future__ import annotations

import pytest
import torch

from qcore_cuda import launch as module
from qcore_cuda.launch import launch


class Run:
    """What Triton's launcher of a compiled kernel looks like."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self):
        self.calls, self.direct = [], []

    def __call__(self, *args):
        self.calls.append(args)

    def launch(self, *args):
        self.direct.append(args)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.run = Run()


class Kernel:
    arg_names = ("x", "y", "m", "WIDE")

    def __init__(self):
        self.made, self.compiled = [], []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **meta):
            self.made.append((grid, args, meta))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compile_and_launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_quick", lambda: True)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 77, raising=False)
    return Kernel()


def test_the_second_launch_takes_addresses_and_asks_triton_nothing(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    for _ in range(3):
        assert launch(kernel, (4,), x, y, 5, WIDE=True, num_warps=4) is None
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


def test_a_start_needs_the_addresses_only(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    assert launch(kernel, (4,), x, y, 5, again=True, WIDE=True) is None, "the first launch compiles"
    start = launch(kernel, (4,), x, y, 5, again=True, WIDE=True)
    start(1024, 2048)
    expected = (4, 1, 1, 77, "function", False, True, None, None, "metadata", None, None, None, 1024, 2048, 5, True)
    assert kernel.compiled[0].run.direct == [expected]


def test_a_kernel_that_wants_scratch_memory_is_left_to_triton(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    launch(kernel, (4,), x, y, 5, WIDE=True)
    kernel.compiled[0].run.global_scratch_size = 64
    assert launch(kernel, (4,), x, y, 5, again=True, WIDE=True) is None


def test_other_versions_of_triton_launch_the_ordinary_way(kernel, monkeypatch):
    monkeypatch.setattr(module, "_quick", lambda: False)
    x, y = torch.zeros(8), torch.zeros(8)
    for _ in range(2):
        assert launch(kernel, (4,), x, y, 5, again=True, WIDE=True) is None
    assert len(kernel.made) == 2
