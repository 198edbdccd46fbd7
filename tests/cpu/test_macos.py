"""The library for macOS on Arm, cross-compiled: it cannot run here, but it compiles and links."""

import subprocess
import sys

import cpu_driver
import pytest

pytest.importorskip("ziglang", reason="pip install ziglang")

# Every Arm processor of Apple's has dot products: one file needs flags. Zig takes the name of a processor.
SHARED = ("core", "conv", "dispatch", "fp8", "host", "ops", "pages", "panels", "planes", "program", "transpose")
FILES = dict.fromkeys((*SHARED, "isa_generic", "isa_neon", "isa_neondot"), ())
FILES["isa_neoni8mm"] = ("-mcpu=apple_m2",)


def test_it_compiles_and_links(tmp_path):
    library = tmp_path / "libqcore_cpu.dylib"
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos"]
    objects = []
    for name, flags in FILES.items():
        objects.append(str(tmp_path / f"{name}.o"))
        command = [*compiler, *cpu_driver.FLAGS, "-O0", "-c", str(cpu_driver.NATIVE / f"{name}.cpp")]
        subprocess.run([*command, *flags, "-o", objects[-1]], check=True, timeout=900)
    link = ["-shared", "-undefined", "dynamic_lookup", *objects, "-o", str(library)]
    subprocess.run([*compiler, *link], check=True, timeout=900)  # the first builds the C++ library, too
    head = library.read_bytes()[:8]
    assert head == bytes.fromhex("cffaedfe0c000001")  # Mach-O of 64 bits for arm64
