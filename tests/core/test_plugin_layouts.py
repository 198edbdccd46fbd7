"""Layouts of third parties that are broken: found on use, named with their plugin, and nobody else's weights suffer."""

from __future__ import annotations

import sys

import pytest
import torch
from layouts import Nibbles

import qcore
from qcore.discovery.registry import registry
from qcore.errors import FormatError, QcoreError
from qcore.formats import PLAIN, Format, layouts


def raising(*_arguments):
    raise RuntimeError("boom")


def panicking(*_arguments):
    class PanicException(BaseException):
        def __str__(self):
            raise RuntimeError("no words either")

    raise PanicException


def broken(**methods):
    return type("Broken", (Nibbles,), methods)()


@pytest.fixture
def installed(monkeypatch):
    """``installed(layout)``: a plugin called ``chip`` that brings it."""
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))
    monkeypatch.setattr(layouts, "_OWNERS", {}, raising=False)

    def install(layout):
        class Chip:
            @qcore.hookimpl
            def qcore_formats(self):
                return [layout]

        registry.add("chip", Chip())
        assert registry.status("chip").reason == ""
        return layout

    yield install
    if "chip" in registry.entries():
        registry.remove("chip")


def weight(text="int4-g4-asym"):
    torch.manual_seed(0)
    return qcore.quantize(torch.randn(3, 10), Format.parse(text))


NAMED = r"layout 'nibbles' of plugin 'chip' is broken"

ENCODERS = {
    "zeroes": (lambda self, codes: PLAIN.encode(codes * 0), "its encode loses int4 codes"),
    "wrong at odd K": (lambda self, codes: PLAIN.encode(codes * (codes.shape[1] % 2 == 0)), None),
    "raises": (raising, "its encode raised RuntimeError: boom"),
    "panics": (panicking, r"raised PanicException: \(without words\)"),
    "exits": (lambda self, codes: sys.exit(3), "raised SystemExit"),
    "gives None": (lambda self, codes: None, "returned a NoneType"),
    "drops a row": (lambda self, codes: PLAIN.encode(codes[1:]), "its rows must be N"),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encode_is_checked_on_convert(installed, name):
    encode, says = ENCODERS[name]
    layout = installed(broken(encode=encode))
    if says is None:
        assert torch.equal(weight().convert(layout).codes(), weight().codes())
        odd = qcore.quantize(torch.ones(3, 9), Format("int4"))
        with pytest.raises(FormatError, match="loses int4 codes of shape"):
            odd.convert(layout)
        return
    with pytest.raises(FormatError, match=f"(?s){NAMED}.*{says}"):
        weight().convert(layout)


DECODERS = {
    "raises": (raising, "its decode raised RuntimeError: boom"),
    "panics": (panicking, "its decode raised PanicException"),
    "another dtype": (lambda self, data, k: PLAIN.decode(data, k).int(), r"returned torch.int32 \(3, 10\)"),
    "another shape": (lambda self, data, k: PLAIN.decode(data, k)[:, :1], r"returned torch.int8 \(3, 1\)"),
    "None": (lambda self, data, k: None, "returned a NoneType"),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decode_that_fails_is_a_format_error_everywhere(installed, name):
    decode, says = DECODERS[name]
    good = weight()
    qt = qcore.QTensor(
        good.data, good.scale, good.zero + 8, good.shape, good.format.with_layout(installed(broken(decode=decode)))
    )
    for use in (qt.codes, qt.dequantize, lambda: qt.convert(PLAIN), lambda: qcore.linear(torch.ones(2, 10), qt)):
        with pytest.raises(FormatError, match=f"(?s){NAMED}.*{says}"):
            use()


def test_check_that_raises_is_a_format_error(installed):
    layout, good = installed(broken(check=raising)), weight("int4")
    with pytest.raises(FormatError, match=f"(?s){NAMED}.*its check raised RuntimeError"):
        qcore.QTensor(good.data, good.scale, None, good.shape, good.format.with_layout(layout))


def test_zero_points_are_checked_as_codes_are(installed):
    layout = installed(broken(encode_zero=lambda self, zero: zero * 0))
    with pytest.raises(FormatError, match=f"(?s){NAMED}.*its encode_zero loses zero points"):
        weight().convert(layout)


@pytest.mark.parametrize("made", [raising, lambda *_: None], ids=["raises", "None"])
def test_for_dtype_that_fails(installed, made):
    layout = installed(broken(for_dtype=made))
    with pytest.raises(FormatError, match=NAMED):
        Format("int4", layout=layout)


def test_an_error_of_the_layouts_own_passes_as_it_is(installed):
    def even(self, codes):
        if codes.shape[1] % 2:
            raise FormatError("nibbles needs an even K.")
        return PLAIN.encode(codes)

    layout = installed(broken(encode=even))
    assert torch.equal(weight().convert(layout).codes(), weight().codes())
    with pytest.raises(FormatError, match=r"^nibbles needs an even K\.$"):
        qcore.quantize(torch.ones(2, 5), Format("int4")).convert(layout)


def test_a_layout_given_directly_is_named_by_its_class():
    with pytest.raises(FormatError, match=r"layout 'nibbles' of .*\.Broken is broken"):
        weight().convert(broken(encode=raising))


@pytest.mark.parametrize("what", ["encode", "decode", "check", "encode_zero", "for_dtype"])
def test_the_fallback_still_serves_weights_in_qcores_own_layouts(installed, what):
    layout = installed(broken(**{what: raising}))
    with pytest.raises(QcoreError, match="'nibbles'"):
        weight().convert(layout)
    qt = weight()
    x = torch.randn(2, 10)
    torch.testing.assert_close(qcore.linear(x, qt), x @ qt.dequantize().t())


def test_a_layout_whose_decode_raises_is_refused_by_name(installed, tmp_path, monkeypatch):
    layout, path = installed(Nibbles()), tmp_path / "w.safetensors"
    qcore.save({"weight": weight().convert(layout)}, path)
    for method in ("decode", "check", "decode_zero"):
        model = torch.nn.Linear(10, 3, bias=False)
        with monkeypatch.context() as patch:
            patch.setattr(Nibbles, method, raising)
            with pytest.raises(QcoreError, match=f"(?s)'nibbles' of plugin 'chip' is broken: its {method} raised"):
                qcore.load_(model, path)
        assert type(model) is torch.nn.Linear


def test_a_good_layout_of_a_third_party_serves_and_compiles(installed):
    layout = installed(Nibbles())
    qt, x = weight().convert(layout), torch.randn(2, 10)
    expected = x @ qt.dequantize().t()
    with qcore.using("torch"):
        torch.testing.assert_close(qcore.linear(x, qt), expected)
        layer = qcore.nn.QuantizedLinear.from_qtensor(qt)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)
    assert layer.weight.format.layout is layout
    assert qcore.formats.registered_layouts()["nibbles"] == (layout, "chip")


@pytest.mark.parametrize("dtypes", [(), None, (["int4"],), "int4"])
def test_dtypes_that_are_no_tuple_of_known_names(installed, dtypes):
    with pytest.raises(FormatError, match="must be a tuple of element names"):
        layouts.register_layout(broken(dtypes=dtypes))


def test_dtypes_that_no_element_has(installed):
    with pytest.raises(FormatError, match="unknown element type 'int2'"):
        layouts.register_layout(broken(dtypes=("int2",)))
