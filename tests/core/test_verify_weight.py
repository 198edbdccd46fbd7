"""Verification with a layer's own weight, and of what a kernel does beside computing."""

from __future__ import annotations

import pytest
import torch

import qcore
from qcore.errors import QcoreWarning, UnsupportedError
from qcore.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear
from qcore.resolving import verification
from qcore.runtime import disk_cache

SIZE = (320, 576)  # beyond the small problem that stands for it


@pytest.fixture
def offer_with(add_plugin, stub):
    """``offer_with(call, pack)``: a plugin whose kernel is right but for what ``call`` does to its results."""

    def add(call=None, pack=None):
        class Kernel(stub):
            def pack(self, weight):
                packed = super().pack(weight)
                return pack(weight, packed) if pack else packed

            def __call__(self, x, packed, bias, **given):
                y = super().__call__(x, packed, bias, **given)
                return call(self, x, packed, y) if call else y

        made = {}

        def offer(request):
            return qcore.Offer(made.setdefault(request, Kernel("mine.k", request)))

        def same(request):
            return offer(request)

        add_plugin("mine", linear=offer, conv2d=same, embedding=same)
        return made

    return add


def zeroes_x(kernel, x, packed, y):
    x.zero_()
    return y


def changes_the_weight(kernel, x, packed, y):
    packed["scale"].mul_(2)
    return y


def one_buffer(kernel, x, packed, y):
    buffers = vars(kernel).setdefault("buffers", {})
    return buffers.setdefault(y.shape, torch.empty_like(y)).copy_(y)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (zeroes_x, "its call changed x in place"),
        (changes_the_weight, "its call changed the packed weight: scale differs"),
        (one_buffer, "its second call overwrote the result of the first"),
    ],
)
@pytest.mark.parametrize("contract", ["linear", "conv2d", "embedding"])
def test_a_kernel_that_computes_right_and_harms_is_refused(offer_with, request_of, contract, call, words):
    offer_with(call)
    with pytest.warns(QcoreWarning, match=f"failed verification: {words}"):
        assert qcore.resolve(request_of("w8a16", contract=contract)).plugin == "torch"


def large_only(condition):
    def call(kernel, x, packed, y):
        if condition(kernel.inner, x):
            y[..., -1] += 1
        return y

    return call


def test_a_convolution_wrong_on_larger_images_does_not_serve(offer_with):
    offer_with(large_only(lambda inner, x: x.shape[-1] > 16))
    with pytest.warns(QcoreWarning, match="failed verification with a weight of 8 x 36: wrong result"):
        conv = QuantizedConv2d.from_float(torch.nn.Conv2d(4, 8, 3, padding=1), "w8a16")
    assert conv.decision.plugin == "torch"


