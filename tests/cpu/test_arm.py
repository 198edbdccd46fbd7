"""The kernels for Arm, cross-compiled and run by qemu: the bits that this machine's own kernels give.

A processor without an instruction ends a program with SIGILL in qemu as it would in silicon, so dispatch is tested too.
"""

from __future__ import annotations

import shutil
import subprocess

import cpu_driver
import pytest

from qcore_cpu import native

assert not native.fault()

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason="apt-get install g++-aarch64-linux-gnu qemu-user"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    files = dict.fromkeys(
        ("isa_generic", "isa_neon", "core", "conv", "fp8", "panels", "planes", "transpose", "dispatch"), ()
    )
    files["isa_neondot"] = ("-march=armv8.2-a+dotprod",)
    files["isa_neoni8mm"] = ("-march=armv8.2-a+dotprod+i8mm",)
    return cpu_driver.build(tmp_path_factory.mktemp("arm"), COMPILER, files)


@pytest.mark.parametrize(
    ("processor", "isa"),
    [
        ("max", "neoni8mm"),
        ("max", "neondot"),
        ("cortex-a76", "neondot"),
        ("cortex-a53", "neon"),
        ("cortex-a53", "generic"),
    ],
)
def test_arm_gives_the_same_bits(driver, processor, isa, tmp_path):
    cpu_driver.check([EMULATOR, "-cpu", processor, str(driver)], isa, tmp_path, list(cpu_driver.problems()))
    cpu_driver.check([EMULATOR, "-cpu", processor, str(driver)], isa, tmp_path, list(cpu_driver.fp8()), summed=True)


def test_arm_instruction_sets_give_each_other_s_bits(driver, tmp_path):
    # Every tile: 1 to 12 digit rows, of 1 to 3 digits; tails of columns and of pairs of rows; convolutions.
    shapes = (*((rows, 23 * rows + 9, 40) for rows in range(1, 14)), (25, 1040, 96), (133, 64, 32), (40, 72, 7))
    images = (*cpu_driver.convolutions(), *cpu_driver.planes(), *cpu_driver.depthwise())
    made = [*cpu_driver.problems(shapes), *images]
    written = {}
    for isa in ("neoni8mm", "neondot", "neon", "generic"):
        cpu_driver.check([EMULATOR, "-cpu", "max", str(driver)], isa, tmp_path, made)
        written[isa] = (tmp_path / "out").read_bytes()
    assert all(results == written["generic"] for results in written.values())


@pytest.mark.parametrize(
    ("processor", "isa", "present"),
    [
        ("max", "sse9", "neoni8mm neondot neon generic"),
        ("cortex-a76", "neoni8mm", "neondot neon generic"),
        ("cortex-a53", "neondot", "neon generic"),
    ],
)
def test_dispatch_refuses_what_the_processor_lacks(driver, processor, isa, present, tmp_path):
    run = [EMULATOR, "-cpu", processor, str(driver), isa, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (3, f"{isa} is not one of: {present}")
