"""Whether Triton can serve Intel GPUs, told without importing it, and launches that do not meet in its interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from qcore_xpu import device


@pytest.fixture
def triton_at(monkeypatch, tmp_path):
    """Let Triton be a folder with the given parts, or nowhere; without the interpreter."""

    def put(parts):
        spec = None
        if parts is not None:
            for part in parts:
                (tmp_path / "backends" / part).mkdir(parents=True)
            spec = ModuleSpec("triton", None, is_package=True)
            spec.submodule_search_locations = [str(tmp_path)]
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: spec)
        device._fault.cache_clear()

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield put
    device._fault.cache_clear()


def test_without_triton_the_remedy_is_said(triton_at):
    triton_at(None)
    assert "not installed" in device.why_not_triton()
    assert "triton-xpu" in device.why_not_triton()


def test_a_triton_for_other_gpus_is_not_taken_for_one_of_intel(triton_at):
    triton_at(["nvidia", "amd"])
    assert "no backend for Intel GPUs" in device.why_not_triton()


def test_triton_for_intel_serves(triton_at):
    triton_at(["intel"])
    assert not device.why_not_triton()


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_the_interpreter_serves_with_any_triton(triton_at, monkeypatch, value):
    triton_at(["nvidia"])
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert device.interpreted()
    assert not device.why_not_triton()


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_the_interpreter_may_be_switched_off(monkeypatch, value):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert not device.interpreted()


def test_modules_that_answer_requests_import_no_triton():
    modules = "triton_linear, embedding, conv2d, quantizing, triton_ops, serving"
    code = f"import sys; from qcore_xpu import {modules}; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Kernel:
    """Remembers its launches, and whether two of them met."""

    def __init__(self):
        self.launches, self.running, self.met = [], 0, False

    def __getitem__(self, grid):
        def run(*args, **meta):
            self.running += 1
            self.met |= self.running > 1
            time.sleep(0.01)
            self.running -= 1
            self.launches.append((grid, args, meta))

        return run


def test_interpreted_launches_come_one_at_a_time(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = Kernel()
    threads = [threading.Thread(target=device.launch, args=(kernel, (2,), 7), kwargs={"B": 1}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernel.launches == [((2,), (7,), {"B": 1})] * 3
    assert not kernel.met


def test_a_compiled_launch_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernel = Kernel()
    with device._one_at_a_time:
        device.launch(kernel, (1,), 1)
    assert kernel.launches == [((1,), (1,), {})]


GPU = torch.device("xpu", 0)


@pytest.fixture
def properties(monkeypatch):
    """Let torch tell these properties of every device; without the interpreter."""

    def put(**told):
        asked = []
        told = SimpleNamespace(name="Arc A770", **told)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: asked.append(device) or told)
        device._without_dpas.cache_clear()
        return asked

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield put
    device._without_dpas.cache_clear()


def test_int8_runs_where_dpas_does_and_the_device_is_asked_once(properties):
    asked = properties(sub_group_sizes=[16, 32], has_subgroup_matrix_multiply_accumulate=True)
    assert not device.why_not_int8(GPU)
    assert not device.why_not_int8(GPU)
    assert asked == [GPU]


@pytest.mark.parametrize("flag", [True, False])
def test_int8_is_refused_on_gpus_with_short_sub_groups(properties, flag):
    properties(sub_group_sizes=[8, 16, 32], has_subgroup_matrix_multiply_accumulate=flag)
    reason = device.why_not_int8(GPU)
    assert "sub-groups of 8 lanes, such as Arc A770" in reason
    assert "oneDNN" in reason


def test_int8_is_refused_where_dpas_is_not_told_of(properties):
    properties(sub_group_sizes=[16, 32], has_subgroup_matrix_multiply_accumulate=False)
    assert "ocloc" in device.why_not_int8(GPU)


def test_what_torch_does_not_tell_of_a_device_is_no_reason(properties):
    properties()
    assert not device.why_not_int8(GPU)


def test_other_devices_and_the_interpreter_are_not_asked(properties, monkeypatch):
    asked = properties(sub_group_sizes=[8])
    assert not device.why_not_int8(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not device.why_not_int8(GPU)
    assert not asked


class Precision:
    def __init__(self, value="none"):
        self.fp32_precision = value


class Backend(Precision):
    """oneDNN's settings, as a build of torch for XPU has them."""

    def __init__(self):
        super().__init__()
        self.matmul, self.conv, self.allow_tf32 = Precision("tf32"), Precision(), True

    def told(self):
        return self.fp32_precision, self.matmul.fp32_precision, self.conv.fp32_precision, self.allow_tf32


@pytest.fixture
def onednn(monkeypatch):
    backend = Backend()
    monkeypatch.setattr(torch.backends, "mkldnn", backend)
    return backend


def test_float32_is_not_narrowed_inside_and_as_it_was_after(onednn):
    before = onednn.told()
    with device.exact(torch.bfloat16):
        assert onednn.told() == before
    with device.exact(torch.float32):
        assert onednn.told() == ("none", "ieee", "none", False)
    assert onednn.told() == before


def test_what_a_setting_has_from_above_it_has_from_there_again(onednn):
    onednn.fp32_precision = "tf32"
    with device.exact(torch.float32):
        assert onednn.matmul.fp32_precision == "ieee"
    assert onednn.matmul.fp32_precision == "none"


def test_settings_come_back_when_the_last_thread_is_out(onednn):
    before, first_in, first_may_go, first_out = onednn.told(), *(threading.Event() for _ in range(3))

    def first():
        with device.exact(torch.float32):
            first_in.set()
            first_may_go.wait(10)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(10)
    with device.exact(torch.float32):
        first_may_go.set()
        assert first_out.wait(10)
        assert onednn.told() == ("none", "ieee", "none", False)
    thread.join()
    assert onednn.told() == before


def test_settings_come_back_after_an_error(onednn):
    before = onednn.told()
    with pytest.raises(ZeroDivisionError), device.exact(torch.float32):
        _ = 1 / 0
    assert onednn.told() == before
