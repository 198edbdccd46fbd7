"""The page of the plugin `xla` agrees with the plugin: what it serves, refuses and reads."""

from __future__ import annotations

import re
from dataclasses import replace

import pages
import pytest
import torch
from packaging.requirements import Requirement

import qcore
from qcore.contracts import CONTRACTS
from qcore.explain import plain_request
from qcore.schemes import SCHEMES

pytest.importorskip("qcore_xla")

from qcore_xla import calls, environment, plugin
from qcore_xla.engines import base

PAGE = pages.ROOT / "docs" / "xla.md"
SOURCE = pages.ROOT / "plugins" / "xla"
HOOKS = {"linear": plugin.qcore_linear, "conv2d": plugin.qcore_conv2d, "embedding": plugin.qcore_embedding}


@pytest.fixture(autouse=True)
def somewhere_with_jax(monkeypatch):
    """Requests are judged as on a machine where JAX serves CPU tensors."""
    monkeypatch.setattr(environment, "why_not", lambda kind, *rest: "" if kind == "cpu" else "no backend for it")


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
    "tensors on a device without an engine": request(device=torch.device("meta")),
    "CUDA tensors where JAX has no GPU backend": request(device=torch.device("cuda")),
    "float64 activations or results": request(x_dtype=torch.float64, out_dtype=torch.float64),
    "an int8 result of float activations": request(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8),
}
ELSEWHERE = {
    "a process in which JAX would take most of the GPU's memory at its first use",
    "a process whose `JAX_PLATFORMS` leaves the tensors' platform out",
    "tensors on a TPU's machine where JAX would take the TPU away from torch_tpu or torch_xla",
    "int8 activations on TPU v4 and TPU7x, which multiply no int8",
}
"""Refused by the environment; tests/xla/test_environment.py holds the reasons."""


@pytest.mark.parametrize("refused", REFUSED)
def test_what_is_refused_stands_on_the_page(refused):
    asked = REFUSED[refused]
    answer = HOOKS[asked.contract](asked)
    assert isinstance(answer, qcore.Refusal), answer
    assert answer.reason


def test_the_table_of_refusals_is_what_is_tested():
    assert {row[0] for row in pages.rows(PAGE, "What it refuses")} == {*REFUSED, *ELSEWHERE}


def test_every_variable_that_the_plugin_reads_is_listed():
    told = pages.named(" ".join(row[0] for row in pages.rows(PAGE, "Environment and tuning")))
    assert {environment.PLATFORMS, environment.PREALLOCATE, *environment.FRACTIONS} <= told
    source = "".join(path.read_text("utf-8") for path in (SOURCE / "src").rglob("*.py"))
    assert set(re.findall(r"\bQCORE_[A-Z]+(?:_[A-Z]+)*\b", source)) <= told


def test_every_device_with_an_engine_is_listed():
    told = {kind for row in pages.rows(PAGE, "Which tensors") for kind in pages.named(row[1])}
    assert told == {kind for kind in base.MODULES if base.find(kind)}
    assert {name for row in pages.rows(PAGE, "Which tensors") for name in pages.named(row[0])} == {
        base.MODULES[kind] for kind in told
    }


def test_the_requirements_are_those_of_the_distribution():
    text = (SOURCE / "pyproject.toml").read_text("utf-8")
    (line,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    declared = {Requirement(name.strip(' "')) for name in line.split(",") if "qcore" not in name}
    told = pages.named(" ".join(row[0] for row in pages.rows(PAGE, "Install")))
    assert {f"{r.name}{r.specifier}" for r in declared} == told
    assert f"jax>={environment.JAX}" in told


def test_the_figures_for_shapes_are_those_of_the_code():
    text = pages.sections(PAGE)["What is compiled, and when"] + pages.sections(PAGE)["Memory"]
    assert [calls.bucket(rows) for rows in (1, 5, 17)] == [4, 16, 32]
    assert f"longer than {calls.MOST_ROWS} rows" in text
    of = calls.plan(65, 129, 4, 128)
    assert (of.rows, of.columns) == (128, 256)
    assert "N to a multiple of 64 and K to one of 128" in text
