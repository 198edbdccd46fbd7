"""The kernels of qcore-xpu as they are, with torch's three ops for XPU computed by Intel's runtimes on the CPU.

Proven: what the plugin packs and how it calls the ops (padded groups, scales split and levelled, FLOAT zero points
turned into whole numbers and a rest, bias, corrections of zero points) gives the contract's numbers when the op behind
it is oneDNN, told what torch tells it; and with a kernel of our own in OpenCL, that shares no code with oneDNN.

Not proven: that torch for XPU passes the call on as its sources say; the GPU kernels of oneDNN, float16 arithmetic and
speed. The constraints of the ops are checked by the stand-in of tests/xpu as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import xpu_peers_opencl as opencl
import xpu_peers_ops as ops
from xpu_peers_problems import INT4, made, problems, transposed

from qcore.contracts import LINEAR
from qcore_xpu import aten, int32, linear

NARROW = (torch.bfloat16, torch.float16)
INT4_PEERS = {"oneDNN": ops.int4_mm, "OpenCL": partial(opencl.int4_mm, "by_sub_groups")}
PACKED = (*INT4, "w4a16-g32-fzp", "w4a16-fzp", "w4a16-g128-fzp", "w4a16-g20-asym", "w4a16-g48-fzp")
"""The last two are groups that are padded, besides the ragged ones that every scheme's cases hold."""


@pytest.fixture
def on_peers(monkeypatch):
    """Put peers in the place of torch's ops for XPU, which this build of torch has none of."""

    def put(**peers):
        monkeypatch.setattr(aten, "missing", lambda name: "")
        for name in ("int4_mm", "int8_mm", "int_mm"):
            monkeypatch.setattr(aten, name, peers.get(name, forbidden))

    return put


def forbidden(*arguments):
    raise AssertionError("a kernel called another op than its own")


def computed(problem):
    """The result of the plugin's kernel for a problem; None where it has none on torch's ops."""
    if not linear.has_op(problem.request):
        return None
    kernel = linear.kernel(problem.request)
    return kernel(problem.x, kernel.pack(problem.weight), problem.bias, **problem.given)


@pytest.mark.parametrize("peer", INT4_PEERS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scheme", PACKED)
def test_int4(scheme, dtype, peer, on_peers, record, seed):
    """Every case of the contract with fresh random numbers, biases, leading dimensions and strides included."""
    on_peers(int4_mm=INT4_PEERS[peer])
    for name, problem in problems(scheme, dtype, seed):
        y = computed(problem)
        assert y is not None, f"{name}: no kernel"
        record.judge(f"qcore-xpu int4 on {peer}, {dtype}", name, problem, y, seed)


@pytest.mark.parametrize("dtype", NARROW)
def test_int8_weights(dtype, on_peers, record, seed):
    """``w8a16`` on `_weight_int8pack_mm`."""
    on_peers(int8_mm=ops.int8_mm)
    for name, problem in problems("w8a16", dtype, seed):
        y = computed(problem)
        assert y is not None, f"{name}: no kernel"
        record.judge(f"qcore-xpu w8a16 on oneDNN, {dtype}", name, problem, y, seed)


INT8 = ("w8a8", "w8a8-asym", "w8a8-fzp", "w8a8-aasym", "w8a8-asym-aasym", "w8a8-static", "w8a8-o8", "w8a8-static-o8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", INT8)
def test_int8_activations(scheme, dtype, on_peers, record, seed):
    """``w8a8`` on `_int_mm`, with all that the plugin does around it."""
    on_peers(int_mm=ops.int_mm)
    for name, problem in problems(scheme, dtype, seed):
        y = computed(problem)
        assert y is not None, f"{name}: no kernel"
        record.judge("qcore-xpu w8a8 on oneDNN", name, problem, y, seed)


MISTAKES = {
    "highest nibble first": lambda w: {"data": (w["data"].view(torch.uint8) << 4 | w["data"].view(torch.uint8) >> 4)},
    "zero points of the other sign": lambda w: {"zeros": 16 - w["zeros"]},
    "zero points without their offset": lambda w: {"zeros": w["zeros"] - 8},
    "scales transposed": lambda w: {"factor": transposed(w["factor"])},
    "the rest of float zero points with the other sign": lambda w: {"rest": -w["rest"]},
}


@pytest.mark.parametrize("peer", INT4_PEERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_what_the_plugin_packs_shows(mistake, peer, on_peers, seed):
    """The test of these tests, on the scheme that has all the parts."""
    on_peers(int4_mm=INT4_PEERS[peer])
    problem = made("w4a16-g48-fzp", 5, 20, 160, torch.bfloat16, seed)
    kernel = linear.kernel(problem.request)
    right = int32.pack(problem.weight, problem.request.x_dtype)
    wrong = {**right, **MISTAKES[mistake](right)}
    wrong["data"] = wrong["data"].contiguous().view(torch.int32)
    assert LINEAR.judge(problem, kernel(problem.x, right, None)).ok
    assert not LINEAR.judge(problem, kernel(problem.x, wrong, None)).ok


def test_a_weight_in_the_ops_own_layout_is_packed_as_it_is(on_peers, record, seed):
    """A checkpoint in `PLAIN_INT32` with whole groups: the words that the op reads are the checkpoint's bytes."""
    from qcore import PLAIN_INT32

    on_peers(int4_mm=ops.int4_mm)
    problem = made("w4a16-g32-asym", 5, 20, 160, torch.bfloat16, seed)
    weight = problem.weight.convert(PLAIN_INT32)
    problem = replace(problem, weight=weight, request=replace(problem.request, weight=weight.format))
    assert torch.equal(int32.pack(weight, torch.bfloat16)["data"], weight.data)
    record.judge("qcore-xpu int4 on oneDNN, PLAIN_INT32", "made", problem, computed(problem), seed)
