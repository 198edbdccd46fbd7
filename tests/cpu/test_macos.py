"""The library for macOS on Arm, cross-compiled: it cannot run here, but it compiles and links."""

import subprocess
import sys

import cpu_driver
import pytest

pytest.importorskip("ziglang", reason="pip install ziglang")

FILES = ("core", "conv", "dispatch", "ops", "isa_generic", "isa_neon", "isa_neondot")


def test_it_compiles_and_links(tmp_path):
    library = tmp_path / "libqcore_cpu.dylib"
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos"]
    objects = []
    for name in FILES:  # every Arm processor of Apple's has dot products, so no file needs flags
        objects.append(str(tmp_path / f"{name}.o"))
        command = [*compiler, *cpu_driver.FLAGS, "-O0", "-c", str(cpu_driver.NATIVE / f"{name}.cpp")]
        subprocess.run([*command, "-o", objects[-1]], check=True, timeout=300)
    link = ["-shared", "-undefined", "dynamic_lookup", *objects, "-o", str(library)]
    subprocess.run([*compiler, *link], check=True, timeout=300)
    head = library.read_bytes()[:8]
    assert head == bytes.fromhex("cffaedfe0c000001")  # Mach-O of 64 bits for arm64
