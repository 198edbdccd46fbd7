"""The kernels for Arm, cross-compiled and run by qemu: the bits that this machine's own kernels give.

A processor without an instruction ends a program with SIGILL in qemu as it would in silicon, so dispatch is tested too.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

import qcore
from qcore_cpu import native

assert not native.fault()

from qcore_cpu import ops  # noqa: E402 - the ops exist once the library is loaded
from qcore_cpu.kinds import Kind, Mode, needs_sums  # noqa: E402
from qcore_cpu.layout import WeightLayout  # noqa: E402

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NATIVE = Path(__file__).parents[2] / "plugins" / "cpu" / "native"
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-w", f"-I{NATIVE}")

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason="apt-get install g++-aarch64-linux-gnu qemu-user"
)

SCHEMES = ("w4a16-g32-asym", "w8a16", "w4a16-g128-fzp", "mxfp4", "w8a8", "w4a8-g32-asym-aasym", "w8a8-static(0.05,3)")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm")
    built = []
    for name in ("isa_generic", "isa_neon", "isa_neondot", "core", "conv", "dispatch"):
        flags = ["-march=armv8.2-a+dotprod"] if name == "isa_neondot" else []
        target = folder / f"{name}.o"
        built.append((target, [COMPILER, *FLAGS, *flags, "-c", str(NATIVE / f"{name}.cpp"), "-o", str(target)]))
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _, command in built]
    for process in running:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors.decode()
    program = folder / "driver"
    objects = [str(target) for target, _ in built]
    source = str(Path(__file__).with_name("arm_driver.cpp"))
    subprocess.run([COMPILER, *FLAGS, source, *objects, "-static", "-o", str(program)], check=True, timeout=300)
    return program


def problems():
    """Each as the bytes of the driver's input, and the result that it must write."""
    generator = torch.Generator().manual_seed(7)
    for scheme in SCHEMES:
        parsed = qcore.Scheme.parse(scheme)
        for rows, k, n in ((1, 77, 33), (5, 200, 40), (9, 576, 32)):
            dense = torch.randn(n, k, generator=generator) * 0.05 + 0.03
            quantizer = "absmax" if parsed.weight.zero is qcore.ZeroPoint.NONE else "minmax"
            weight = qcore.quantize(dense, parsed.weight, quantizer)
            layout = WeightLayout(weight.format, n, k, sums=needs_sums(parsed.activation))
            packed, mode = layout.pack(weight), Mode.of(parsed.activation)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x = (torch.randn(rows, k, generator=generator) + 0.3).to(dtype)
                yield _input(layout, packed, mode, x), _expected(layout, packed, mode, x)


def _input(layout, packed, mode, x):
    offset = 12 if layout.kind is Kind.HALVES4 else layout.kind.offset
    scale_type = 4 if packed["scale"].dtype == torch.uint8 else ops.TYPES[packed["scale"].dtype]
    numbers = (
        layout.n, layout.k, layout.at.group, int(layout.kind), int(mode), offset, scale_type, ops.TYPES[x.dtype],
        x.shape[0], 3,
    )  # fmt: skip
    _, scale, zero, added, sums, table, _ = layout.arguments(packed)
    parts = (x, packed["data"], scale, zero, added, sums, table)
    blobs = [b"" if t is None else bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in parts]
    return struct.pack("10q", *numbers) + b"".join(struct.pack("q", len(blob)) + blob for blob in blobs)


def _expected(layout, packed, mode, x):
    arguments = (*layout.numbers, int(mode), layout.divides, 0.05, 3, 1.0, 0, ops.TYPES[x.dtype])
    return ops.linear(x, *layout.arguments(packed), None, None, None, None, None, *arguments)


@pytest.mark.parametrize(
    ("processor", "isa"),
    [("max", "neondot"), ("cortex-a76", "neondot"), ("cortex-a53", "neon"), ("cortex-a53", "generic")],
)
def test_arm_gives_the_same_bits(driver, processor, isa, tmp_path):
    made = list(problems())
    given, written = tmp_path / "in", tmp_path / "out"
    given.write_bytes(struct.pack("q", len(made)) + b"".join(data for data, _ in made))
    run = [EMULATOR, "-cpu", processor, str(driver), isa, str(given), str(written)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results, at = written.read_bytes(), 0
    for _, expected in made:
        size = expected.numel() * expected.element_size()
        raw = torch.frombuffer(bytearray(results[at : at + size]), dtype=expected.dtype).view(expected.shape)
        at += size
        # bfloat16 and 4 bits run on products of bfloat16 here, where the processor has them.
        close = torch.allclose(raw.float(), expected.float(), rtol=0.02, atol=0.02)
        assert torch.equal(raw, expected) if expected.dtype != torch.bfloat16 else close
    assert at == len(results)


def test_dispatch_refuses_what_the_processor_lacks(driver, tmp_path):
    run = [EMULATOR, "-cpu", "cortex-a53", str(driver), "neondot", str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (3, "neondot is not one of: neon generic")
