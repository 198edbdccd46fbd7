"""`QTensor`: validation, lossless conversion, cutting and joining, and what has no values."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from qcore.errors import FormatError
from qcore.formats import PLAIN, PLAIN_INT32, Format, ZeroPoint
from qcore.weights.qtensor import QTensor, dequantize_codes, has_values


def make(text: str, n: int = 3, k: int = 77, seed: int = 0, scale_dtype: torch.dtype = torch.float32) -> QTensor:
    fmt = Format.parse(text)
    rng = torch.Generator().manual_seed(seed)
    low, high = fmt.code_range
    groups = fmt.groups(k)
    codes = torch.randint(low, high + 1, (n, k), generator=rng).to(torch.int8)
    scale = (torch.rand(groups, n, generator=rng) + 0.1).to(scale_dtype)
    zero = None
    if fmt.zero is ZeroPoint.INT:
        zero = torch.randint(low, high + 1, (groups, n), generator=rng).to(torch.int8)
    if fmt.zero is ZeroPoint.FLOAT:
        zero = torch.randn(groups, n, generator=rng).to(scale_dtype)
    return QTensor.from_codes(codes, scale, zero, fmt, "made")


def same(a: QTensor, b: QTensor) -> bool:
    mine, other = a.tensors(), b.tensors()
    return (
        (a.format, tuple(a.shape), a.quantizer) == (b.format, tuple(b.shape), b.quantizer)
        and list(mine) == list(other)
        and all(mine[name].dtype == other[name].dtype and torch.equal(mine[name], other[name]) for name in mine)
    )


def by_hand(qt: QTensor) -> list[list[float]]:
    """The dense weight, one element at a time."""
    n, k = qt.shape
    g = qt.format.group_size or max(k, 1)
    codes, scale, zero = qt.codes().tolist(), qt.scale.double().tolist(), qt.integer_zero()
    if qt.format.zero is ZeroPoint.INT:
        whole = zero.tolist()
        return [[(codes[i][j] - whole[j // g][i]) * scale[j // g][i] for j in range(k)] for i in range(n)]
    added = qt.zero.double().tolist() if qt.zero is not None else [[0.0] * n] * (k // g + 1)
    return [[codes[i][j] * scale[j // g][i] + added[j // g][i] for j in range(k)] for i in range(n)]


TEXTS = [
    "int8",
    "int8-g32-asym",
    "int8-g16-fzp",
    "int4",
    "int4-g32",
    "int4-g32-asym",
    "int4-g7-fzp",
    "int4-asym",
    "int4-g32-asym/plain_int32",
    "int4-g128/plain_int32",
]


class TestDequantize:
    @pytest.mark.parametrize("text", TEXTS)
    @pytest.mark.parametrize("k", [1, 5, 32, 77])
    def test_every_element_by_hand(self, text, k):
        qt = make(text, k=k)
        dense = qt.dequantize(torch.float64)
        assert torch.allclose(dense, torch.tensor(by_hand(qt), dtype=torch.float64), rtol=1e-12, atol=1e-12)

    def test_a_written_out_example(self):
        codes = torch.tensor([[1, 2, 3], [-8, 7, 0]], dtype=torch.int8)
        scale = torch.tensor([[1.0, 10.0], [0.5, 0.25]])
        zero = torch.tensor([[1, -8], [2, 0]], dtype=torch.int8)
        qt = QTensor.from_codes(codes, scale, zero, Format("int4", 2, ZeroPoint.INT))
        assert qt.dequantize().tolist() == [[0.0, 1.0, 0.5], [0.0, 150.0, 0.0]]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_computed_in_float32_and_rounded_once(self, dtype):
        qt = make("int8-asym", scale_dtype=torch.bfloat16)
        exact = qt.dequantize(torch.float32)
        assert torch.equal(qt.dequantize(dtype), exact.to(dtype))

    def test_default_dtype_is_the_scales(self):
        qt = make("int8", scale_dtype=torch.float16)
        assert qt.dtype == qt.dequantize().dtype == torch.float16

    def test_huge_groups_cost_nothing(self):
        qt = make(f"int4-g{10**15}-asym", k=5)
        assert torch.allclose(qt.dequantize(torch.float64), torch.tensor(by_hand(qt), dtype=torch.float64))

    def test_dequantize_codes_takes_transposed_codes(self):
        codes, scale = torch.arange(6, dtype=torch.int8).view(3, 2).t(), torch.ones(2, 2)
        assert dequantize_codes(codes, scale, None, None, 2).tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


class TestConvert:
    @given(
        n=st.integers(0, 4),
        k=st.integers(0, 70),
        group=st.sampled_from(["", "-g1", "-g8", "-g32", "-g33"]),
        zero=st.sampled_from(["", "-asym", "-fzp"]),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=80, deadline=None)
    def test_there_and_back_is_the_same_bytes(self, n, k, group, zero, seed):
        plain = make(f"int4{group}{zero}", n, k, seed)
        there = plain.convert(PLAIN_INT32)
        assert there.format.layout is PLAIN_INT32
        assert same(there.convert(PLAIN), plain)
        assert torch.equal(there.codes(), plain.codes())
        assert torch.equal(there.dequantize(torch.float64), plain.dequantize(torch.float64))

    def test_the_integer_zero_point_moves_with_the_codes(self):
        plain = make("int4-g32-asym")
        there = plain.convert(PLAIN_INT32)
        assert torch.equal(there.zero, plain.zero + 8)
        assert torch.equal(there.integer_zero(), plain.zero)

    def test_the_float_zero_point_stays(self):
        plain = make("int4-g32-fzp")
        assert torch.equal(plain.convert(PLAIN_INT32).zero, plain.zero)
        assert plain.integer_zero() is None

    def test_to_its_own_layout_is_itself(self):
        qt = make("int4")
        assert qt.convert(PLAIN) is qt

    def test_int8_has_no_int32_words(self):
        with pytest.raises(FormatError, match="cannot hold int8"):
            make("int8").convert(PLAIN_INT32)


class TestValidation:
    def build(self, **changes):
        qt = make("int4-g32-asym")
        fields = {"data": qt.data, "scale": qt.scale, "zero": qt.zero, "shape": (3, 77), "format": qt.format}
        return QTensor(**{**fields, **changes})

    def test_the_base_is_fine(self):
        assert self.build().quantizer is None

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"data": torch.zeros(3, 38, dtype=torch.uint8)}, r"needs torch.uint8 and \(3, 39\)"),
            ({"data": torch.zeros(3, 39, dtype=torch.int8)}, "data has dtype torch.int8"),
            ({"data": [[1]]}, "data is a list"),
            ({"scale": torch.ones(3, 2)}, r"\(G, N\) = \(3, 3\)"),
            ({"scale": torch.ones(3, 3, dtype=torch.float64)}, "float32 or bfloat16 or float16"),
            ({"scale": torch.tensor([[1.0, float("nan"), 1.0]] * 3)}, "scale holds NaN or Inf"),
            ({"scale": torch.full((3, 3), float("inf"))}, "scale holds NaN or Inf"),
            ({"zero": None}, "zero INT, but no zero point"),
            ({"zero": torch.zeros(3, 3)}, "zero has dtype torch.float32"),
            ({"zero": torch.zeros(2, 3, dtype=torch.int8)}, r"\(3, 3\)"),
            ({"zero": torch.full((3, 3), 8, dtype=torch.int8)}, r"zero points span 8..8; int4 codes allow -8..7"),
            ({"zero": torch.full((3, 3), -9, dtype=torch.int8)}, "span -9..-9"),
            ({"shape": (3, 77, 1, 1)}, r"shape \(N, K\)"),
            ({"shape": (-3, 77)}, r"\(-3, 39\)"),
            ({"shape": (3, 80)}, "data has dtype"),
            ({"format": Format("int4", 32)}, "zero NONE, but a zero point was given"),
            ({"format": "int4-g32-asym"}, r"Format.parse"),
            ({"scale": torch.ones(3, 3, device="meta")}, "data on cpu, scale on meta, zero on cpu"),
        ],
    )
    def test_refused(self, changes, says):
        with pytest.raises(FormatError, match=says):
            self.build(**changes)

    def test_float_zero_must_be_finite_and_of_the_scales_dtype(self):
        qt = make("int4-g32-fzp")
        with pytest.raises(FormatError, match="zero holds NaN or Inf"):
            QTensor(qt.data, qt.scale, qt.zero / 0, qt.shape, qt.format)
        with pytest.raises(FormatError, match="zero has dtype"):
            QTensor(qt.data, qt.scale, qt.zero.half(), qt.shape, qt.format)

    def test_stored_zero_of_plain_int32_is_0_to_15(self):
        qt = make("int4-asym/plain_int32")
        for stored in (16, -1, 127):
            with pytest.raises(FormatError, match="zero points span"):
                QTensor(qt.data, qt.scale, torch.full((1, 3), stored, dtype=torch.int8), qt.shape, qt.format)

    def test_codes_are_not_wrapped_into_range(self):
        scale = torch.ones(1, 2)
        with pytest.raises(FormatError, match=r"codes span 8..8; int4 allows -8..7"):
            QTensor.from_codes(torch.full((2, 4), 8, dtype=torch.int8), scale, None, Format("int4"))
        for wrong in (torch.full((2, 4), 300), torch.full((2, 4), 0.7), torch.zeros(4, dtype=torch.int8)):
            with pytest.raises(FormatError, match="they must be int8 of shape"):
                QTensor.from_codes(wrong, scale, None, Format("int8"))

    def test_range_of_k_0(self):
        empty = QTensor.from_codes(torch.zeros(3, 0, dtype=torch.int8), torch.ones(0, 3), None, Format("int4", 32))
        assert empty.dequantize().shape == (3, 0)
        assert make("int4", n=0).dequantize().shape == (0, 77)
        assert make("int8", k=0).dequantize().shape == (3, 0)


class TestNarrow:
    @pytest.mark.parametrize("text", TEXTS)
    def test_rows(self, text):
        qt = make(text, n=6)
        for start, length in ((0, 6), (1, 3), (5, 1), (6, 0), (0, 0)):
            part = qt.narrow(0, start, length)
            assert torch.equal(part.dequantize(), qt.dequantize()[start : start + length])
            assert all(t.is_contiguous() for t in part.tensors().values())
        assert same(qt.narrow(-2, 0, 6), qt)

    @pytest.mark.parametrize("text", ["int8-g32-asym", "int4-g32", "int4-g32-fzp", "int4-g32-asym/plain_int32"])
    def test_columns_at_group_borders(self, text):
        qt = make(text)
        for start, stop in ((0, 32), (32, 64), (32, 77), (64, 77), (0, 77), (32, 32), (0, 0), (77, 77)):
            part = qt.narrow(1, start, stop - start)
            assert torch.equal(part.dequantize(), qt.dequantize()[:, start:stop])
            assert all(t.is_contiguous() for t in part.tensors().values())
        assert same(qt.narrow(-1, 0, 77), qt)

    @pytest.mark.parametrize(
        ("start", "length", "cut", "below", "above"),
        [(1, 64, 1, 0, 32), (16, 48, 16, 0, 32), (0, 48, 48, 32, 64), (0, 70, 70, 64, 77), (65, 12, 65, 64, 77)],
    )
    def test_columns_off_the_borders_name_the_nearest_cuts(self, start, length, cut, below, above):
        with pytest.raises(FormatError, match=rf"cannot cut K at {cut}: groups of 32.*\n.* {below} and {above}\."):
            make("int4-g32").narrow(1, start, length)

    @pytest.mark.parametrize("text", ["int8", "int4", "int4-asym/plain_int32"])
    def test_per_channel_columns_are_cut_anywhere(self, text):
        qt = make(text)
        part = qt.narrow(1, 3, 10)
        assert torch.equal(part.dequantize(), qt.dequantize()[:, 3:13])
        assert torch.equal(part.scale, qt.scale)

    @pytest.mark.parametrize(("dim", "start", "length"), [(0, 0, 4), (0, -1, 1), (1, 64, 14), (1, 0, -1)])
    def test_outside(self, dim, start, length):
        with pytest.raises(FormatError, match=r"exceeds the weight of shape \(3, 77\)"):
            make("int4-g32").narrow(dim, start, length)

    def test_dim(self):
        with pytest.raises(FormatError, match="dim is 2"):
            make("int4").narrow(2, 0, 1)


class TestCat:
    @pytest.mark.parametrize("text", TEXTS)
    def test_rows(self, text):
        a, b = make(text, n=2), make(text, n=5, seed=1)
        joined = QTensor.cat([a, b])
        assert torch.equal(joined.dequantize(), torch.cat([a.dequantize(), b.dequantize()]))
        assert joined.quantizer == "made"

    @pytest.mark.parametrize("text", ["int8-g32-asym", "int4-g32-fzp", "int4-g32-asym/plain_int32"])
    def test_columns(self, text):
        a, b = make(text, k=64), make(text, k=45, seed=1)
        joined = QTensor.cat([a, b], dim=1)
        assert torch.equal(joined.dequantize(), torch.cat([a.dequantize(), b.dequantize()], dim=1))
        assert joined.shape == (3, 109)

    @given(cut=st.integers(0, 4), rows=st.booleans(), zero=st.sampled_from(["", "-asym", "-fzp"]))
    @settings(max_examples=30, deadline=None)
    def test_undoes_narrow(self, cut, rows, zero):
        qt = make(f"int4-g16{zero}", n=4, k=70)
        dim, at, whole = (0, cut, 4) if rows else (1, 16 * cut, 70)
        assert same(QTensor.cat([qt.narrow(dim, 0, at), qt.narrow(dim, at, whole - at)], dim), qt)

    def test_a_ragged_part_may_only_be_last(self):
        ragged, full = make("int4-g32", k=40), make("int4-g32", k=64)
        assert QTensor.cat([full, ragged], 1).shape == (3, 104)
        with pytest.raises(FormatError, match="K=40, which does not end at a group of 32"):
            QTensor.cat([ragged, full], 1)

    def test_per_channel_columns_must_share_their_scales(self):
        qt = make("int4-asym", k=64)
        halves = [qt.narrow(1, 0, 31), qt.narrow(1, 31, 33)]
        assert same(QTensor.cat(halves, 1), qt)
        with pytest.raises(FormatError, match="their scales differ"):
            QTensor.cat([make("int4"), make("int4", seed=1)], 1)
        other_zero = QTensor.from_codes(qt.codes(), qt.scale, -qt.zero.clamp(-7, 7) - 1, qt.format)
        with pytest.raises(FormatError, match="their scales differ"):
            QTensor.cat([qt, other_zero], 1)

    def test_different_formats_or_shapes(self):
        with pytest.raises(FormatError, match=r"int4-g32/plain \(3, 77\) and int8/plain \(3, 77\)"):
            QTensor.cat([make("int4-g32"), make("int8")])
        with pytest.raises(FormatError, match="the other dimension"):
            QTensor.cat([make("int4", k=77), make("int4", k=76)])
        with pytest.raises(FormatError, match="at least one"):
            QTensor.cat([])

    def test_quantizers_that_differ_are_forgotten(self):
        a = make("int8")
        b = QTensor(a.data, a.scale, a.zero, a.shape, a.format, "absmax")
        assert QTensor.cat([a, b]).quantizer is None
        assert QTensor.cat([a, b], 1).quantizer is None


class TestTensorManners:
    def test_sizes(self):
        qt = make("int4-g32-asym")
        assert (qt.shape, qt.dim(), qt.numel(), qt.size(), qt.size(-1)) == ((3, 77), 2, 231, qt.shape, 77)
        assert qt.nbytes == 3 * 39 + 9 * 4 + 9
        assert qt.device == torch.device("cpu")
        assert list(qt.tensors()) == ["data", "scale", "zero"]
        assert list(make("int8").tensors()) == ["data", "scale"]

    def test_repr_says_format_and_quantizer(self):
        text = repr(make("int4-g32"))
        assert "int4-g32/plain" in text
        assert "'made'" in text
        assert len(text.splitlines()) == 1

    def test_torch_functions_say_what_to_do(self):
        with pytest.raises(TypeError, match=r"'linear'.*\n.*qcore.linear"):
            torch.nn.functional.linear(torch.zeros(1, 77), make("int4"))
        for product in (lambda x, w: x @ w, lambda x, w: w @ x):
            with pytest.raises(TypeError, match=r"matmul'.*\n.*exclude="):
                product(torch.zeros(77, 77), make("int4"))

    def test_frozen_and_compared_by_identity(self):
        qt = make("int4")
        with pytest.raises(AttributeError):
            qt.data = None
        assert qt == qt  # noqa: PLR0124
        assert qt != make("int4")
        assert len({qt, qt}) == 1

    def test_to_moves_and_never_casts(self):
        qt = make("int4-g32-asym")
        moved = qt.to("meta")
        assert (moved.device.type, moved.scale.dtype, moved.zero.dtype) == ("meta", torch.float32, torch.int8)
        assert same(qt.to(torch.device("cpu")), qt)
        with pytest.raises(FormatError, match="cannot be cast to"):
            qt.to(torch.float16)

    def test_map_must_keep_dtypes(self):
        with pytest.raises(FormatError, match="data has dtype"):
            make("int4").map(lambda t: t.float())

    @pytest.mark.parametrize("text", TEXTS)
    def test_copy_and_pickle(self, text):
        qt = make(text)
        assert same(copy.copy(qt), qt)
        assert same(pickle.loads(pickle.dumps(qt)), qt)
        deep = copy.deepcopy(qt)
        assert same(deep, qt)
        assert deep.data.data_ptr() != qt.data.data_ptr()

    @pytest.mark.parametrize("text", TEXTS)
    def test_torch_save_and_load_of_weights_only(self, text):
        qt, file = make(text), io.BytesIO()
        torch.save(qt, file)
        file.seek(0)
        assert same(torch.load(file, weights_only=True), qt)

    def test_a_pickle_that_does_not_fit_together_is_refused(self):
        qt = make("int4-g32")
        hostile, file = copy.copy(qt), io.BytesIO()
        hostile.__dict__["shape"] = torch.Size((3, 1 << 30))
        torch.save(hostile, file)
        file.seek(0)
        with pytest.raises((FormatError, pickle.UnpicklingError)):
            torch.load(file, weights_only=True)
        with pytest.raises(FormatError, match="data has dtype"):
            pickle.loads(pickle.dumps(hostile))


class TestWithoutValues:
    @pytest.mark.parametrize("text", TEXTS)
    def test_meta_goes_everywhere(self, text):
        qt = make(text, k=96).to("meta")
        assert not has_values(qt.data)
        assert qt.dequantize(torch.bfloat16).shape == (3, 96)
        assert qt.narrow(0, 1, 2).shape == (2, 96)
        assert QTensor.cat([qt, qt]).shape == (6, 96)
        g = qt.format.group_size
        if g is None or 96 % g == 0:
            assert QTensor.cat([qt, qt], 1).shape == (3, 192)
        if qt.format.dtype == "int4":
            back = qt.convert(PLAIN_INT32).convert(PLAIN)
            assert back.data.shape == (3, 48)

    def test_meta_is_still_checked_for_shape(self):
        qt = make("int4").to("meta")
        with pytest.raises(FormatError, match="scale has dtype"):
            QTensor(qt.data, qt.scale[:, :2], None, qt.shape, qt.format)

    def test_fake_tensors(self):
        real = make("int4-g32-asym")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = real.map(mode.from_tensor)
            assert not has_values(fake.data)
            assert fake.convert(PLAIN_INT32).convert(PLAIN).dequantize().shape == (3, 77)
            assert fake.narrow(1, 32, 45).shape == (3, 45)

    def test_inside_a_compiled_function(self):
        qt = make("int4-g32-asym")

        @torch.compile(backend="eager", fullgraph=True)
        def dense(data, scale, zero):
            return QTensor(data, scale, zero, (3, 77), qt.format).dequantize()

        assert torch.equal(dense(qt.data, qt.scale, qt.zero), qt.dequantize())
