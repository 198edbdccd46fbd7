"""Kernels in Triton's interpreter, for conftests and tests of the plugins that have some.

It has to be chosen before Triton is imported: importing this module does so, if that is still possible.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

from qcore.weights.activations import dynamic_parameters, quantize_int8

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def interpreter():
    """Triton's interpreter; a test that launches kernels asks for it."""
    triton = pytest.importorskip("triton")
    # `pytest tests/cuda` chooses it in time; another start may have imported Triton before this file.
    assert triton.knobs.runtime.interpret, "triton was imported without TRITON_INTERPRET=1; run pytest on this folder"
    return triton


def assert_codes(actual, x, scale, zero):
    """The same codes, but next to a tie: the interpreter's multiply-add rounds twice, a GPU's once."""
    expected = quantize_int8(x, scale, zero)
    off = actual[:, : x.shape[1]].int() - expected.int()
    steps = x.float() / scale
    tie = ((steps - steps.floor()) - 0.5).abs() < 2.0**-12
    assert not (off.abs() > tie).any()


def assert_dynamic(codes, x, symmetric):
    """Codes, padding, parameters and sums of x, each row by its own range, as the formulas have them."""
    (m, k), (scale, zero) = x.shape, dynamic_parameters(x, symmetric)
    assert torch.equal(codes.scale, scale.flatten())
    assert (codes.zero is None) == symmetric
    assert symmetric or torch.equal(codes.zero, zero.flatten())
    assert codes.q.shape == (m, -(-k // 128) * 128)
    assert_codes(codes.q, x, scale, zero)
    assert not codes.q[:, k:].any()
    assert codes.total.dtype == torch.int32
    assert torch.equal(codes.total, codes.q.sum(1, dtype=torch.int32))
