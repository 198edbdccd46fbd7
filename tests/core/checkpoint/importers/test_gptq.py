"""GPTQ: layers of gptqmodel 7.7.0, what its files get wrong, and what else is written in its bytes."""

import contextlib
import json

import pytest
import torch
from foreign_layers import FrozenLayer, frozen, nested
from foreign_layers import load_layer as loaded
from foreign_packing import minus_one, packed_words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qcore

CASES = {
    "gptq_4_sym_v1_g128": "int4-g128",
    "gptq_4_asym_v1_desc": "int4-g128-asym",
    "gptq_4_asym_v2_desc": "int4-g128-asym",
    "gptq_4_v1_zero0": "int4-g128-asym",
    "gptq_8_asym_g64": "int8-g64-asym",
    "gptq_8_sym_channel": "int8",
}
LAYER = "model.fc"
ANY_SETTINGS = st.dictionaries(
    st.sampled_from(["bits", "group_size", "sym", "checkpoint_format", "format", "meta", "packing_format"]),
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2),
)


class Written:
    """A layer written by the formula of GPTQ, and its dense weight."""

    def __init__(self, n=24, k=96, bits=4, group=32, *, sym=False, version=1, g_idx=None, seed=0):
        g = torch.Generator().manual_seed(seed)
        top, groups = 1 << bits, -(-k // group)
        u = torch.randint(0, top, (k, n), generator=g, dtype=torch.uint8)
        z = torch.randint(1, top, (groups, n), generator=g, dtype=torch.uint8)
        z = torch.full_like(z, top // 2) if sym else z
        scales = (torch.rand(groups, n, generator=g) + 0.01).half()
        index = torch.arange(k) // group if g_idx is None else g_idx
        self.dense = (scales.float()[index] * (u.float() - z.float()[index])).t()
        # One less in each field: of 3 bits too, as AutoGPTQ writes them.
        stored = z if version == 2 else z - 1
        self.tensors = {
            f"{LAYER}.qweight": packed_words(u, bits, 0),
            f"{LAYER}.qzeros": packed_words(stored, bits, 1),
            f"{LAYER}.scales": scales,
            f"{LAYER}.g_idx": index.int(),
        }
        self.settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False}
        self.settings["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"

    @property
    def layer(self):
        metadata = {
            "config": json.dumps({"quantization_config": self.settings}), "shape": ",".join(map(str, self.dense.shape)),
        }  # fmt: skip
        return FrozenLayer(LAYER, self.tensors, metadata, self.dense[:2])

    def read(self, folder):
        return loaded(self.layer, folder).weight.dequantize(torch.float32)


@pytest.mark.parametrize(("case", "format"), CASES.items())
def test_dequantizes_to_what_the_tool_computes(case, format, tmp_path):
    layer = frozen(case)
    weight = loaded(layer, tmp_path).weight
    assert str(weight.format) == str(qcore.Format.parse(format))
    assert layer.is_dense(weight.dequantize(torch.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [32, 96])
def test_every_number_of_bits(bits, version, sym, group, tmp_path):
    written = Written(n=32, bits=bits, group=group, version=version, sym=sym)
    assert torch.equal(written.read(tmp_path), written.dense)


def test_a_ragged_last_group_of_the_settings(tmp_path):
    written = Written(k=104, group=32)
    assert torch.equal(written.read(tmp_path), written.dense)


def test_columns_in_any_order_become_an_order(tmp_path):
    index = (torch.arange(96) // 32)[torch.randperm(96, generator=torch.Generator().manual_seed(3))]
    written = Written(g_idx=index)
    layer = loaded(written.layer, tmp_path)
    assert layer.weight.order is not None
    assert torch.equal(layer.weight.dequantize(torch.float32), written.dense)
    x = torch.randn(5, 96)
    torch.testing.assert_close(layer(x), x @ written.dense.t(), rtol=1e-4, atol=1e-4)


def test_a_symmetric_file_that_names_the_wrong_version(tmp_path):
    for number, (named, stored) in enumerate([("gptq", 2), ("gptq_v2", 1)]):
        written = Written(sym=True, version=stored)
        written.settings["checkpoint_format"] = named
        assert torch.equal(written.read(tmp_path / str(number)), written.dense)


def test_symmetric_settings_with_other_zero_points_are_refused(tmp_path):
    written = Written(sym=False)
    written.settings["sym"] = True
    with pytest.raises(qcore.CheckpointError, match="settings say symmetric"):
        written.read(tmp_path)


def test_zero_points_of_zero_borrow_from_their_neighbours(tmp_path):
    written = Written(version=2)
    words = written.tensors[f"{LAYER}.qzeros"]
    zeros = torch.tensor([[0, 5, 0, 7, 0, 0, 15, 1] * 3] * 3, dtype=torch.uint8)
    written.tensors[f"{LAYER}.qzeros"] = minus_one(packed_words(zeros, 4, 1), 4)
    written.settings["checkpoint_format"] = "gptq"
    assert words.shape == written.tensors[f"{LAYER}.qzeros"].shape
    weight = loaded(written.layer, tmp_path).weight
    assert torch.equal(weight.zero, zeros.to(torch.int8) - 8)


def test_layers_with_bits_of_their_own(tmp_path):
    """gptqmodel's ``dynamic`` names them by patterns; the shapes alone tell."""
    written, other = Written(bits=4), Written(bits=8, group=48)
    for name, tensor in other.tensors.items():
        written.tensors[name.replace("fc", "other")] = tensor
    written.settings["dynamic"] = {"+:.*other": {"bits": 8, "group_size": 48}}
    model = written.layer.model()
    model.model.add_module("other", torch.nn.Linear(96, 24, bias=False, device="meta"))
    qcore.load_(model, written.layer.write(tmp_path))
    assert torch.equal(model.model.fc.weight.dequantize(torch.float32), written.dense)
    assert torch.equal(model.model.other.weight.dequantize(torch.float32), other.dense)


def test_without_g_idx(tmp_path):
    written = Written()
    del written.tensors[f"{LAYER}.g_idx"]
    assert torch.equal(written.read(tmp_path), written.dense)


@pytest.mark.parametrize(
    ("packing", "version"), [("auto_round:auto_gptq", 1), ("auto_round", 2), ("auto_round:exllamav2", 2)]
)
def test_auto_round(packing, version, tmp_path):
    written = Written(version=version)
    written.settings |= {"quant_method": "auto-round", "packing_format": packing}
    del written.settings["checkpoint_format"]
    assert torch.equal(written.read(tmp_path), written.dense)


def test_an_old_directory_with_quantize_config_only(tmp_path):
    written = Written()
    folder = written.layer.write(tmp_path)
    (folder / "config.json").unlink()
    old = {key: value for key, value in written.settings.items() if key not in ("quant_method", "checkpoint_format")}
    (folder / "quantize_config.json").write_text(json.dumps(old))
    model = written.layer.model()
    qcore.load_(model, folder)
    assert torch.equal(model.get_submodule(LAYER).weight.dequantize(torch.float32), written.dense)


def test_inspect_lists_what_would_be_loaded(tmp_path):
    found = qcore.checkpoint.inspect(Written().layer.write(tmp_path))
    assert [(t.name, t.kind, t.shape) for t in found] == [(f"{LAYER}.weight", "int4-g32-asym/plain", (24, 96))]


def test_results_are_those_of_the_dense_weight(tmp_path):
    layer = frozen("gptq_4_sym_v1_g128")
    linear = loaded(layer, tmp_path)
    x = torch.randn(4, 256)
    dense = x @ linear.weight.dequantize(torch.float32).t() + linear.bias
    torch.testing.assert_close(linear(x), dense, rtol=1e-4, atol=1e-3)


class TestRefused:
    @pytest.mark.parametrize("layout", ["gptq_p", "marlin", "bitblas", "exl3"])
    def test_other_layouts_by_name(self, layout, tmp_path):
        written = Written()
        written.settings["checkpoint_format"] = layout
        with pytest.raises(qcore.CheckpointError, match=f"checkpoint_format is '{layout}'"):
            written.read(tmp_path)

    def test_groups_of_unequal_size(self, tmp_path):
        index = torch.arange(96) // 32
        index[0] = 2
        with pytest.raises(qcore.CheckpointError, match="groups of unequal size"):
            Written(g_idx=index).read(tmp_path)

    def test_every_layer_is_named(self, tmp_path):
        written = Written()
        for name in ("a", "b"):
            written.tensors |= {
                key.replace("fc", name): tensor.clone()
                for key, tensor in list(written.tensors.items())
                if key.startswith(LAYER) and not key.endswith("qzeros")
            }
        with pytest.raises(qcore.CheckpointError, match="2 layers cannot be read") as caught:
            written.read(tmp_path)
        assert "'model.a': it has no qzeros" in str(caught.value)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("bits", "4"), ("bits", True), ("bits", 5), ("bits", -4), ("bits", 1 << 80), ("group_size", "x"),
         ("group_size", 1 << 70), ("sym", 3), ("checkpoint_format", []), ("meta", 7), ("dynamic", 3)],
    )  # fmt: skip
    def test_settings_of_other_types_never_crash(self, key, value, tmp_path):
        written = Written()
        del written.tensors[f"{LAYER}.g_idx"]
        written.settings[key] = value
        self._error_or_result(written, tmp_path)

    @pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
    @pytest.mark.parametrize(
        "change",
        [lambda t: t[:1], lambda t: t[..., :0], lambda t: t.flatten()[:3], lambda t: t.float(),
         lambda t: t.unsqueeze(0), lambda t: t - 100],
    )  # fmt: skip
    def test_tensors_of_other_shapes_and_dtypes_never_crash(self, part, change, tmp_path):
        written = Written()
        name = f"{LAYER}.{part}"
        written.tensors[name] = change(written.tensors[name]).contiguous()
        self._error_or_result(written, tmp_path)

    @given(drawn=ANY_SETTINGS)
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_settings(self, tmp_path, drawn):
        written = Written()
        written.settings |= drawn
        self._error_or_result(written, tmp_path)

    @staticmethod
    def _error_or_result(written, folder):
        with contextlib.suppress(qcore.CheckpointError):
            assert written.read(folder).shape == written.dense.shape


def test_a_model_of_several_layers(tmp_path):
    written = Written(n=64, k=256, group=64)
    names = [f"model.l{i}" for i in range(6)]
    tensors = {key.replace(LAYER, name): t.clone() for name in names for key, t in written.tensors.items()}
    layer = FrozenLayer(LAYER, tensors, written.layer.metadata, written.dense[:2])
    model = nested("model", torch.nn.Module())
    for name in names:
        model.model.add_module(name.rpartition(".")[2], torch.nn.Linear(256, 64, bias=False, device="meta"))
    report = qcore.load_(model, layer.write(tmp_path))
    assert len(report.kernels()) >= 1
    for name in names:
        assert torch.equal(model.get_submodule(name).weight.dequantize(torch.float32), written.dense)


@pytest.mark.parametrize("stated", [2, 4, 8])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_of_a_layer_without_g_idx(tmp_path, bits, stated):
    written = Written(n=32, bits=bits)
    written.settings["bits"] = stated
    del written.tensors[f"{LAYER}.g_idx"]
    assert torch.equal(written.read(tmp_path), written.dense)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_columns(tmp_path, bits):
    """All of them fit into one word, of which several numbers of bits would be possible."""
    written = Written(n=32, k=32 // bits, bits=bits, group=32 // bits)
    assert torch.equal(written.read(tmp_path), written.dense)


@pytest.mark.parametrize("where", ["dynamic", "extra_config"])
def test_layers_that_are_asymmetric_on_their_own(tmp_path, where):
    written = Written(sym=False)
    written.settings |= {"sym": True, where: {"+:model.*": {"sym": False}, "-:x": {}}}
    assert torch.equal(written.read(tmp_path), written.dense)


@pytest.mark.parametrize(("k", "group", "stated"), [(200, 100, 128), (200, 128, 100), (96, 32, 48), (96, 32, -1)])
@pytest.mark.parametrize("sorted_columns", [True, False])
def test_groups_of_another_size_than_stated(tmp_path, k, group, stated, sorted_columns):
    index = torch.arange(k) // group
    order = torch.arange(k) if sorted_columns else torch.randperm(k, generator=torch.Generator().manual_seed(1))
    written = Written(k=k, group=group, g_idx=index[order])
    written.settings["group_size"] = stated
    assert torch.equal(written.read(tmp_path), written.dense)


class TestBiases:
    """AutoGPTQ stores a bias for every layer, of zeros where the model has none."""

    def load(self, folder, bias, *, strict=True):
        written = Written()
        written.tensors[f"{LAYER}.bias"] = bias
        model = written.layer.model(bias=False)
        return qcore.load_(model, written.layer.write(folder), strict=strict)

    def test_zeros_are_left_out(self, tmp_path):
        assert self.load(tmp_path, torch.zeros(24).half()).unexpected == ()

    @pytest.mark.parametrize(
        "bias", [torch.ones(24), torch.zeros(25), torch.zeros(24).long(), torch.full((24,), -1e-8)]
    )
    def test_others_are_not(self, tmp_path, bias):
        with pytest.raises(qcore.CheckpointError, match=r"Not used by the model: model\.fc\.bias"):
            self.load(tmp_path, bias)
        assert self.load(tmp_path, bias, strict=False).unexpected == ("model.fc.bias",)
