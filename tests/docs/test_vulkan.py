"""The page of the plugin `vulkan` agrees with the plugin: what it serves, refuses and reads."""

from __future__ import annotations

import re
from dataclasses import replace

import pages
import pytest
import torch

import qcore
from qcore.contracts import CONTRACTS
from qcore.explain import plain_request
from qcore.schemes import SCHEMES

pytest.importorskip("qcore_vulkan")

from qcore_vulkan import plugin

PAGE = pages.ROOT / "docs" / "vulkan.md"
SOURCE = pages.ROOT / "plugins" / "vulkan"
HOOKS = {"linear": plugin.qcore_linear, "conv2d": plugin.qcore_conv2d, "embedding": plugin.qcore_embedding}


def request(contract="linear", scheme="w8a16", **changes):
    return replace(plain_request(scheme, n=64, k=64, contract=contract), **changes)


def served():
    """(contract, scheme) to kernel, for every scheme of the kit."""
    answers = {(c, s): hook(request(c, s)) for c, hook in HOOKS.items() for s in SCHEMES}
    return {key: answer.kernel.name for key, answer in answers.items() if isinstance(answer, qcore.Offer)}


def test_every_scheme_that_is_served_stands_in_the_table_with_its_kernel():
    found = served()
    table = [
        (pages.named(contract), pages.named(schemes) or set(SCHEMES), pages.named(kernels))
        for contract, schemes, kernels in pages.rows(PAGE, "What it serves")
    ]
    told = {(c, s): kernels for contracts, schemes, kernels in table for c in contracts for s in schemes}
    assert told.keys() == found.keys()
    assert not {key: name for key, name in found.items() if name not in told[key]}
    assert set().union(*told.values()) == set(found.values())
    assert set().union(*(contracts for contracts, _, _ in table)) == set(CONTRACTS)


REFUSED = {
    "tensors on another device than the CPU": request(device=torch.device("cuda")),
    "float64 activations or results": request(x_dtype=torch.float64, out_dtype=torch.float64),
    "an int8 result of float activations": request(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8),
    "a group of more than 16384 codes that is no multiple of 32": request(
        weight=qcore.Format("int8", 32771), k=1 << 16
    ),
    "rows that are longer than a buffer of the device": request(k=1 << 31),
    "a convolution in channel groups whose weight does not fit into one buffer": replace(
        request("conv2d"), in_channels=1 << 18, out_channels=1 << 18, groups=2
    ),
    "a convolution with a stride, padding or dilation above 65535": replace(request("conv2d"), stride=(1 << 16, 1)),
}
ELSEWHERE = {"no loader, no driver, no device that has what the shaders need"}
"""Refused before a request is looked at; tests/vulkan/test_probe.py holds the reasons."""


@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_refused_stands_on_the_page(refused):
    asked = REFUSED[refused]
    answer = HOOKS[asked.contract](asked)
    assert isinstance(answer, qcore.Refusal), answer
    assert answer.reason


def test_the_table_of_refusals_is_what_is_tested():
    assert {row[0] for row in pages.rows(PAGE, "What it refuses")} == {*REFUSED, *ELSEWHERE}


def test_every_variable_that_the_plugin_reads_is_listed():
    source = "".join(path.read_text("utf-8") for path in (SOURCE / "src").rglob("*.py"))
    read = set(re.findall(r"\bQCORE_[A-Z]+(?:_[A-Z]+)*\b", source))
    assert read <= pages.named(" ".join(row[0] for row in pages.rows(PAGE, "Environment and tuning")))


def test_the_functional_ops_that_are_named_exist():
    named = pages.named(pages.sections(PAGE)["What it serves"].split("The\n[functional ops]")[1])
    ops = {name for name in named if name.startswith(("linear_", "conv2d_", "embedding_"))}
    assert len(ops) == 7
    assert all(hasattr(torch.ops.qcore, name) for name in ops)
