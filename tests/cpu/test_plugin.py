"""What the plugin offers and refuses, and how it shows."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import qcore
from qcore_cpu import eligibility, native


def test_layers_on_a_cpu_take_it():
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 96), torch.nn.Linear(96, 8)).bfloat16()
    report = qcore.quantize_(model, {"0": "w8a16", "1": "w4a16-g32", "2": "w8a8"})
    assert report.kernels() == {"cpu.embedding": 1, "cpu.linear": 2}
    conv = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3), torch.nn.Conv2d(32, 32, 3, groups=32), torch.nn.Conv2d(32, 64, 1)
    )
    assert qcore.quantize_(conv, "w8a8").kernels() == {"cpu.conv2d": 3}


@pytest.mark.parametrize(
    ("model", "scheme", "reason"),
    [
        (torch.nn.Conv2d(16, 16, 3), "wfp8afp8", "convolutions with fp8 activations have no CPU kernel"),
        (
            torch.nn.Conv2d(64, 16, 3, groups=16),
            "w8a16",
            "4 input and 1 output channels in each of 16 groups leave some",
        ),
    ],
)
def test_what_is_refused_says_why(model, scheme, reason):
    holder = torch.nn.Sequential(model)
    qcore.quantize_(holder, scheme)
    assert holder[0].decision.kernel.name.startswith("torch.")
    assert reason in str(holder[0].decision)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-aasym", "w8a8-g16"])
def test_every_convolution_of_int8_activations_is_served(scheme):
    for inputs, outputs, groups in ((64, 64, 4), (72, 64, 4), (128, 64, 4), (3, 5, 1), (64, 128, 32)):
        for kernel in (1, 3):
            layer = torch.nn.Sequential(torch.nn.Conv2d(inputs, outputs, kernel, groups=groups))
            assert qcore.quantize_(layer, scheme).kernels() == {"cpu.conv2d": 1}


def test_float64_is_left_to_torch():
    parsed = qcore.Scheme.parse("w8a16")
    double = torch.float64
    request = qcore.LinearRequest(
        torch.device("cpu"), double, double, 32, 64, None, parsed.weight, None, None, False, False
    )
    assert "of dtype float64 have no kernel here" in eligibility.why_not(request)


def test_index_outside_the_table_is_an_index_error():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 64))
    qcore.quantize_(model, "w8a16")
    for index in (-1, 10):
        with pytest.raises(IndexError, match="indices span"):
            model(torch.tensor([index]))


def test_compiled_model_equals_eager():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8))
    qcore.quantize_(model, "w4a16-g32")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 64)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))


def test_doctor_names_the_instruction_sets():
    done = subprocess.run(
        [sys.executable, "-m", "qcore", "doctor"], capture_output=True, text=True, timeout=120, check=False
    )
    assert f"isa={native.isas()[0]} of {' '.join(native.isas())}" in re.sub(r"\s+", " ", done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_library_needs_c_symbols_of_torch_alone():
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", str(native.library())], capture_output=True, text=True, timeout=60, check=True
    )
    wanted = [line.split()[-1] for line in done.stdout.splitlines()]
    of_torch = [name for name in wanted if "torch" in name]
    assert of_torch
    assert all(re.fullmatch(r"(aoti_)?torch_\w+", name) for name in of_torch)
    assert not [name for name in wanted if re.match(r"_ZN?K?(2at|3c10|5torch)", name)]
    needed = subprocess.run(
        ["readelf", "-d", str(native.library())], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "libgomp" not in needed  # torch's own threads, whose OpenMP must not be there twice


def test_one_openmp_is_mapped():
    code = (
        "import torch, qcore\n"
        "m = torch.nn.Sequential(torch.nn.Linear(64, 64)); qcore.quantize_(m, 'w8a8'); m(torch.ones(64, 64))\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'libomp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("/") == 0 or len(eval(done.stdout)) == 1


def test_fork_after_use_works():
    code = (
        "import os, torch, qcore\n"
        "m = torch.nn.Sequential(torch.nn.Linear(64, 64)); qcore.quantize_(m, 'w8a8')\n"
        "x = torch.ones(3, 64); y = m(x)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    os._exit(0 if torch.equal(m(x), y) else 3)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
