"""What is served and what is refused, and that refusals say what to do."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

import qcore
from qcore.contracts import CONTRACTS
from qcore.weights.schemes import SCHEMES, Scheme
from qcore_xpu import aten, linear, plugin, serving, triton_linear

GPU = torch.device("xpu:0")


@pytest.fixture(autouse=True)
def every_op(monkeypatch):
    """A torch that has the ops, so far as requests can tell."""
    monkeypatch.setattr(aten, "missing", lambda name: "")


def asked(contract, scheme="w4a16-g32", dtype=torch.bfloat16, **changes):
    return replace(CONTRACTS[contract].request_for(Scheme.parse(scheme), GPU, dtype, 24, 96), **changes)


def kernel_of(request, hook=plugin.qcore_linear):
    answer = hook(request)
    assert isinstance(answer, qcore.Offer), answer
    assert answer.rank == qcore.NATIVE
    assert answer.note
    return answer.kernel.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [*SCHEMES, "w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t", "w8a16-fzp"])
def test_every_scheme_is_served(interpreter, scheme, dtype):
    parsed = Scheme.parse(scheme)
    bits = parsed.weight.bits
    narrow = dtype != torch.float32
    if parsed.activation is not None:
        expected = f"xpu.w{bits}a8"
    elif narrow and (bits == 4 or parsed.weight == qcore.Format("int8")):
        expected = f"xpu.w{bits}a16"
    else:
        expected = f"xpu.dense_w{bits}a16"
    assert kernel_of(asked("linear", scheme, dtype)) == expected


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g128-asym", "w8a16-g32-fzp", "w8a16"])
def test_every_table_is_served(interpreter, scheme):
    assert kernel_of(asked("embedding", scheme), plugin.qcore_embedding) == "xpu.embedding"


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16-g32", "w8a8", "w4a8"])
def test_convolutions_are_served(interpreter, scheme):
    assert kernel_of(asked("conv2d", scheme), plugin.qcore_conv2d).startswith("xpu.conv2d_")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": torch.device("cpu")}, "the tensors are on cpu; move them with .to('xpu')"),
        ({"device": torch.device("cuda:1")}, "the tensors are on cuda:1"),
        ({"out_dtype": torch.float64}, "results of dtype float64"),
        ({"x_dtype": torch.float64}, "activations of dtype float64"),
        ({"x_dtype": torch.int8}, "activations of dtype int8"),
        ({"out_dtype": torch.int8}, "results of dtype int8"),
        ({"n": 0}, "is empty"),
        ({"k": 0}, "is empty"),
    ],
)
def test_refusals_of_linear(changes, why):
    answer = plugin.qcore_linear(asked("linear", **changes))
    assert isinstance(answer, qcore.Refusal)
    assert why in answer.reason


@pytest.mark.parametrize(("contract", "hook"), [("conv2d", "qcore_conv2d"), ("embedding", "qcore_embedding")])
def test_refusals_of_the_others(contract, hook):
    for changes, why in (
        ({"device": torch.device("cpu")}, "tensors are on cpu"),
        ({"out_dtype": torch.float64}, "results of dtype float64"),
    ):
        answer = getattr(plugin, hook)(asked(contract, **changes))
        assert isinstance(answer, qcore.Refusal)
        assert why in answer.reason


def test_without_an_op_triton_serves_and_the_note_says_why(interpreter, monkeypatch):
    monkeypatch.setattr(aten, "missing", lambda name: f"torch lacks {name}.")
    offer = serving.linear(asked("linear", "w4a16-g32"))
    assert offer.kernel.name == "xpu.dense_w4a16"
    assert offer.note.endswith("; torch lacks _weight_int4pack_mm_with_scales_and_zeros.")


def test_without_an_op_and_without_triton_both_reasons_are_given(monkeypatch):
    monkeypatch.setattr(aten, "missing", lambda name: f"torch lacks {name}.")
    monkeypatch.setattr(triton_linear, "why_not", lambda request: "Triton is not installed.")
    reason = serving.why_not_linear(asked("linear", "w8a16"))
    assert reason == "torch lacks _weight_int8pack_mm. Triton is not installed."
    assert serving.why_not_linear(asked("linear", "w8a16-asym")) == "Triton is not installed."


@pytest.mark.parametrize("module", ["conv2d", "embedding"])
def test_a_reason_of_a_module_is_a_refusal(monkeypatch, module):
    monkeypatch.setattr(f"qcore_xpu.{module}.why_not", lambda request: "Triton is not installed.")
    assert getattr(serving, f"why_not_{module}")(asked(module)) == "Triton is not installed."


@pytest.fixture
def as_shipped():
    """`qcore_xpu.aten` afresh: a stand-in may have replaced what is in it."""
    spec = importlib.util.spec_from_file_location("aten_as_shipped", aten.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_torch_without_xpu_ops_is_known_by_its_dispatch_tables(as_shipped, monkeypatch):
    for name in (as_shipped.INT4, as_shipped.INT8, as_shipped.INT):
        if torch.version.xpu is None:
            assert as_shipped.missing(name) == (
                f"torch {torch.__version__} has no aten::{name} for XPU; upgrade torch (its XPU build)."
            )
        monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: key == "XPU")
        assert as_shipped.missing(name) == ""
        monkeypatch.undo()
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: True)
    assert "aten::_no_such_op" in as_shipped.missing("_no_such_op")


def test_the_door_leads_to_torchs_ops(as_shipped, monkeypatch):
    calls = []
    for name in (as_shipped.INT4, as_shipped.INT8, as_shipped.INT):
        monkeypatch.setattr(torch.ops.aten, name, lambda *args, name=name: calls.append((name, args)))
    as_shipped.int4_mm("x", "words", 32, "scale", "zeros")
    as_shipped.int8_mm("x", "codes", "scale")
    as_shipped.int_mm("x", "codes")
    assert calls == [
        (as_shipped.INT4, ("x", "words", 32, "scale", "zeros")),
        (as_shipped.INT8, ("x", "codes", "scale")),
        (as_shipped.INT, ("x", "codes")),
    ]


def test_fakes_of_torchs_ops_take_what_kernels_send(as_shipped):
    """Shapes and dtypes of results, as torch itself says, for device xpu, on a machine without one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 64, dtype=torch.bfloat16, device="xpu")
        words = torch.empty(8, 8, dtype=torch.int32, device="xpu")
        scale = torch.empty(2, 8, dtype=torch.bfloat16, device="xpu")
        zeros, codes = (torch.empty(*s, dtype=torch.int8, device="xpu") for s in ((2, 8), (8, 64)))
        results = (
            as_shipped.int4_mm(x, words, 32, scale, zeros),
            as_shipped.int8_mm(x, codes, torch.empty(8, device="xpu")),
            as_shipped.int_mm(torch.empty(3, 64, dtype=torch.int8, device="xpu"), codes.t()),
        )
    assert [tuple(y.shape) for y in results] == [(3, 8)] * 3
    assert [y.dtype for y in results] == [torch.bfloat16, torch.bfloat16, torch.int32]
    assert {y.device.type for y in results} == {"xpu"}


def test_kernels_for_ops_are_of_this_plugin():
    assert linear.AtenLinear.__module__ == "qcore_xpu.linear"
