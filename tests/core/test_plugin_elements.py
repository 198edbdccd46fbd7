"""Elements and quantizers of plugins: registered whole or not at all, checked on use, missing ones named."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from layouts import Nibbles

import qcore
from qcore.discovery.registry import registry
from qcore.errors import FormatError, QcoreError
from qcore.formats import Element, elements, layouts
from qcore.plugin_api import Quantizer, ZeroPoint
from qcore.testing.case_selection import cases, element_schemes
from qcore.weights import registered_quantizers

OCTET = Element.table("octet", (-1.0, -0.5, -0.25, 0.0, 0.125, 0.25, 0.5, 1.0))
OTHER = Element.table("octet", (-1.0, -0.5, -0.25, 0.0, 0.125, 0.25, 0.5, 2.0))


class Dense(Nibbles):
    name = "octet_nibbles"
    dtypes = ("octet",)

    def decode(self, data, k):
        return super().decode(data, k).to(torch.uint8)


def to_octets(weight, format, scale_dtype, moments):
    n, groups = weight.shape[0], format.groups(weight.shape[1])
    scale = torch.full((groups, n), 0.5, dtype=scale_dtype)
    return OCTET.nearest(weight / 0.5), scale, None


def plugin(elements=(), formats=(), quantizers=()):
    class Plugin:
        @qcore.hookimpl
        def qcore_elements(self):
            return elements

        @qcore.hookimpl
        def qcore_formats(self):
            return formats

        @qcore.hookimpl
        def qcore_quantizers(self):
            return quantizers

    return Plugin()


@pytest.fixture
def add(monkeypatch):
    """``add(name, ...)`` installs a plugin; nothing of it is imported before somebody asks."""
    monkeypatch.setattr(elements, "_ELEMENTS", dict(elements._ELEMENTS))
    monkeypatch.setattr(elements, "_OWNERS", dict(elements._OWNERS))
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))
    monkeypatch.setattr(layouts, "_OWNERS", dict(layouts._OWNERS))
    monkeypatch.setattr(layouts, "_PLAIN_CODECS", dict(layouts._PLAIN_CODECS))
    monkeypatch.setattr(registered_quantizers, "_REGISTERED", {})
    added = []

    def install(name, **brings):
        registry.add(name, plugin(**brings))
        added.append(name)

    yield install
    for name in set(added) & set(registry.entries()):
        registry.remove(name)


def weight():
    torch.manual_seed(0)
    return torch.randn(5, 20)


class TestElements:
    def test_a_scheme_that_names_one_asks_plugins_first(self, add):
        add("chip", elements=[OCTET])
        scheme = qcore.Scheme.parse("wocteta16-g8")
        assert scheme.weight.element == OCTET
        assert str(scheme) == "wocteta16-g8"

    def test_linear_runs_with_it(self, add):
        add("chip", elements=[OCTET])
        quantized = qcore.quantize(weight(), "octet-g8", "mse")
        x = torch.randn(3, 20)
        assert torch.allclose(qcore.linear(x, quantized), x @ quantized.dequantize().t(), atol=1e-5)

    def test_a_layout_may_hold_an_element_of_a_plugin_not_loaded(self, add):
        add("alpha", formats=[Dense()])
        add("zeta", elements=[OCTET])
        assert registry.status("alpha").reason == ""
        assert str(qcore.Format.parse("octet/octet_nibbles")) == "octet/octet_nibbles"

    def test_two_plugins_may_need_each_other(self, add):
        second = Element.table("pair", (-1.0, 1.0))
        one = type("One", (Nibbles,), {"name": "one", "dtypes": ("pair",)})()
        two = type("Two", (Nibbles,), {"name": "two", "dtypes": ("octet",)})()
        add("alpha", elements=[OCTET], formats=[one])
        add("zeta", elements=[second], formats=[two])
        assert [registry.status(name).reason for name in ("alpha", "zeta")] == ["", ""]

    @pytest.mark.parametrize("first", ["alpha", "zeta"])
    def test_a_name_that_two_plugins_want_is_refused_with_both(self, add, first):
        add("alpha", elements=[OCTET])
        add("zeta", elements=[OTHER])
        second = {"alpha": "zeta", "zeta": "alpha"}[first]
        assert registry.status(first).reason == ""
        with pytest.warns(qcore.QcoreWarning, match=second):
            reason = registry.status(second).reason
        assert f"of plugin {second!r} is taken by plugin {first!r}" in reason

    def test_a_built_in_name_is_refused(self, add):
        add("chip", elements=[Element.table("nf4", tuple(range(16)))])
        with pytest.warns(qcore.QcoreWarning):
            assert "'nf4' of plugin 'chip' is taken by qcore" in registry.status("chip").reason

    def test_anything_else_than_an_element_fails_the_registration(self, add):
        add("chip", elements=["octet"])
        with pytest.warns(qcore.QcoreWarning):
            assert "qcore_elements returned 'octet', which is not a qcore.Element" in registry.status("chip").reason

    def test_an_unknown_one_is_named(self, add):
        add("chip", elements=[OCTET])
        with pytest.raises(FormatError, match=r"unknown element type 'octat'.* Did you mean 'octet'"):
            qcore.Format.parse("octat")


BROKEN = {
    "layout": {"formats": ["dense"]},
    "layout of an unknown element": {"formats": [type("L", (Nibbles,), {"name": "l", "dtypes": ("nope",)})()]},
    "quantizer": {"formats": [Dense()], "quantizers": [len]},
    "quantizer of an unknown element": {"quantizers": [Quantizer("q", to_octets, elements=("nope",))]},
    "quantizer with a built-in name": {"formats": [Dense()], "quantizers": [Quantizer("mse", to_octets)]},
}


class TestAllOrNothing:
    @pytest.mark.parametrize("name", BROKEN)
    def test_nothing_of_a_broken_plugin_stays(self, add, name):
        add("chip", elements=[OCTET], **BROKEN[name])
        with pytest.warns(qcore.QcoreWarning, match="registration failed"):
            assert registry.status("chip").state == "registration failed"
        assert "octet" not in elements.registered_elements()
        assert "octet_nibbles" not in layouts.registered_layouts()
        assert not registered_quantizers.registered_quantizers()


WRONG = {
    "raises": (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    "exits": (lambda *_: exec("raise SystemExit(3)"), "SystemExit"),
    "returns None": (lambda *_: None, "it returned a NoneType"),
    "wrong shape": (lambda w, *rest: to_octets(w[:, :8], *rest), "octet-g8/plain"),
    "other format": (lambda w, f, d, _: qcore.quantize(w, "int8"), "it returned int8/plain"),
    "infinite scale": (lambda w, *r: (to_octets(w, *r)[0], to_octets(w, *r)[1] * torch.inf, None), "scale"),
    "wide scale": (lambda w, f, d, m: to_octets(w, f, torch.bfloat16, m), "scales are torch.bfloat16"),
    "codes out of range": (lambda w, *r: (to_octets(w, *r)[0] + 9, *to_octets(w, *r)[1:]), "codes"),
}


class TestQuantizers:
    @pytest.fixture
    def octets(self, add):
        def install(function=to_octets, **more):
            add("chip", elements=[OCTET], quantizers=[Quantizer("half", function, elements=("octet",), **more)])

        return install

    def test_a_scheme_names_it(self, octets):
        octets()
        assert str(qcore.Scheme.parse("wocteta16-g8@half")) == "wocteta16-g8@half"

    def test_quantize_notes_its_name(self, octets):
        octets()
        made = qcore.quantize(weight(), "octet-g8", "half")
        assert made.quantizer == "half"
        assert torch.equal(made.codes(), OCTET.nearest(weight() / 0.5))
        assert made.scale.dtype == torch.float32

    @pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
    def test_it_sees_no_empty_weight(self, octets, shape):
        octets(lambda *_: pytest.fail("asked"))
        assert qcore.quantize(torch.empty(shape), "octet-g8", "half").quantizer == "half"

    def test_it_sees_no_meta_weight(self, octets):
        octets(lambda *_: pytest.fail("asked"))
        made = qcore.quantize(torch.empty(3, 20, device="meta"), "octet-g8", "half")
        assert (made.quantizer, made.device.type) == ("half", "meta")

    def test_it_cannot_change_the_weight(self, octets):
        octets(lambda w, *rest: to_octets(w.zero_(), *rest))
        mine = weight()
        qcore.quantize(mine, "octet-g8", "half")
        assert torch.equal(mine, weight())

    def test_a_qtensor_will_do(self, octets):
        octets(lambda w, fmt, dtype, _: qcore.QTensor.from_codes(*to_octets(w, fmt, dtype, None), fmt))
        assert qcore.quantize(weight(), "octet-g8", "half").quantizer == "half"

    def test_moments_reach_it(self, octets):
        seen = []
        octets(lambda w, f, d, moments: (seen.append(moments), to_octets(w, f, d, None))[1], needs_moments=True)
        assert qcore.Scheme.parse("wocteta16-g8@half").needs_moments
        with pytest.raises(FormatError, match="needs the second moments"):
            qcore.quantize(weight(), "octet-g8", "half")
        qcore.quantize(weight(), "octet-g8", "half", moments=torch.eye(20))
        assert torch.equal(seen[0], torch.eye(20))

    @pytest.mark.parametrize("name", WRONG)
    def test_a_wrong_result_names_quantizer_and_plugin(self, octets, name):
        function, says = WRONG[name]
        octets(function)
        with pytest.raises(FormatError, match="quantizer 'half' of plugin 'chip' failed for weight") as caught:
            qcore.quantize(weight(), "octet-g8", "half")
        assert says in str(caught.value)

    def test_nan_in_the_weight_is_the_users(self, octets):
        octets(lambda *_: pytest.fail("asked"))
        with pytest.raises(FormatError, match="holds NaN or Inf"):
            qcore.quantize(weight() / 0, "octet-g8", "half")

    def test_formats_that_it_does_not_make(self, octets):
        octets()
        for text in ("int4", "octet-fzp"):
            with pytest.raises(FormatError, match=r"'half' of plugin 'chip' does not support .*\nIt supports octet"):
                qcore.quantize(weight(), text, "half")

    def test_an_unknown_one_lists_those_of_plugins(self, octets):
        octets()
        with pytest.raises(FormatError, match=r"known: absmax.*half\. Did you mean 'half'"):
            qcore.Scheme.parse("w4a16@halv")

    @pytest.mark.parametrize("name", ["absmax", "shared"])
    def test_a_name_that_is_taken(self, add, name):
        add("alpha", quantizers=[Quantizer("shared", to_octets)])
        add("zeta", quantizers=[Quantizer(name, to_octets)])
        assert registry.status("alpha").reason == ""
        owner = "qcore" if name == "absmax" else "plugin 'alpha'"
        with pytest.warns(qcore.QcoreWarning):
            assert f"of plugin 'zeta' is taken by {owner}" in registry.status("zeta").reason

    @pytest.mark.parametrize(
        "fields",
        [
            ("Half", len),
            ("half", None),
            ("half", len, "none"),
            ("half", len, ()),
            ("half", len, (ZeroPoint.NONE,), (8,)),
        ],
    )
    def test_fields_are_checked(self, fields):
        with pytest.raises(FormatError, match="quantizer"):
            Quantizer(*fields)


class TestWithoutThePlugin:
    @pytest.fixture
    def forget(self, add):
        add("chip", elements=[OCTET], formats=[Dense()], quantizers=[Quantizer("half", to_octets)])

        def uninstall():
            registry.remove("chip")
            elements.forget_elements(["octet"], "chip")
            layouts.forget_layouts(["octet_nibbles"], "chip")
            layouts._PLAIN_CODECS.pop("octet", None)
            registered_quantizers.forget_quantizers(["half"], "chip")

        return uninstall

    @pytest.mark.parametrize(("layout", "missing"), [("plain", "element type 'octet'"), ("octet_nibbles", "octet")])
    def test_pickles_name_what_is_missing(self, forget, layout, missing):
        fmt = qcore.Format.parse(f"octet-g8/{layout}")
        made = qcore.quantize(weight(), fmt, "half")
        files = io.BytesIO()
        torch.save(made, files)
        pickled = pickle.dumps(fmt)
        forget()
        with pytest.raises(FormatError, match=rf"unknown .*{missing}[\s\S]*needs its plugin installed"):
            pickle.loads(pickled)
        files.seek(0)
        with pytest.raises(Exception, match=rf"unknown .*{missing}[\s\S]*needs its plugin installed"):
            torch.load(files)

    def test_a_checkpoint_names_what_is_missing(self, forget, tmp_path):
        model = torch.nn.Sequential(torch.nn.Linear(16, 8))
        qcore.quantize_(model, "wocteta16-g8@half")
        qcore.save(model, tmp_path / "model.safetensors")
        forget()
        with pytest.raises(QcoreError, match="octet") as caught:
            qcore.load_(torch.nn.Sequential(torch.nn.Linear(16, 8)), tmp_path / "model.safetensors")
        assert "plugin" in str(caught.value)


class TestKit:
    def test_cases_are_made_of_the_element(self, add):
        assert element_schemes() == []
        add("chip", elements=[OCTET], formats=[Dense()])
        registry.load_plugins()
        assert element_schemes() == [
            "wocteta16", "wocteta16-g64", "wocteta16-g64-fzp", "wocteta16-g64/octet_nibbles",
        ]  # fmt: skip
        found = [case.id for case in cases(contracts=["linear"]) if case.scheme == "wocteta16-g64"]
        dtypes = {name.split("-")[2] for name in found}
        assert dtypes == {"float32", "bfloat16", "float16"}
        shapes = [name.split("16-", 2)[-1] if "float16" in name else name.split("float32-")[-1] for name in found]
        assert len(shapes) == len(set(shapes)) > 40

    def test_integers_get_integer_zero_points(self, add):
        add("chip", elements=[Element.integer(3)])
        registry.load_plugins()
        assert element_schemes() == ["w3a16", "w3a16-g64", "w3a16-g64-fzp", "w3a16-g64-asym"]

    def test_tables_of_qcore_run_too(self):
        found = {case.scheme for case in cases()}
        assert {"wfp8a16", "wfp4a16-g32-e8m0", "wnf4a16-g64", "wfp8afp8"} <= found
