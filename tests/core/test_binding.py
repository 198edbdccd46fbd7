from __future__ import annotations

import gc
import pickle

import pytest
import torch

import qcore
from qcore.errors import PluginError, QcoreWarning
from qcore.resolving import offers, resolver
from qcore.resolving.binding import WeightStore, bind, call_first
from qcore.resolving.verification import difference


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return qcore.quantize(torch.randn(16, 64), "int4-g32-asym")


@pytest.fixture
def request_(request_of):
    return request_of("w4a16-g32-asym")


X = torch.ones(2, 64)


def call(bound):
    return bound.kernel(X, bound.packed, None)


def test_the_neutral_form_goes_when_a_kernel_has_packed(add_kernel, weight, request_):
    add_kernel("mine")
    store = WeightStore(weight)
    assert store.neutral() is weight
    bound = bind(store, request_)
    assert store._neutral is None
    found = store.neutral()
    assert difference(found, weight) == ""
    assert found.quantizer == weight.quantizer
    assert bound.request == request_
    assert not bound.proven


def test_an_answer_that_is_alive_is_handed_out_again(add_kernel, weight, request_):
    add_kernel("mine")
    store = WeightStore(weight)
    bind(store, request_)
    first = store.neutral()
    assert store.neutral().data is first.data
    del first
    gc.collect()
    assert difference(store.neutral(), weight) == ""


def test_kernels_of_one_packing_share_the_tensors(add_kernel, weight, request_, request_of):
    add_kernel("mine")
    store = WeightStore(weight)
    one, two = bind(store, request_), bind(store, request_of("w4a16-g32-asym", dtype=torch.bfloat16))
    assert one.packed is two.packed


def test_a_second_kernel_packs_what_the_first_unpacks(add_plugin, stub, weight, request_, request_of):
    add_plugin("mine", linear=lambda request: qcore.Offer(stub(f"mine.{request.x_dtype}", request)))
    store = WeightStore(weight)
    one, two = bind(store, request_), bind(store, request_of("w4a16-g32-asym", dtype=torch.bfloat16))
    assert one.packed is not two.packed
    assert difference(two.kernel.unpack(two.packed), weight) == ""
    store.keep_only({two.kernel.packing})
    assert list(store._packs) == [two.kernel.packing]
    store.keep_only({"nobody"})
    assert difference(store.neutral(), weight) == ""


def test_pickled_neutral(add_kernel, weight, request_):
    add_kernel("mine")
    store = WeightStore(weight)
    bind(store, request_)
    other = pickle.loads(pickle.dumps(store))
    assert difference(other.neutral(), weight) == ""
    assert not other._packs
    assert not other.users


def test_a_pack_that_raises_makes_way(add_kernel, weight, request_):
    add_kernel("mine", fault="pack")
    with qcore.using(verify="off"), pytest.warns(QcoreWarning, match="pack raised RuntimeError: cannot pack") as caught:
        assert bind(WeightStore(weight), request_).decision.plugin == "torch"
    assert len(caught) == 1


def test_several_failures_in_a_row(add_kernel, weight, request_):
    for name in ("a", "b"):
        add_kernel(name, fault="call")
    store = WeightStore(weight)
    with qcore.using(verify="off"), pytest.warns(QcoreWarning) as caught:
        bound, result = call_first(store, bind(store, request_), call)
    assert (bound.decision.plugin, bound.proven, len(caught)) == ("torch", True, 2)
    torch.testing.assert_close(result, X @ weight.dequantize().t(), atol=1e-4, rtol=1e-4)


def test_where_nobody_can_the_input_is_at_fault(add_kernel, weight, request_):
    add_kernel("mine")
    store = WeightStore(weight)

    def bad(bound):
        raise ValueError(f"bad input for {bound.decision.plugin}")

    with pytest.raises(ValueError, match="bad input for mine"):
        call_first(store, bind(store, request_), bad)
    assert qcore.resolve(request_).plugin == "mine"


def test_the_last_kernel_raises_its_own_error(monkeypatch, weight, request_):
    decision = qcore.resolve(request_)
    # Only the plain kernel is left.
    for candidate in decision.candidates[:-1]:
        for _, offer in offers.offers_for(request_):
            if offer.kernel.name == candidate.kernel:
                resolver.report_failure(request_, offer.kernel, "taken out by the test")
    last = qcore.resolve(request_)
    monkeypatch.setattr(type(last.kernel), "pack", lambda self, weight: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bind(WeightStore(weight), request_)


@pytest.mark.parametrize("fault", ["pack", "call"])
def test_a_named_plugin_fails_loudly(add_kernel, weight, request_, fault):
    add_kernel("mine", fault=fault)
    store = WeightStore(weight)
    with (
        qcore.using("mine,torch", verify="off"),
        pytest.raises(PluginError, match="'mine', which you asked for") as caught,
    ):
        call_first(store, bind(store, request_), call)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert qcore.resolve(request_, verify="off").plugin == "mine"


def test_moving_to_where_it_is_moves_nothing(weight):
    store = WeightStore(weight)
    assert not store.move(lambda t: t, torch.device("cpu"))
    assert store.move(lambda t: t.to("meta"), torch.device("meta"))
    assert store.neutral().data.device.type == "meta"
