"""The page of the plugin `xla` agrees with the plugin: what it serves, refuses and reads."""

from __future__ import annotations

import pages
import pytest
import torch
from plugin_page import PluginPage, request

import qcore

pytest.importorskip("qcore_xla")

from qcore_xla import calls, environment, plugin
from qcore_xla.engines import base


@pytest.fixture(autouse=True)
def somewhere_with_jax(monkeypatch):
    """Requests are judged as on a machine where JAX serves CPU tensors."""
    monkeypatch.setattr(environment, "why_not", lambda kind, *rest: "" if kind == "cpu" else "no backend for it")


REFUSED = {
    "tensors on a device without an engine": request(device=torch.device("meta")),
    "CUDA tensors if JAX has no GPU backend": request(device=torch.device("cuda")),
    "float64 activations or results": request(x_dtype=torch.float64, out_dtype=torch.float64),
    "int8 activations with weights that are no integers": request(scheme="wfp8a16", activation=qcore.DynamicInt8()),
    "fp8 activations in groups of another size than the weight's": request(
        scheme="wfp8afp8-g128", activation=qcore.DynamicFP8(64)
    ),
    "an int8 result of float activations": request(output=qcore.OutputInt8(1.0, 0), out_dtype=torch.int8),
}
ELSEWHERE = {
    "a process in which JAX would take most of the GPU's memory at its first use",
    "a process whose `JAX_PLATFORMS` leaves the tensors' platform out",
    "tensors on a TPU's machine if JAX would take the TPU away from torch_tpu or torch_xla",
    "int8 activations on TPU v4 and TPU7x, which multiply no int8",
}
"""Refused by the environment; tests/xla/test_environment.py holds the reasons."""


class TestPage(PluginPage):
    name, hooks, refused, elsewhere = "xla", plugin, REFUSED, ELSEWHERE

    def test_every_variable_of_jax_that_decides_is_listed(self):
        told = self.told("Environment and tuning", slice(1))
        assert {environment.PLATFORMS, environment.PREALLOCATE, *environment.FRACTIONS} <= told

    def test_every_device_with_an_engine_is_listed(self):
        told = self.told("Devices and engines", slice(1, 2))
        assert told == {kind for kind in base.MODULES if base.find(kind)}
        assert self.told("Devices and engines", slice(1)) == {base.MODULES[kind] for kind in told}

    def test_the_requirements_are_those_of_the_distribution(self):
        told = self.told("Install", slice(1))
        assert set(self.dependencies().values()) == told
        assert f"jax>={environment.JAX}" in told

    def test_the_figures_for_shapes_are_those_of_the_code(self):
        text = pages.sections(self.page)["Compilation"] + pages.sections(self.page)["Memory"]
        assert [calls.bucket(rows) for rows in (1, 5, 17)] == [4, 16, 32]
        assert f"longer than {calls.MOST_ROWS} rows" in text
        of = calls.plan(65, 129, 4, 128)
        assert (of.rows, of.columns) == (128, 256)
        assert "N to a multiple of 64 and K to one of 128" in text
