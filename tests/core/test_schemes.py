"""The text of a scheme, both ways."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcore.errors import FormatError
from qcore.formats import PLAIN, PLAIN_INT32, Format, ZeroPoint
from qcore.weights.activations import DynamicInt8, OutputInt8, StaticInt8
from qcore.weights.quantizers import QUANTIZERS
from qcore.weights.schemes import SCHEMES, Scheme

NUMBERS = st.tuples(st.floats(1e-30, 1e30), st.integers(-128, 127))
GIVEN = st.just({}) | st.just({"per_token": True}) | NUMBERS.map(lambda n: {"scale": n[0], "zero_point": n[1]})


@st.composite
def schemes(draw):
    dtype = draw(st.sampled_from(["int4", "int8"]))
    layout = draw(st.sampled_from([PLAIN, PLAIN_INT32])) if dtype == "int4" else PLAIN
    zero = draw(st.sampled_from(ZeroPoint))
    quantizer = draw(st.sampled_from(["", "mse", "minmax" if zero is not ZeroPoint.NONE else "absmax_full"]))
    kinds = [st.none(), st.builds(DynamicInt8, st.booleans()), GIVEN.map(lambda g: StaticInt8(**g))]
    activation = draw(st.one_of(kinds))
    output = draw(st.none() | GIVEN.map(lambda g: OutputInt8(**g))) if activation is not None else None
    return Scheme(Format(dtype, draw(st.none() | st.integers(1, 4096)), zero, layout), quantizer, activation, output)


class TestRoundTrip:
    @pytest.mark.parametrize("text", SCHEMES)
    def test_of_every_listed_scheme(self, text):
        scheme = Scheme.parse(text)
        assert str(scheme) == text
        assert Scheme.parse(scheme) is scheme

    @given(schemes())
    def test_of_any_combination(self, scheme):
        assert Scheme.parse(str(scheme)) == scheme
        assert str(Scheme.parse(str(scheme))) == str(scheme)
        assert hash(Scheme.parse(str(scheme))) == hash(scheme)

    @given(schemes())
    def test_of_blank_ones(self, scheme):
        assert Scheme.parse(str(scheme.blank())) == scheme.blank()
        assert scheme.blank().blank() == scheme.blank()
        assert "(" not in str(scheme.blank())

    @given(schemes())
    def test_copies_are_equal(self, scheme):
        assert copy.deepcopy(scheme) == scheme
        assert pickle.loads(pickle.dumps(scheme)) == scheme


class TestMeaning:
    @pytest.mark.parametrize(
        ("text", "weight", "activation", "output"),
        [
            ("w8a16", Format("int8"), None, None),
            ("w8a16-g32-asym", Format("int8", 32, ZeroPoint.INT), None, None),
            ("w4a16-g128", Format("int4", 128), None, None),
            ("w4a16-g32-fzp", Format("int4", 32, ZeroPoint.FLOAT), None, None),
            ("w8a8", Format("int8"), DynamicInt8(symmetric=True), None),
            ("w4a8-g32-asym-aasym", Format("int4", 32, ZeroPoint.INT), DynamicInt8(symmetric=False), None),
            ("w8a8-static", Format("int8"), StaticInt8(), None),
            ("w8a8-static(0.5,-3)", Format("int8"), StaticInt8(0.5, -3), None),
            ("w8a8-static(5e-05,0)", Format("int8"), StaticInt8(5e-5, 0), None),
            ("w8a8-o8", Format("int8"), DynamicInt8(), OutputInt8()),
            ("w8a8-static-o8(0.25,7)", Format("int8"), StaticInt8(), OutputInt8(0.25, 7)),
            ("w4a8-g32-token-o8t", Format("int4", 32), StaticInt8(per_token=True), OutputInt8(per_token=True)),
            ("w4a16-g32/plain_int32", Format("int4", 32, layout=PLAIN_INT32), None, None),
        ],
    )
    def test_parts(self, text, weight, activation, output):
        assert Scheme.parse(text) == Scheme(weight, "", activation, output)
        assert str(Scheme.parse(text)) == text

    def test_the_quantizer_is_named_and_the_default_left_out(self):
        assert Scheme.parse("w4a16-g32").quantizer == "mse"
        assert Scheme.parse("w8a16").quantizer == "absmax"
        assert Scheme.parse("w8a16-asym").quantizer == "minmax"
        assert Scheme.parse("w4a16-g32@absmax").quantizer == "absmax"
        assert str(Scheme.parse("w4a16-g32@mse")) == "w4a16-g32"
        assert str(Scheme.parse("w4a8-g32@gptq")) == "w4a8-g32@gptq"

    @pytest.mark.parametrize(
        ("text", "needs"),
        [
            ("w8a16", False),
            ("w8a8", False),
            ("w8a8-static", True),
            ("w8a8-static(0.1,0)", False),
            ("w8a8-static(0.1,0)-o8", True),
            ("w8a8-o8", True),
            ("w8a8-o8(0.1,0)", False),
            ("w8a8-token-o8t", False),
            ("w4a16-g32@gptq", True),
            ("w8a8-static(0.1,0)@gptq", True),
        ],
    )
    def test_needs_calibration(self, text, needs):
        assert Scheme.parse(text).needs_calibration is needs

    def test_every_row_of_the_design_is_listed(self):
        rows = "w8a16 w8a16-asym w8a16-g32 w8a16-g32-asym w4a16 w4a16-g128 w4a16-g128-asym w8a8 w8a8-g64 w4a8 w4a8-g32"
        assert {*rows.split(), "w4a8-g32-asym", "w8a8-static"} <= set(SCHEMES)
        assert len(set(SCHEMES)) == len(SCHEMES)


WRONG = [
    "", "w4", "w3a16", "w4a4", "W8A8", " w8a8", "w8a8\n", "w4a16-128", "w4a16-g", "w4a16-asym-g32", "w8a8-static(1e,1)",
    "w8a8-static(0.1)", "w8a8-static(inf,0)", "w8a8-static(nan,0)", "w8a8-aasym-static",
    "w4a16-g" + "1" * 5000, None, 8,
]  # fmt: skip


class TestErrors:
    @pytest.mark.parametrize("text", WRONG)
    def test_list_what_is_possible(self, text):
        with pytest.raises(FormatError, match="cannot read the scheme") as caught:
            Scheme.parse(text)
        assert "[-gGROUP] [-asym|-fzp] [-e8m0|-e4m3|-e4m3d] [-aasym|-static" in str(caught.value)
        assert all(scheme in str(caught.value) for scheme in ("w8a16", "w4a16-g128", "wfp8afp8", "nf4"))
        assert max(map(len, str(caught.value).splitlines())) <= 250
        assert len(str(caught.value).splitlines()) <= 4 or text == "w8a8\n"

    @pytest.mark.parametrize(
        ("text", "meant"),
        [
            ("w4a16-g128-sym", "w4a16-g128-asym"),
            ("W8A8", "w8a8"),
            ("w8a8 ", "w8a8"),
            ("W4A16-G48", "w4a16-g48"),
            ("w4a16_g32", "w4a16-g32"),
            ("w4a16-g3x", "w4a16-g32"),
            ("w4", "w4a16-g128"),
            ("int8", "w8a16"),
        ],
    )
    def test_suggest(self, text, meant):
        with pytest.raises(FormatError, match=f"Did you mean '{meant}'"):
            Scheme.parse(text)

    @pytest.mark.parametrize("text", ["w4a16-static", "w8a16-aasym", "w8a16-o8", "w8a16-token"])
    def test_float_activations_have_no_parameters(self, text):
        with pytest.raises(FormatError, match="a16 means float activations"):
            Scheme.parse(text)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("w4a16-g0", "positive integer"),
            ("w4a16@foo", f"known: {', '.join(QUANTIZERS)}"),
            ("w4a16@minmax", "use one of: absmax, absmax_full, mse"),
            ("w4a16/plane", "known: .*plain_int32"),
            ("w8a16/plain_int32", "Use layout 'plain'"),
            ("w8a8-static(0.0,1)", "positive and finite"),
            ("w8a8-static(0.1,200)", r"-128..127"),
            ("w8a8-static(1e999,0)", "positive and finite"),
            ("w8a8-o8t(0.1,0)", "omit scale"),
            ("w8a8-token(0.1,0)", "omit scale"),
        ],
    )
    def test_parts_that_mean_nothing(self, text, says):
        with pytest.raises(FormatError, match=says):
            Scheme.parse(text)

    def test_int8_output_needs_int8_activations(self):
        with pytest.raises(FormatError, match="needs int8 activations"):
            Scheme(Format("int8"), output=OutputInt8(0.1))
