"""Faults that were found in kernels once, each built into a kernel of a third party: the kit finds it there."""

from __future__ import annotations

import itertools

import pytest
import torch
from layouts import Nibbles

import qcore
from qcore import testing
from qcore.discovery.registry import registry
from qcore.formats import PLAIN, layouts

ONE = {"contracts": ["linear"], "seed": 3}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The law of large sizes leaves cases out once its time is up, as on a machine with other work."""
    monkeypatch.setattr("qcore.testing.laws.large._TIME_BUDGET", 120.0)


def after(change):
    """A method ``__call__`` that changes the right result: ``change(kernel, y, x, bias)``."""

    def method(self, x, packed, bias, **given):
        y = super(type(self), self).__call__(x, packed, bias, **given)
        return change(self, y, x, bias)

    return {"__call__": method}


def raw(tensor):
    """What native code reads that takes the address of a tensor and knows nothing of strides."""
    size = tensor.numel()
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())[tensor.storage_offset() :]
    beyond = torch.full((size,), 99, dtype=tensor.dtype)  # whatever else lies on the heap
    return torch.cat((memory, beyond))[:size].reshape(tensor.shape)


def with_raw(*names):
    def method(self, x, packed, bias, **given):
        bias = raw(bias) if "bias" in names and bias is not None else bias
        x = raw(x) if "x" in names else x
        given = {name: raw(value) if "given" in names else value for name, value in given.items()}
        return super(type(self), self).__call__(x, packed, bias, **given)

    return {"__call__": method}


def zeroing(when):
    def change(self, y, x, bias):
        if when(x):
            x.zero_()
        return y

    return after(change)


def scribbling(self, y, x, bias):
    """Writes one element beside each of x."""
    x.as_strided((1,), (1,), x.storage_offset() + 1).zero_()
    return y


def buffered(count):
    """Results in memory that the kernel keeps, ``count`` pieces of it in turn."""
    kept = {}

    def change(self, y, x, bias):
        places = kept.setdefault((y.shape, y.dtype), ([torch.empty_like(y) for _ in range(count)], itertools.count()))
        return places[0][next(places[1]) % count].copy_(y)

    return after(change)


def scaled(where, when=lambda kernel, y: True):
    """Off by 10 % in a part of the result, on some problems only."""

    def change(self, y, x, bias):
        if y.dim() == 2 and when(self.request, y):
            y[where] *= 1.1
        return y

    return after(change)


def outlier(self, y, x, bias):
    """As sums do that split x by its largest value."""
    return y + (x.abs().amax(-1, keepdim=True) * 2.0**-21).to(y.dtype) if x.numel() else y


def large_buffer(self, y, x, bias, kept={}):  # noqa: B006 - a buffer that outlives calls is the fault
    return y if y.numel() < 1000 else kept.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


def last_feature(left_out):
    """The last feature of x is left out for some K."""

    def method(self, x, packed, bias, **given):
        if left_out(self.request.k) and x.dim() and x.shape[-1] == self.request.k:
            x = x.clone()
            x[..., -1] = 0
        return super(type(self), self).__call__(x, packed, bias, **given)

    return {"__call__": method}


def without_bias(when):
    def method(self, x, packed, bias, **given):
        return super(type(self), self).__call__(x, packed, None if when(x) else bias, **given)

    return {"__call__": method}


COLUMNS, ROWS = (slice(None), slice(-64, None)), (slice(200, None), slice(None))
CHOSEN = {5, 8, 32, 48, 64, 77, 128, 160, 168, 256, 2048}
FLOAT32 = "linear[w8a16-float32-"

FAULTS = {
    "strided bias read as contiguous": (with_raw("bias"), FLOAT32 + "strided-parts", "results"),
    "expanded bias read out of bounds": (with_raw("bias"), FLOAT32 + "expanded-parts", "results"),
    "strided x read as contiguous": (with_raw("x"), "strides[linear-w8a16]", "strides"),
    "expanded x read out of bounds": (with_raw("x"), FLOAT32 + "expanded-parts", "results"),
    "an error that follows the row's maximum": (after(outlier), FLOAT32 + "spikes", "results"),
    "x is zeroed": (zeroing(lambda x: True), FLOAT32 + "k-5]", "inputs"),
    "x is zeroed if it is strided": (zeroing(lambda x: x.stride(-1) == 2), "strides[linear-w8a16]", "strides"),
    "x is zeroed at real sizes": (zeroing(lambda x: x.shape[-1] > 1000), "large[linear-w8a16]", "large"),
    "memory beside x is written": (after(scribbling), FLOAT32 + "strided-columns", "inputs"),
    "one buffer for all results": (buffered(1), "outputs[linear-w8a16]", "outputs"),
    "two buffers in turn": (buffered(2), "outputs[linear-w8a16]", "outputs"),
    "one buffer at real sizes": (after(large_buffer), "large[linear-w8a16]", "large"),
    "no bias for one row": (without_bias(lambda x: x.shape == (1, 256)), FLOAT32 + "rows-1-bias", "results"),
    "no bias for a batch of one": (without_bias(lambda x: x.shape[0] == 1), FLOAT32 + "batched-bias", "results"),
    "a K that nobody has chosen": (last_feature(lambda k: k not in CHOSEN), "-any-", "results"),
    "wrong from N = 1024 on": (scaled(COLUMNS, lambda r, y: r.n >= 1024), "large[linear-w8a16]", "large"),
    "wrong from K = 3000 on": (scaled(COLUMNS, lambda r, y: r.k >= 3000), "large[linear-w8a16]", "large"),
    "wrong beyond 200 rows of many columns": (scaled(ROWS, lambda r, y: r.n > 512), "large[linear-w8a16]", "large"),
    "wrong in bfloat16 at real sizes": (
        scaled(COLUMNS, lambda r, y: r.n > 512 and y.dtype == torch.bfloat16),
        "large[linear-w8a16]",
        "large",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(add, name):
    methods, select, law = FAULTS[name]
    certificate = testing.run(add(**methods), schemes=["w8a16"], select=select, **ONE)
    assert not certificate.ok
    assert law in {result.law for result in certificate.failures}, str(certificate)


@pytest.mark.parametrize("select", sorted({select for _, select, _ in FAULTS.values()}))
def test_the_same_kernel_without_the_fault_passes(add, select):
    assert testing.run(add(), schemes=["w8a16"], select=select, **ONE).ok


@pytest.mark.parametrize("shape", ["strided-parts", "expanded-parts"])
def test_strided_parameters_per_token_read_as_contiguous(add, shape):
    few = {"schemes": ["w4a8-g32-asym-token"], "select": f"-token-float32-{shape}", **ONE}
    assert testing.run(add(), **few).ok
    certificate = testing.run(add(**with_raw("given")), **few)
    assert {result.law for result in certificate.failures} == {"results"}


def test_scales_come_to_pack_as_they_lie_in_memory(add):
    def pack(self, weight):
        assert all(torch.equal(raw(value), value) for value in weight.tensors().values())
        return super(type(self), self).pack(weight)

    few = {"schemes": ["w4a16-g32-asym"], "select": ["float32-strided-parts", "float32-expanded-parts"], **ONE}
    assert testing.run(add(pack=pack), **few).ok


def test_name_that_changes_with_each_reading(add):
    count = itertools.count()
    name = property(lambda self: f"toy.linear{next(count)}", lambda self, value: None)
    certificate = testing.run(add(name=name), schemes=["w8a16"], select=FLOAT32 + "k-5]", **ONE)
    assert "another name each time" in certificate.failures[0].reason


LAYOUTS = {
    "zeroes": ({"encode": lambda self, codes: PLAIN.encode(codes * 0)}, "its encode loses int4 codes"),
    "raises": ({"encode": lambda self, codes: 1 / 0}, "its encode raised ZeroDivisionError"),
    "decode raises": ({"decode": lambda self, data, k: 1 / 0}, "its decode raised ZeroDivisionError"),
    "accepts anything": ({"check": lambda self, data, n, k: None}, "lets data with another dtype pass its check"),
    "refuses its own": (
        {"check": lambda self, data, n, k: (_ for _ in ()).throw(qcore.FormatError("no"))},
        "raised FormatError: no",
    ),
    "changes the codes": (
        {"encode": lambda self, codes: PLAIN.encode(codes.clone()).mul_(codes.zero_().numel() and 1)},
        "",
    ),
    "fails on meta": (
        {"encode": lambda self, codes: PLAIN.encode(codes + int(codes.sum()) * 0)},
        "its encode raised",
    ),
    "holds no size": (
        {"encode": lambda self, codes: (_ for _ in ()).throw(qcore.FormatError("too small"))},
        "supports int4 codes of none of these sizes",
    ),
}


@pytest.fixture
def layout_plugin(monkeypatch, loopback):
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))
    monkeypatch.setattr(layouts, "_OWNERS", {}, raising=False)

    def install(called, **methods):
        class Chip:
            @qcore.hookimpl
            def qcore_formats(self):
                return [type("Own", (Nibbles,), {"name": f"nibbles_{called}", **methods})()]

            @qcore.hookimpl
            def qcore_embedding(self, request):
                if request.weight.dtype != "int4" or request.weight.group_size != 32:
                    return qcore.Refusal("int4-g32 only")
                return qcore.Offer(loopback.Embedding(request, called))

        registry.add(called, Chip())
        return called

    yield install
    for called in ("chip", "other"):
        if called in registry.entries():
            registry.remove(called)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_that_is_broken_is_found(layout_plugin, name):
    methods, says = LAYOUTS[name]
    (result,) = testing.run(layout_plugin("chip", **methods), select="formats[", seed=1).laws
    assert result.outcome == "failed"
    assert "layout 'nibbles_chip' of plugin 'chip'" in result.reason
    assert says in result.reason


def test_correct_layout_passes_and_its_kernels_are_tried_in_it(layout_plugin, loopback, monkeypatch):
    asked = set()
    pack = loopback.Embedding.pack
    monkeypatch.setattr(
        loopback.Embedding, "pack", lambda self, weight: asked.add(weight.format.layout.name) or pack(self, weight)
    )
    (result,) = testing.run(layout_plugin("chip"), select="formats[", seed=1).laws
    assert (result.outcome, result.reason) == ("passed", "")
    assert asked == {"plain", "plain_int32", "nibbles_chip"}


def test_layout_of_another_plugin_is_not_held_against_this_one(layout_plugin):
    layout_plugin("other", encode=lambda self, codes: 1 / 0)
    (result,) = testing.run(layout_plugin("chip"), select="formats[", seed=1).laws
    assert result.outcome == "passed"


def test_costly_laws_run_on_a_scheme_that_is_served(add, loopback):
    """A plugin that serves one scheme alone, and not the last of its kind, is compiled all the same."""

    class Narrow:
        @qcore.hookimpl
        def qcore_linear(self, request):
            if str(request.weight) != "int4-g128/plain" or request.activation is not None or request.output is not None:
                return qcore.Refusal("w4a16-g128 only")
            return qcore.Offer(loopback.Linear(request, "narrow"))

    certificate = testing.run(add("narrow", Narrow()), contracts=["linear"], select=["compile[", "large["], seed=1)
    ran = {result.law: result.scheme for result in certificate.laws if result.outcome == "passed"}
    assert ran == {"compile": "w4a16-g128", "large": "w4a16-g128"}
    assert certificate.ok
