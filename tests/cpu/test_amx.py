"""The kernels for AMX with its tile instructions emulated in C++: the bits that this machine's own kernels give."""

from __future__ import annotations

import shutil

import cpu_driver
import pytest

from qcore_cpu import native

assert not native.fault()

AVX512 = ("-march=x86-64-v4", "-mavx512vnni")
pytestmark = pytest.mark.skipif(
    "avx512vnni" not in native.isas() or not shutil.which("g++"), reason="takes AVX-512 VNNI and g++"
)


def test_tiles_give_the_same_bits(tmp_path):
    files = dict.fromkeys(("isa_generic", "core", "conv", "dispatch"), ())
    for name in ("avx2", "avxvnni"):
        files[f"isa_{name}"] = ("-mavx2", "-mfma", "-mf16c", *(("-mavxvnni",) if name == "avxvnni" else ()))
    files |= {"isa_avx512vnni": AVX512, "isa_avx512bf16": (*AVX512, "-mavx512bf16"), "isa_amxint8": AVX512}
    driver = cpu_driver.build(tmp_path, "g++", files, "-DQCORE_AMX_EMULATED")
    # Row counts below, at and above a tile and two, for one, two and three digits.
    shapes = ((12, 77, 33), (16, 200, 40), (17, 576, 32), (33, 136, 65), (45, 64, 96))
    cpu_driver.check([str(driver)], "amxint8", tmp_path, list(cpu_driver.problems(shapes)))