CONDITIONS = {
    "n": lambda inner, x: inner.n >= 256,
    "k": lambda inner, x: inner.k >= 512,
    "rows": lambda inner, x: inner.n >= 256 and x.shape[0] == 1,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_kernel_wrong_on_large_weights_only_does_not_serve(offer_with, condition):
    offer_with(large_only(CONDITIONS[condition]))
    layer = torch.nn.Linear(SIZE[1], SIZE[0])
    with pytest.warns(
        QcoreWarning, match=r"is disabled for .*failed verification with a weight of 320 x 576: wrong result"
    ):
        made = QuantizedLinear.from_float(layer, "w8a16")
    assert made.decision.plugin == "torch"
    row = next(c for c in made.decision.candidates if c.plugin == "mine")
    assert row.stage == "failed verification"
    assert "elements are off" in row.reason
    x = torch.randn(3, SIZE[1])
    assert torch.allclose(made(x), torch.nn.functional.linear(x, made.weight.dequantize(), layer.bias), atol=1e-4)


def test_a_kernel_wrong_with_many_rows_serves_no_small_layer(offer_with, request_of):
    offer_with(large_only(lambda inner, x: x.shape[0] > 128))
    with pytest.warns(QcoreWarning, match="failed verification: wrong result"):
        assert qcore.resolve(request_of("w8a16")).plugin == "torch"


def test_every_layer_and_the_functional_form_are_checked(offer_with):
    offer_with(large_only(lambda inner, x: inner.n >= 256))
    weight = qcore.quantize(torch.randn(SIZE), "int8")
    with pytest.warns(QcoreWarning, match="failed verification with a weight"):
        qcore.linear(torch.randn(2, SIZE[1]), weight)
    with pytest.warns(QcoreWarning, match="failed verification: wrong result"):  # convolutions are tried as they are
        conv = QuantizedConv2d.from_float(torch.nn.Conv2d(64, 320, 3), "w8a16")
    with pytest.warns(QcoreWarning, match="failed verification with a weight"):
        table = QuantizedEmbedding.from_float(torch.nn.Embedding(*SIZE), "w8a16")
    assert {conv.decision.plugin, table.decision.plugin} == {"torch"}


def test_a_weight_that_is_packed_with_loss_is_not_lost(offer_with):
    def pack(weight, packed):
        return packed if weight.shape[0] < 256 else {name: torch.zeros_like(t) for name, t in packed.items()}

    offer_with(pack=pack)
    layer = torch.nn.Linear(SIZE[1], SIZE[0])
    with pytest.warns(QcoreWarning, match="unpack.* is not w for a weight of 320 x 576: data differs"):
        made = QuantizedLinear.from_float(layer, "w8a16")
    error = (made.weight.dequantize() - layer.weight).abs().max()
    assert error < layer.weight.abs().max() / 127


def test_where_no_kernel_is_right_nothing_serves(monkeypatch):
    monkeypatch.setattr(
        verification, "_try_weight", lambda *_: verification.Check(False, "with a weight of any size: wrong")
    )
    with (
        pytest.warns(QcoreWarning, match="failed verification with a weight"),
        pytest.raises(UnsupportedError, match=r"failed verification .* with a weight of any size: wrong"),
    ):
        QuantizedLinear.from_float(torch.nn.Linear(SIZE[1] + 1, SIZE[0] + 1), "w8a16")


def test_the_verdict_is_kept_by_size(offer_with, request_of):
    made = offer_with()
    layer = torch.nn.Linear(SIZE[1], SIZE[0], bias=False)

    def calls():
        before = sum(kernel.calls for kernel in made.values())
        QuantizedLinear.from_float(layer, "w8a16")
        return sum(kernel.calls for kernel in made.values()) - before

    assert calls() == 6 + 4, "the small problems, then one row and many, twice each"
    assert calls() == 0
    verification.forget()
    assert calls() == 0, "taken from the disk"
    layer = torch.nn.Linear(SIZE[1], 2 * SIZE[0], bias=False)
    assert calls() == 4, "another size of the same form"


@pytest.mark.parametrize(("mode", "expected"), [("off", 0), ("always", 10)])
def test_modes(offer_with, mode, expected):
    made = offer_with()
    with qcore.using(verify=mode):
        QuantizedLinear.from_float(torch.nn.Linear(SIZE[1], SIZE[0], bias=False), "w8a16")
    assert sum(kernel.calls for kernel in made.values()) == expected


def test_what_ended_a_process_at_a_size_is_not_tried_there_again(offer_with, request_of):
    offer_with()
    request = request_of("w8a16", n=SIZE[0], k=SIZE[1])
    decision = qcore.resolve(request)
    status = next(s for s in qcore.plugins() if s.name == "mine")
    key = verification.size_key(status, decision.kernel, request)
    assert disk_cache.write("running", f"verify {key}", pid=2**22 + 12345)
    with pytest.warns(QcoreWarning, match="ended an earlier process while it was verified"):
        made = QuantizedLinear.from_float(torch.nn.Linear(SIZE[1], SIZE[0], bias=False), "w8a16", name="x")
    assert made.decision.plugin == "torch"


def test_sizes_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(verification, "_MAX_SIZES", 3)
    for n in range(300, 310):
        QuantizedLinear.from_float(torch.nn.Linear(300, n), "w8a16")
    assert len(verification._seen_sizes) <= 3
