"""Calls past torch's dispatcher: the same bits as the op, which takes over for traces, profilers and unusual inputs."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore.nn import QuantizedLinear
from qcore_cpu import native

assert not native.fault()

from qcore_cpu import ops  # noqa: E402 - the ops exist once the library is loaded
from qcore_cpu.direct import DirectLinear  # noqa: E402

DIRECT = ("w4a16-g32-asym", "w4a16-g64-fzp", "w8a16", "w8a8", "w8a8-static(0.02,0)", "w8a16-g32-e8m0", "w8a8-o8(0.1,3)")
BY_OP = ("mxfp4", "wnf4a16-g64", "w8a8-aasym", "w8a8-static(0.02,3)", "wfp8a16")


def layer(scheme, dtype=torch.bfloat16, *, bias=True):
    torch.manual_seed(0)
    return QuantizedLinear.from_float(torch.nn.Linear(96, 40, bias=bias).to(dtype), scheme)


@pytest.fixture
def called(monkeypatch):
    """Counts the calls of the op."""
    counted, op = [], ops.linear
    monkeypatch.setattr(ops, "linear", lambda *args: counted.append(1) or op(*args))
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", DIRECT)
@torch.no_grad()
def test_direct_calls_give_the_bits_of_the_op(scheme, dtype, called, monkeypatch):
    for shape, bias in (((1, 1, 96), False), ((96,), True), ((2, 20, 96), True)):
        made, x = layer(scheme, dtype, bias=bias), torch.randn(shape).to(dtype)
        made(x)
        called.clear()
        direct = made(x)
        assert not called
        with monkeypatch.context() as patch:
            patch.setattr(DirectLinear, "__call__", lambda *_args: None)
            by_op = made(x)
        assert called
        assert direct.dtype == by_op.dtype
        assert torch.equal(direct, by_op)


@pytest.mark.parametrize("scheme", BY_OP)
@torch.no_grad()
def test_weights_with_more_parts_take_the_op(scheme, called):
    made, x = layer(scheme), torch.randn(3, 96).bfloat16()
    made(x)
    assert called


@torch.no_grad()
def test_unusual_inputs_take_the_op(called):
    made, x = layer("w4a16-g32"), torch.randn(3, 96).bfloat16()
    expected = made(x)
    called.clear()
    strided = torch.randn(96, 3).bfloat16().t().copy_(x)
    for one in (strided, torch.view_as_complex(torch.stack((x.float(), -x.float()), -1)).conj().imag.bfloat16()):
        assert torch.equal(made(one), expected)
    assert called
    called.clear()
    assert made(x[:0]).shape == (0, 40)
    with pytest.raises(qcore.FormatError, match="last dimension"):
        made(x[:, :95])


@torch.no_grad()
def test_profilers_and_modes_see_the_op():
    made, x = layer("w8a16"), torch.randn(3, 96).bfloat16()
    made(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        made(x)
    assert "qcore_cpu::linear" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("scheme", [DIRECT[0], BY_OP[0]])
def test_tangents_are_not_lost_in_native_code(scheme):
    made = layer(scheme, torch.float32).requires_grad_(False)
    x, direction = torch.randn(2, 3, 96)
    wanted = direction @ made.weight.dequantize().t()
    for call in (made, torch.compile(made, backend="eager")):
        found = torch.func.jvp(call, (x,), (direction,))[1]
        torch.testing.assert_close(found, wanted)
