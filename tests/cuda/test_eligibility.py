"""What is served and what is refused, and that refusals say what to do."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import qcore
from qcore.contracts import CONTRACTS
from qcore.weights.schemes import SCHEMES, TABLE_SCHEMES, Scheme
from qcore_cuda import eligibility, plugin, probe
from qcore_cuda.linear import FloatLinear, FP8Linear, Int8Linear

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU of compute capability 9.0, so far as requests can tell."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(probe, "triton_version", lambda: "3.6.0")
    clear()
    yield
    clear()


def clear():
    eligibility.why_not_device.cache_clear()
    probe.triton_fault.cache_clear()


def linear(scheme="w4a16-g32", dtype=torch.bfloat16, **changes):
    plain = CONTRACTS["linear"].request_for(Scheme.parse(scheme), GPU, dtype, 24, 96)
    return replace(plain, **changes)


def embedding(scheme="w4a16-g32", **changes):
    return replace(CONTRACTS["embedding"].request_for(Scheme.parse(scheme), GPU, torch.bfloat16, 24, 96), **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "scheme", [*SCHEMES, "w4a8-g32-asym-token", "w4a8-g32-asym-token-o8t", "w4a16-g256", "w8a16-fzp"]
)
def test_every_scheme_is_served(scheme, dtype):
    offer = plugin.qcore_linear(linear(scheme, dtype))
    assert isinstance(offer, qcore.Offer)
    parsed = Scheme.parse(scheme)
    assert offer.kernel.name == f"cuda.w{parsed.weight.bits}a{16 if parsed.activation is None else 8}"
    assert isinstance(offer.kernel, FloatLinear if parsed.activation is None else Int8Linear)
    assert offer.rank == qcore.NATIVE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [*TABLE_SCHEMES, "wfp4a16", "wnf4a16-g128-fzp", "w4afp8-g32-asym", "wnf4afp8-g64"])
def test_every_scheme_of_tables_is_served(scheme, dtype):
    offer = plugin.qcore_linear(linear(scheme, dtype))
    assert isinstance(offer, qcore.Offer)
    assert offer.kernel.name == "cuda." + scheme.partition("-")[0]
    assert isinstance(offer.kernel, FP8Linear if "afp8" in scheme else FloatLinear)
    if "a16" in scheme:
        assert isinstance(plugin.qcore_embedding(embedding(scheme)), qcore.Offer)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [("wfp4afp8-g16", "group size 16 is not a multiple of 32"), ("wnf4a16-g16-e4m3", "group size 16 is not")],
)
def test_tables_without_a_kernel_are_refused(scheme, reason):
    assert reason in plugin.qcore_linear(linear(scheme)).reason
    request = linear("wnf4a16-g64", activation=qcore.DynamicInt8())
    assert "nf4 weights have no kernel with int8 activations" in plugin.qcore_linear(request).reason


def test_tables_of_plugins_are_served_if_four_bits_index_them(monkeypatch):
    from qcore.formats import elements

    tables = {
        "three": (0.0, 1.0, 2.0, 3.0, -1.0, -2.0, -3.0, float("nan")),
        "sixteen": tuple(i / 8 for i in range(16)),
        "wide": tuple(float(i) for i in range(256)),
        "steep": (0.0, *(2.0**-i for i in range(15))),
    }
    for name, values in tables.items():
        monkeypatch.setitem(elements._ELEMENTS, name, qcore.Element.table(name, values))
    served = {name: plugin.qcore_linear(linear(f"w{name}a16-g32")) for name in tables}
    assert isinstance(served["three"], qcore.Offer)
    assert isinstance(served["sixteen"], qcore.Offer)
    assert "wide weights are a table of 256 values" in served["wide"].reason
    assert isinstance(served["steep"], qcore.Offer)
    monkeypatch.setitem(elements._ELEMENTS, "steep", qcore.Element.table("steep", (*(2.0**-i for i in range(16)),)))
    assert "values that float16 cannot hold" in plugin.qcore_linear(linear("wsteepa16-g32")).reason


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-g128-asym", "w8a16-g32-fzp", "w8a16"])
def test_every_table_is_served(scheme):
    offer = plugin.qcore_embedding(embedding(scheme))
    assert isinstance(offer, qcore.Offer)
    assert offer.kernel.name == "cuda.embedding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "scheme", ["w4a16-g32", "w4a16-asym", "w8a16-g64-fzp", "w8a8", "w4a8-g32-aasym", "w8a8-static"]
)
def test_experts_are_served(scheme, dtype):
    plain = CONTRACTS["grouped_linear"].request_for(Scheme.parse(scheme), GPU, dtype, 24, 96)
    offer = plugin.qcore_grouped_linear(plain)
    assert isinstance(offer, qcore.Offer)
    parsed = Scheme.parse(scheme)
    assert offer.kernel.name == f"cuda.grouped_w{parsed.weight.bits}a{16 if parsed.activation is None else 8}"
    for changes, why in (
        ({"device": torch.device("cpu")}, "tensors are on cpu"),
        ({"out_dtype": torch.float64}, "results of dtype float64"),
        ({"weight": qcore.grouped_int4(20)}, "group size 20"),
    ):
        assert why in plugin.qcore_grouped_linear(replace(plain, **changes)).reason


def test_other_combinations_that_are_served():
    for request in (
        linear(out_dtype=torch.float32),
        linear(training=True, bias=True, rows=1),
        linear("w8a8-static", x_dtype=torch.int8, out_dtype=torch.bfloat16),
        linear("w4a16-g32/plain_int32"),
        linear("w4a16-g128", k=5),
        linear(n=1, k=1),
    ):
        assert isinstance(plugin.qcore_linear(request), qcore.Offer), request


REFUSED = {
    "cpu": (linear(device=torch.device("cpu")), "tensors are on cpu"),
    "meta": (linear(device=torch.device("meta")), "tensors are on meta"),
    "group": (linear("w4a16-g7"), "group size 7 is not a multiple of 32"),
    "group of 16": (linear("w8a8-g16"), "use 32, 64 or 128"),
    "double": (linear(dtype=torch.float64), "results of dtype float64"),
    "double in": (linear(x_dtype=torch.float64), "activations of dtype float64"),
    "codes without scale": (linear(x_dtype=torch.int8), "activations of dtype int8"),
    "codes with a scale of their own": (linear("w8a8", x_dtype=torch.int8), "activations of dtype int8"),
    "int8 result": (linear(out_dtype=torch.int8), "results of dtype int8"),
    "int8 result of floats": (
        linear(out_dtype=torch.int8, output=qcore.OutputInt8(0.1)),
        "requires int8 activations",
    ),
    "float result of -o8": (linear("w8a8-o8", out_dtype=torch.float16), "is int8, not torch.float16"),
    "no rows": (linear(n=0), "is empty"),
    "no columns": (linear("w8a16", k=0), "is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_linear(name):
    request, why = REFUSED[name]
    answer = plugin.qcore_linear(request)
    assert isinstance(answer, qcore.Refusal)
    assert why in answer.reason


def test_refusals_of_embedding_and_conv2d():
    for changes, why in (
        ({"device": torch.device("cpu")}, "tensors are on cpu"),
        ({"out_dtype": torch.float64}, "results of dtype float64"),
        ({"weight": qcore.grouped_int4(20)}, "group size 20"),
    ):
        answer = plugin.qcore_embedding(embedding(**changes))
        assert isinstance(answer, qcore.Refusal)
        assert why in answer.reason
    request = CONTRACTS["conv2d"].request_for(Scheme.parse("w8a8"), torch.device("cpu"), torch.float16, 8, 8)
    answer = plugin.qcore_conv2d(request)
    assert isinstance(answer, qcore.Refusal)
    assert "tensors are on cpu" in answer.reason


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_compute_capability(monkeypatch, capability, served):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    answer = plugin.qcore_linear(linear())
    assert isinstance(answer, qcore.Offer) == served
    if not served:
        assert "has compute capability 7.5; the kernels need 8.0" in answer.reason


def test_a_device_that_is_not_there(monkeypatch):
    def ask(device):
        raise AssertionError("Invalid device id\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_capability", ask)
    assert plugin.qcore_linear(linear()).reason == "torch cannot use cuda:0: Invalid device id"


def test_triton_too_old(monkeypatch):
    monkeypatch.setattr(probe, "triton_version", lambda: "3.2.0")
    probe.triton_fault.cache_clear()
    assert "pip install 'triton>=3.5'" in plugin.qcore_linear(linear()).reason


def test_convolutions_come_from_a_module_of_their_own(monkeypatch):
    made = FloatLinear(linear("w8a16"))
    reasons = iter(["", "5x5 kernels have no kernel"])
    stub = ModuleType("qcore_cuda.conv2d")
    stub.why_not, stub.kernel = lambda request: next(reasons), lambda request: made
    monkeypatch.setitem(sys.modules, "qcore_cuda.conv2d", stub)
    request = CONTRACTS["conv2d"].request_for(Scheme.parse("w8a16"), GPU, torch.float16, 8, 8)
    offer = plugin.qcore_conv2d(request)
    assert isinstance(offer, qcore.Offer)
    assert offer.kernel is made
    assert plugin.qcore_conv2d(request).reason == "5x5 kernels have no kernel"


def test_answers_are_plain_values(monkeypatch):
    import plugin_answers

    from qcore_cuda import plugin

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    hooks = {
        contract: getattr(plugin, f"qcore_{contract}")
        for contract in ("linear", "conv2d", "embedding", "grouped_linear")
    }
    for device in ("cpu", "cuda:0"):
        assert not list(plugin_answers.faults(plugin, hooks.__getitem__, device))
