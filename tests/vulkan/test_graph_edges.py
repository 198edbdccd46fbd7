"""Compiled models and numbers at the ends of their range."""

import pytest
import torch
from graph_edge_cases import EDGES, check_edge, check_large_constants, check_large_integers

from qcore_vulkan.graphs.backend import qcore_vulkan

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("name", EDGES)
def test_numbers_at_the_ends(name):
    tolerance = 8e-3 if name == "remainders" else 1e-6  # rounded to bfloat16 once
    check_edge(qcore_vulkan, *EDGES[name], tolerance)


@torch.no_grad()
def test_large_integers_run_in_torch():
    check_large_integers(qcore_vulkan)


@torch.no_grad()
def test_large_constants_run_in_torch():
    check_large_constants(qcore_vulkan)
