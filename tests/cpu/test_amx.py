"""The kernels for AMX with its tile instructions emulated in C++: the bits that this machine's own kernels give."""

from __future__ import annotations

import shutil

import cpu_driver
import pytest

from qcore_cpu import native

assert not native.fault()

AVX512 = ("-march=x86-64-v4", "-mavx512vnni")
BF16 = ("-mavx512bf16",) if "avx512bf16" in native.isas() else ()  # which every processor with tiles has
pytestmark = pytest.mark.skipif(
    "avx512vnni" not in native.isas() or not shutil.which("g++"), reason="takes AVX-512 VNNI and g++"
)


def test_tiles_give_the_same_bits(tmp_path):
    # The others are there for the linker alone: quickly compiled.
    files = {"isa_generic": ("-O0",), "isa_amxint8": (*AVX512, *BF16)}
    files |= dict.fromkeys(("core", "conv", "fp8", "panels", "planes", "transpose", "dispatch"), ())
    avx2 = ("-O0", "-mavx2", "-mfma", "-mf16c")
    files |= {"isa_avx2": avx2, "isa_avxvnni": (*avx2, "-mavxvnni"), "isa_avx512vnni": ("-O0", *AVX512)}
    files |= {"isa_avx512bf16": ("-O0", *AVX512, "-mavx512bf16")}
    driver = cpu_driver.build(tmp_path, "g++", files, "-DQCORE_AMX_EMULATED")
    # Row counts below, at and above a tile and two, for one, two and three digits.
    shapes = ((12, 77, 33), (16, 200, 40), (17, 576, 32), (33, 136, 65), (45, 64, 96))
    cpu_driver.check([str(driver)], "amxint8", tmp_path, list(cpu_driver.problems(shapes)))
    cpu_driver.check([str(driver)], "amxint8", tmp_path, list(cpu_driver.fp8()), summed=True)
    # Windows of convolutions: lines, width, channels, results; short lines together, and steps too few for tiles.
    images = ((4, 13, 64, 33), (3, 40, 32, 64), (6, 7, 96, 40), (2, 50, 40, 20), (2, 20, 12, 70))
    # Several blocks of rows, the last of which is shorter, or too short for tiles; results in one vector of columns.
    images += ((5, 19, 64, 16), (1, 100, 32, 4), (2, 70, 96, 48))
    cpu_driver.check([str(driver)], "amxint8", tmp_path, list(cpu_driver.convolutions(images)))
    groups = ((5, 9, 36, 4), (4, 23, 40, 8), (3, 6, 48, 16), (4, 9, 20, 1))
    cpu_driver.check([str(driver)], "amxint8", tmp_path, list(cpu_driver.depthwise(groups)))
