"""The page of the plugin `cuda` agrees with the plugin: what it serves, refuses and needs, and where it was built."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial

import pages
import pytest
import torch
from plugin_page import PluginPage, request

import qcore
from qcore.formats import register_element
from qcore.weights.schemes import TABLE_SCHEMES

pytest.importorskip("qcore_cuda")

from qcore_cuda import eligibility, plugin, probe


@pytest.fixture(autouse=True)
def somewhere_with_a_gpu(monkeypatch):
    """Requests are judged as on a GPU that serves, with a Triton that compiles."""
    monkeypatch.setattr(eligibility, "why_not_device", lambda device: "")
    monkeypatch.setattr(eligibility, "triton_fault", lambda: "")


for element in (
    qcore.Element.table("table_of_256", [float(i) for i in range(256)]),
    qcore.Element.table("table_of_tiny", [2.0**-i for i in range(16)]),
):
    register_element(element)

on_gpu = partial(request, device=torch.device("cuda"))

REFUSED = {
    "a group size that is not a multiple of 32, but for 16 of fp4 with e4m3 scales and, for linear layers with float "
    "activations and float scales, any even one up to 512": on_gpu(scheme="w4a16-g47"),
    "tables of more than four bits other than fp8 and fp8_e5m2": on_gpu(scheme="wtable_of_256a16"),
    "tables with values that float16 cannot hold": on_gpu(scheme="wtable_of_tinya16"),
    "convolutions with fp8 activations": on_gpu("conv2d", "wfp8afp8"),
    "float64 activations or results": on_gpu(x_dtype=torch.float64, out_dtype=torch.float64),
    "an int8 result of float activations": on_gpu(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8),
    "convolutions with int8 activations in channel groups with columns longer than 4096, unless there are at most 32 "
    "groups, each with a multiple of 16 output channels": replace(
        on_gpu("conv2d", "w8a8"), in_channels=2 * 4097, out_channels=16, groups=2
    ),
    "convolutions with int8 activations and columns longer than 32768": replace(
        on_gpu("conv2d", "w8a8"), in_channels=8192, kernel_size=(3, 3)
    ),
}
ELSEWHERE = {
    "no GPU, or one that torch cannot use",
    f"Triton missing or older than {probe.TRITON}",
    f"compute capability below {'.'.join(map(str, eligibility.OLDEST))}",
}
"""Refused before a request is looked at; tests/cuda holds the reasons."""


class TestPage(PluginPage):
    name, hooks, device, refused, elsewhere = "cuda", plugin, "cuda", REFUSED, ELSEWHERE

    def test_the_requirements_are_those_of_the_distribution(self):
        declared, told = self.dependencies(), self.told("Install")
        assert {declared["torch"], declared["triton"]} <= told
        assert f"triton>={probe.TRITON}" in told
        assert any(
            f"compute capability {'.'.join(map(str, eligibility.OLDEST))}" in cell
            for row in self.rows("Install")
            for cell in row
        )

    def test_tables_stand_on_the_page_with_their_kernels(self):
        rows = [
            (pages.named(schemes), pages.named(kernels)) for schemes, kernels in self.rows("Tables and fp8 activations")
        ]
        found = {scheme: self.answer(on_gpu(scheme=scheme)).kernel.name for scheme in TABLE_SCHEMES}
        assert set().union(*(schemes for schemes, _ in rows)) == set(TABLE_SCHEMES)
        assert all({found[scheme] for scheme in schemes} == kernels for schemes, kernels in rows)
        assert isinstance(self.answer(on_gpu("embedding", "nvfp4")), qcore.Offer)

    def test_kernels_named_by_rows_exist(self):
        files = (pages.ROOT / "plugins").glob("*/src/**/kernels/*.py")  # some are shared with other plugins
        source = "".join(path.read_text("utf-8") for path in files)
        kernels = self.told("Kernels by number of rows")
        assert len(kernels) >= 4
        assert not {name for name in kernels if f"def {name}(" not in source}

    def test_every_target_that_is_compiled_is_listed(self, monkeypatch):
        monkeypatch.syspath_prepend(str(pages.ROOT / "tests" / "cuda"))
        from compiling import SHARED

        told = pages.sections(self.page)["Tested hardware"]
        assert not [target for target in SHARED if not re.search(rf"\b{target}\b", told)]
        assert set(re.findall(r"\b(?:sm_\d+|gfx\w+)\b", told)) == set(SHARED)
        sys.modules.pop("compiling")

    def test_the_commands_have_the_options_that_are_shown(self):
        blocks = [block.body for block in pages.blocks(self.page) if block.kind == "sh"]
        shown = re.findall(r"^python (\S+\.py) ([^#\n]*)", "".join(blocks), re.MULTILINE)
        assert len(shown) == 7
        for script, options in shown:
            source = (pages.ROOT / script).read_text("utf-8")
            assert not [option for option in re.findall(r"--[a-z-]+", options) if f'"{option}"' not in source], script
