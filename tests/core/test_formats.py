"""The bytes, spelled out by hand, and the text form of a format."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcore.errors import FormatError
from qcore.formats import (
    PLAIN,
    PLAIN_INT32,
    Format,
    Layout,
    ZeroPoint,
    find_layout,
    grouped_int4,
    layouts,
    register_layout,
)
from qcore.formats.bits import (
    interleave,
    pack_columns,
    pack_nibbles,
    unpack_columns,
    unpack_nibbles,
    unpack_unsigned_nibbles,
)

INT4, INT8 = Format("int4"), Format("int8")


def codes(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8)


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


class TestNibbles:
    """Codes as 16-bit words: the same bytes as one nibble at a time."""

    @staticmethod
    def check(codes):
        data = pack_columns(codes)
        assert torch.equal(data, pack_nibbles(codes[:, ::2], codes[:, 1::2]))
        for signed_, unpack in ((True, unpack_nibbles), (False, unpack_unsigned_nibbles)):
            found = unpack_columns(data, signed=signed_)
            assert found.dtype == (torch.int8 if signed_ else torch.uint8)
            assert torch.equal(found, interleave(*unpack(data)))

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
    @pytest.mark.parametrize("shape", [(1, 2), (3, 6), (0, 4), (4, 0), (257, 1022)])
    def test_of_any_value(self, shape, dtype):
        self.check(torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype))

    def test_at_an_odd_address(self):
        memory = torch.randint(-8, 8, (65,), dtype=torch.int8)
        self.check(memory[1:].view(4, 16))
        self.check(memory.view(1, 65)[:, 1:])
        self.check(memory[:63].view(3, 21)[:, 1:])

    def test_of_any_strides(self):
        wide = torch.randint(-8, 8, (6, 64), dtype=torch.int8)
        for codes in (wide[:, ::8], wide.t(), wide[::2], wide[:1].expand(3, 64), wide[:, :1].expand(6, 4), wide[:, :2]):
            self.check(codes)
        deep = torch.randint(-8, 8, (4, 6, 32), dtype=torch.int8)
        self.check(deep[:, :, 0])  # flattens to a view of stride 32
        self.check(deep[:, 0, :1].expand(4, 2))

    def test_under_another_default_device(self):
        codes = torch.randint(-8, 8, (3, 8), dtype=torch.int8)
        with torch.device("meta"):
            data = pack_columns(codes)
            found = unpack_columns(data, signed=True)
        assert torch.equal(found, codes)

    def test_of_signed_bytes(self):
        data = torch.randint(0, 256, (3, 8), dtype=torch.uint8)
        assert torch.equal(unpack_columns(data.view(torch.int8), signed=True), unpack_columns(data, signed=True))


class TestBytes:
    def test_plain_int4_low_nibble_is_even_k(self):
        # k:    0   1    2   3
        data = INT4.codec.encode(codes([1, -1, 7, -8]))
        assert data.dtype == torch.uint8
        assert data.tolist() == [[0xF1, 0x87]]

    def test_plain_int4_pads_odd_k_with_code_0(self):
        assert INT4.codec.encode(codes([-1, 2, -3])).tolist() == [[0x2F, 0x0D]]

    def test_plain_int8_is_the_codes(self):
        data = INT8.codec.encode(codes([-128, 127, 0]))
        assert data.dtype == torch.int8
        assert data.tolist() == [[-128, 127, 0]]

    def test_plain_int8_is_contiguous(self):
        assert INT8.codec.encode(codes([1, 2], [3, 4]).t()).is_contiguous()

    def test_plain_int32_holds_unsigned_codes_lowest_k_first(self):
        data = PLAIN_INT32.for_dtype("int4").encode(codes([-8, -7, -6, -5, -4, -3, -2, 7]))
        assert data.dtype == torch.int32
        assert data.tolist() == [[signed(0xF6543210)]]

    def test_plain_int32_pads_with_code_8(self):
        data = PLAIN_INT32.encode(codes([-8] * 9))
        assert data.tolist() == [[0, signed(0x88888880)]]

    def test_plain_int32_stores_the_zero_point_plus_8(self):
        zero = codes([-8, 0, 7])
        assert PLAIN_INT32.encode_zero(zero).tolist() == [[0, 8, 15]]
        assert PLAIN_INT32.encode_zero(zero).dtype == torch.int8
        assert torch.equal(PLAIN_INT32.decode_zero(PLAIN_INT32.encode_zero(zero)), zero)
        assert torch.equal(PLAIN.encode_zero(zero), zero)

    def test_what_is_in_the_padding_is_never_read(self):
        assert INT4.codec.decode(torch.tensor([[0xF1, 0x9D]], dtype=torch.uint8), 3).tolist() == [[1, -1, -3]]
        assert PLAIN_INT32.decode(torch.tensor([[0x12345670]], dtype=torch.int32), 1).tolist() == [[-8]]

    @pytest.mark.parametrize("layout", [PLAIN, PLAIN_INT32])
    def test_every_int4_code_in_every_place(self, layout):
        for place in range(8):
            row = torch.zeros(16, 8, dtype=torch.int8)
            row[:, place] = torch.arange(-8, 8)
            assert torch.equal(layout.decode(layout.encode(row), 8), row)

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
    @pytest.mark.parametrize("text", ["int4/plain", "int8/plain", "int4/plain_int32"])
    def test_empty(self, text, shape):
        codec = Format.parse(text).codec
        data = codec.encode(torch.zeros(shape, dtype=torch.int8))
        codec.check(data, *shape)
        assert codec.decode(data, shape[1]).shape == shape

    @given(st.integers(1, 5), st.integers(1, 40), st.randoms(use_true_random=False))
    @settings(max_examples=60, deadline=None)
    def test_bytes_equal_plain_python(self, n, k, random):
        table = [[random.randint(-8, 7) for _ in range(k)] for _ in range(n)]
        plain = [
            [(row[j] & 15) | ((row[j + 1] & 15 if j + 1 < k else 0) << 4) for j in range(0, k, 2)] for row in table
        ]
        words = [
            [signed(sum(((row[j + i] if j + i < k else 0) + 8) << (4 * i) for i in range(8))) for j in range(0, k, 8)]
            for row in table
        ]
        for layout, expected in ((PLAIN, plain), (PLAIN_INT32, words)):
            data = layout.encode(codes(*table))
            assert data.tolist() == expected
            assert layout.decode(data, k).tolist() == table


class TestText:
    @pytest.mark.parametrize(
        ("fmt", "text"),
        [
            (Format("int8"), "int8/plain"),
            (Format("int4", 128, ZeroPoint.INT), "int4-g128-asym/plain"),
            (Format("int4", 32, ZeroPoint.FLOAT), "int4-g32-fzp/plain"),
            (Format("int4", 1, ZeroPoint.NONE, PLAIN_INT32), "int4-g1/plain_int32"),
            (Format("int8", None, ZeroPoint.INT), "int8-asym/plain"),
        ],
    )
    def test_round_trip(self, fmt, text):
        assert str(fmt) == text
        assert Format.parse(text) == fmt

    def test_layout_may_be_left_out(self):
        assert Format.parse("int4-g32") == Format("int4", 32)

    @given(
        st.sampled_from(["int4", "int8"]),
        st.none() | st.integers(1, 10**6),
        st.sampled_from(ZeroPoint),
        st.sampled_from([PLAIN, PLAIN_INT32]),
    )
    def test_round_trip_of_any(self, dtype, group, zero, layout):
        if dtype not in layout.dtypes:
            with pytest.raises(FormatError, match="cannot hold int8"):
                Format(dtype, group, zero, layout)
            return
        fmt = Format(dtype, group, zero, layout)
        assert Format.parse(str(fmt)) == fmt
        assert hash(Format.parse(str(fmt))) == hash(fmt)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("int3", "known: int4, int8"),
            ("nf5", "unknown element type 'nf5'"),
            ("int4-32", "-gGROUP"),
            ("", "int4-g128-asym/plain"),
            ("int4-g0", "positive integer"),
            ("int4-g" + "9" * 5000, "cannot read"),
            ("int4/plane", r"known: .*plain.*Did you mean 'plain'"),
            ("int4/PLAIN", "Did you mean 'plain'"),
            ("int8/plain_int32", "Use layout 'plain'"),
            ("int4\n", "cannot read"),
            (None, "cannot read"),
        ],
    )
    def test_errors_say_what_is_possible(self, text, says):
        with pytest.raises(FormatError, match=says):
            Format.parse(text)

    @pytest.mark.parametrize("group", [0, -1, True, 32.0, "32"])
    def test_group_size(self, group):
        with pytest.raises(FormatError, match="group_size"):
            Format("int4", group)

    def test_wrong_kinds_of_argument(self):
        with pytest.raises(FormatError, match="ZeroPoint"):
            Format("int4", 32, "asym")
        with pytest.raises(FormatError, match="PLAIN"):
            Format("int4", 32, layout="plain")


class TestFormat:
    def test_code_range_and_bits(self):
        assert (INT4.code_range, INT4.bits) == ((-8, 7), 4)
        assert (INT8.code_range, INT8.bits) == ((-128, 127), 8)

    @pytest.mark.parametrize(("k", "groups"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
    def test_groups_are_ceil_k_over_g(self, k, groups):
        assert Format("int4", 32).groups(k) == groups
        assert INT4.groups(k) == 1

    def test_a_group_is_never_longer_than_k(self):
        assert Format("int4", 128).group(5) == 5
        assert Format("int4", 128).group(300) == 128
        assert INT4.group(300) == 300

    def test_grouped_int4(self):
        assert grouped_int4(64) == Format("int4", 64)
        assert grouped_int4(64, symmetric=False) == Format("int4", 64, ZeroPoint.INT)
        assert grouped_int4(64, layout=PLAIN_INT32).layout is PLAIN_INT32

    @pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
    @pytest.mark.parametrize("fmt", [INT8, grouped_int4(32, False, PLAIN_INT32)])
    def test_equal_after_copy_and_pickle(self, fmt, again):
        found = again(fmt)
        assert found == fmt
        assert hash(found) == hash(fmt)
        assert found.layout is fmt.layout

    def test_an_edited_pickle_is_refused(self):
        edited = pickle.dumps(Format("int4", 32)).replace(b"int4", b"int3")
        with pytest.raises(FormatError, match="int3"):
            pickle.loads(edited)


class HighFirst(Layout):
    """As PLAIN int4, with the even k in the high nibble."""

    name = "high_first"

    def encode(self, codes):
        flipped = PLAIN.encode(codes)
        return (flipped << 4) | (flipped >> 4)

    def decode(self, data, k):
        return PLAIN.decode((data << 4) | (data >> 4), k)

    def check(self, data, n, k):
        PLAIN.check(data, n, k)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(layouts, "_LAYOUTS", dict(layouts._LAYOUTS))


class TestThirdPartyLayouts:
    def test_registered_and_found(self, registry):
        layout = HighFirst()
        register_layout(layout)
        fmt = Format.parse("int4-g32/high_first")
        assert fmt.layout is layout
        assert fmt.codec.encode(codes([1, -1])).tolist() == [[0x1F]]
        assert repr(layout) == "<Layout high_first>"
        assert pickle.loads(pickle.dumps(fmt)) == fmt

    def test_a_second_instance_means_the_same(self, registry):
        register_layout(HighFirst())
        register_layout(HighFirst())
        assert Format("int4", layout=HighFirst()) == Format("int4", layout=HighFirst())
        assert len({Format("int4", layout=HighFirst()), Format.parse("int4/high_first")}) == 1
        assert Format("int4", layout=HighFirst()) != Format("int4")

    def test_names_are_not_taken_twice(self, registry):
        other = type("Other", (HighFirst,), {"name": "plain"})()
        with pytest.raises(FormatError, match="'plain' is taken by"):
            register_layout(other)
        assert find_layout("plain") is PLAIN

    @pytest.mark.parametrize("name", ["", "Upper", "with-dash", "9lives", None, "a/b"])
    def test_bad_names(self, registry, name):
        with pytest.raises(FormatError, match="lower-case"):
            register_layout(type("Bad", (HighFirst,), {"name": name})())

    def test_bad_dtypes(self, registry):
        with pytest.raises(FormatError, match="int4, int8"):
            register_layout(type("Bad", (HighFirst,), {"dtypes": ("int2",)})())

    @pytest.mark.parametrize("thing", [HighFirst, "high_first", None])
    def test_only_instances_of_layout(self, registry, thing):
        with pytest.raises(FormatError, match="subclass qcore"):
            register_layout(thing)

    def test_an_unknown_name_is_looked_for_in_plugins_first(self, registry, monkeypatch):
        monkeypatch.setattr(layouts, "load_plugin_layouts", lambda: register_layout(HighFirst()))
        assert find_layout("high_first") == HighFirst()
        with pytest.raises(FormatError, match="plugin installed"):
            find_layout("nowhere")

    def test_holds_no_int8_unless_it_says_so(self):
        with pytest.raises(FormatError, match="cannot hold int8"):
            Format("int8", layout=HighFirst())
