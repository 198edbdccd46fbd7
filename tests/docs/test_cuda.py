"""The page of the plugin `cuda` agrees with the plugin: what it serves, refuses and needs, and where it was built."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pages
import pytest
import torch
from packaging.requirements import Requirement

import qcore
from qcore.contracts import CONTRACTS
from qcore.explain import plain_request
from qcore.schemes import SCHEMES

pytest.importorskip("qcore_cuda")

from qcore_cuda import eligibility, plugin, probe

PAGE = pages.ROOT / "docs" / "cuda.md"
SOURCE = pages.ROOT / "plugins" / "cuda"
HOOKS = {"linear": plugin.qcore_linear, "conv2d": plugin.qcore_conv2d, "embedding": plugin.qcore_embedding}


@pytest.fixture(autouse=True)
def somewhere_with_a_gpu(monkeypatch):
    """Requests are judged as on a GPU that serves, with a Triton that compiles."""
    monkeypatch.setattr(eligibility, "why_not_device", lambda device: "")
    monkeypatch.setattr(eligibility, "triton_fault", lambda: "")


def rows(heading):
    return pages.rows(PAGE, heading)


def request(contract="linear", scheme="w8a16", **changes):
    made = plain_request(scheme, device="cuda", n=64, k=64, contract=contract)
    return replace(made, **changes)


def served():
    """(contract, scheme) to kernel, for every scheme of the kit."""
    answers = {(c, s): hook(request(c, s)) for c, hook in HOOKS.items() for s in SCHEMES}
    return {key: answer.kernel.name for key, answer in answers.items() if isinstance(answer, qcore.Offer)}


def test_every_scheme_that_is_served_stands_in_the_table_with_its_kernel():
    found = served()
    table = [
        (pages.named(contract), pages.named(schemes) or set(SCHEMES), pages.named(kernels))
        for contract, schemes, kernels in rows("What it serves")
    ]
    told = {(c, s): kernels for contracts, schemes, kernels in table for c in contracts for s in schemes}
    assert told.keys() == found.keys()
    assert not {key: name for key, name in found.items() if name not in told[key]}
    assert set().union(*told.values()) == set(found.values())
    assert set().union(*(contracts for contracts, _, _ in table)) == set(CONTRACTS)


REFUSED = {
    "a group size that is not a multiple of 32": request(scheme="w4a16-g48"),
    "float64 activations or results": request(x_dtype=torch.float64, out_dtype=torch.float64),
    "an int8 result of float activations": request(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8),
    "convolutions with int8 activations in more than 32 channel groups": replace(
        request("conv2d", "w8a8"), in_channels=33 * 16, out_channels=33 * 16, groups=33
    ),
    "convolutions with int8 activations in channel groups of other than a multiple of 16 output channels": replace(
        request("conv2d", "w8a8"), in_channels=8, out_channels=8, groups=8
    ),
    "convolutions with int8 activations and columns longer than 32768": replace(
        request("conv2d", "w8a8"), in_channels=8192, kernel_size=(3, 3)
    ),
}
ELSEWHERE = {
    "no GPU, or one that torch cannot use",
    f"Triton missing or older than {probe.TRITON}",
    f"compute capability below {'.'.join(map(str, eligibility.OLDEST))}",
}
"""Refused before a request is looked at; tests/cuda holds the reasons."""


@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_refused_stands_on_the_page(refused):
    asked = REFUSED[refused]
    answer = HOOKS[asked.contract](asked)
    assert isinstance(answer, qcore.Refusal), answer
    assert answer.reason


def test_the_table_of_refusals_is_what_is_tested():
    assert {row[0] for row in rows("What it refuses")} == {*REFUSED, *ELSEWHERE}


def test_the_requirements_are_those_of_the_distribution():
    text = (SOURCE / "pyproject.toml").read_text("utf-8")
    declared = {Requirement(line) for line in re.findall(r'^    "((?:torch|triton)[^"]+)"', text, re.MULTILINE)}
    told = pages.named(" ".join(cell for row in rows("Install") for cell in row))
    assert {f"{r.name}{r.specifier}" for r in declared} <= told
    assert f"triton>={probe.TRITON}" in told
    assert any(
        f"compute capability {'.'.join(map(str, eligibility.OLDEST))}" in cell
        for row in rows("Install")
        for cell in row
    )


def test_every_variable_that_the_plugin_reads_is_listed():
    source = "".join(path.read_text("utf-8") for path in (SOURCE / "src").rglob("*.py"))
    read = set(re.findall(r"\bQCORE_[A-Z]+(?:_[A-Z]+)*\b", source))
    assert read <= pages.named(" ".join(row[0] for row in rows("Environment and tuning")))


def test_kernels_named_by_rows_exist():
    source = "".join(path.read_text("utf-8") for path in (SOURCE / "src" / "qcore_cuda" / "kernels").glob("*.py"))
    kernels = pages.named(" ".join(cell for row in rows("Rows decide the kernel") for cell in row))
    assert len(kernels) >= 4
    assert not {name for name in kernels if f"def {name}(" not in source}


def test_every_target_that_is_compiled_is_listed(monkeypatch):
    monkeypatch.syspath_prepend(str(pages.ROOT / "tests" / "cuda"))
    from compiling import SHARED

    told = pages.sections(PAGE)["Where it has run"]
    assert not [target for target in SHARED if not re.search(rf"\b{target}\b", told)]
    assert set(re.findall(r"\b(?:sm_\d+|gfx\w+)\b", told)) == set(SHARED)
    sys.modules.pop("compiling")


def test_the_commands_have_the_options_that_are_shown():
    blocks = [block.body for block in pages.blocks(PAGE) if block.kind == "sh"]
    shown = re.findall(r"^python (\S+\.py) ([^#\n]*)", "".join(blocks), re.MULTILINE)
    assert len(shown) == 4
    for script, options in shown:
        source = (pages.ROOT / script).read_text("utf-8")
        assert not [option for option in re.findall(r"--[a-z-]+", options) if f'"{option}"' not in source], script
