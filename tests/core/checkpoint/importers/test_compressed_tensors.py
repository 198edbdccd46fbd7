"""compressed-tensors: layers of llm-compressor 0.14, what fixtures lack by the formulas, and damaged directories."""

import contextlib
import copy
import json
import warnings

import numpy as np
import pytest
import torch
from foreign_layers import FrozenLayer, edited, frozen
from foreign_layers import load_layer as read
from foreign_packing import packed_words, whole_words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qcore
from qcore.checkpoint.importers import name_patterns

CASES = {
    "ct_w4a16_g128": "w4a16-g128",
    "ct_w4a16_asym": "w4a16-g128-asym",
    "ct_w4a16_actorder_weight": "w4a16-g128-asym",
    "ct_w4a16_actorder_group": "w4a16-g128-asym",
    "ct_w8a16": "w8a16-g128",
    "ct_w8a8_dyn": "w8a8",
    "ct_w8a8_static": "w8a8-static",
    "ct_w4a8": "w4a8-g128",
    "ct_fp8_dyn": "wfp8afp8",
    "ct_fp8_static": "wfp8afp8-static",
    "ct_fp8_block": "wfp8afp8-g128-token",
    "ct_mxfp8": "wfp8afp8-g32-e8m0",
    "ct_nvfp4a16": "wfp4a16-g16-e4m3d",
    "ct_mxfp4a16": "wfp4a16-g32-e8m0",
}
WEIGHT_ONLY = {"ct_nvfp4": "wfp4a16-g16-e4m3d", "ct_mxfp4": "wfp4a16-g32-e8m0"}
LAYER = "model.fc"


@pytest.mark.parametrize(("case", "scheme"), CASES.items())
def test_dequantizes_to_what_the_tool_computes(case, scheme, tmp_path):
    layer = frozen(case)
    module = read(layer, tmp_path)
    assert layer.is_dense(module.weight.dequantize(torch.float32))
    wanted = qcore.Scheme.parse(scheme)
    assert module.scheme.weight == wanted.weight
    assert type(module.scheme.activation) is type(wanted.activation)


def test_static_activations_have_the_parameters_of_the_file(tmp_path):
    layer = frozen("ct_w8a8_static")
    activation = read(layer, tmp_path).scheme.activation
    assert activation.scale == layer.tensors[f"{layer.layer}.input_scale"].item()
    assert activation.zero_point == layer.tensors[f"{layer.layer}.input_zero_point"].item()


@pytest.mark.parametrize(("case", "scheme"), WEIGHT_ONLY.items())
def test_activations_that_qcore_lacks_stay_float_and_say_so(case, scheme, tmp_path):
    layer = frozen(case)
    with pytest.warns(qcore.QcoreWarning, match="stay float"):
        module = read(layer, tmp_path)
    assert layer.is_dense(module.weight.dequantize(torch.float32))
    assert module.scheme.weight == qcore.Scheme.parse(scheme).weight


def written(bits, *, n=24, k=96, group=32, zeros=True, name=LAYER, seed=0, pack=packed_words):
    """A pack-quantized layer: tensors, dense weight, settings of its group."""
    g = torch.Generator().manual_seed(seed)
    groups, top = -(-k // group), 1 << bits
    u = torch.randint(0, top, (n, k), generator=g, dtype=torch.uint8)
    z = torch.randint(0, top, (n, groups), generator=g, dtype=torch.uint8)
    scale = (torch.rand(n, groups, generator=g) + 0.01).bfloat16()
    index = torch.arange(k) // group
    dense = (u.float() - (z.float()[:, index] if zeros else top // 2)) * scale.float()[:, index]
    tensors = {
        f"{name}.weight_packed": pack(u, bits, 1),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor([n, k]),
    }
    if zeros:
        tensors[f"{name}.weight_zero_point"] = pack(z, bits, 0)
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": not zeros}
    return tensors, dense, weights


def directory(tensors, groups, dense, **more):
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **more}
    metadata = {"config": json.dumps({"quantization_config": config}), "shape": ",".join(map(str, dense.shape))}
    return FrozenLayer(LAYER, tensors, metadata, dense[:2])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("k", [96, 104])
@pytest.mark.parametrize("pack", [packed_words, whole_words])
def test_every_number_of_bits(bits, zeros, k, pack, tmp_path):
    """0.20 of the tool packs bits one after the other, as `packed_words` does; older versions whole codes per word."""
    tensors, dense, weights = written(bits, n=32, zeros=zeros, k=k, pack=pack)
    layer = directory(tensors, {"g": {"targets": ["Linear"], "weights": weights}}, dense)
    assert torch.equal(read(layer, tmp_path).weight.dequantize(torch.float32), dense)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_the_tensor(bits, zeros, shape, tmp_path):
    """The tool packs zero points of groups and channels only."""
    tensors, _, weights = written(bits, k=64, group=64, zeros=zeros)
    scale, point = torch.tensor(0.125).bfloat16(), torch.tensor(-3, dtype=torch.int8)
    tensors[f"{LAYER}.weight_scale"] = scale.reshape(shape)
    if zeros:
        tensors[f"{LAYER}.weight_zero_point"] = point.reshape(shape)
    packed = tensors[f"{LAYER}.weight_packed"].numpy().view("uint8")
    unsigned = torch.from_numpy(packed if bits == 8 else np.stack((packed & 15, packed >> 4), -1).reshape(24, 64))
    dense = (unsigned.float() - 2.0 ** (bits - 1) - (point.item() if zeros else 0)) * scale.float()
    weights |= {"strategy": "tensor", "group_size": None}
    layer = directory(tensors, {"g": {"targets": ["Linear"], "weights": weights}}, dense)
    assert torch.equal(read(layer, tmp_path).weight.dequantize(torch.float32), dense)


def test_mixed_groups(tmp_path):
    """A pattern and a name decide before the class."""
    parts = [written(bits, name=f"model.{name}", seed=bits) for bits, name in [(4, "fc"), (8, "up"), (2, "down")]]
    groups = {
        "all": {"targets": ["Linear"], "weights": parts[0][2]},
        "up": {"targets": ["re:.*up$"], "weights": parts[1][2]},
        "down": {"targets": ["model.down"], "weights": parts[2][2]},
    }
    tensors = {name: tensor for part in parts for name, tensor in part[0].items()}
    layer = directory(tensors, groups, parts[0][1], format="mixed-precision", ignore=["lm_head", "re:.*gate$"])
    model = layer.model()
    for name in ("up", "down"):
        model.model.add_module(name, torch.nn.Linear(96, 24, bias=False, device="meta"))
    qcore.load_(model, layer.write(tmp_path))
    for part, name in zip(parts, ("fc", "up", "down"), strict=True):
        assert torch.equal(model.get_submodule(f"model.{name}").weight.dequantize(torch.float32), part[1])


def test_int_weights_of_fewer_bits_in_bytes(tmp_path):
    """naive-quantized and int-quantized are the same bytes."""
    layer = edited("ct_w4a8", lambda q: q.update(format="naive-quantized"))
    assert layer.is_dense(read(layer, tmp_path).weight.dequantize(torch.float32))


def test_results_are_those_of_the_dense_weight(tmp_path):
    for number, case in enumerate(("ct_w4a16_actorder_group", "ct_w8a8_dyn", "ct_fp8_dyn")):
        module = read(frozen(case), tmp_path / str(number))
        x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
        dense = x @ module.weight.dequantize(torch.float32).t()
        dense = dense if module.bias is None else dense + module.bias.detach()
        assert float((module(x).detach() - dense).norm() / dense.norm()) < 0.05


class TestRefused:
    @pytest.mark.parametrize("format", ["marlin-24", "sparse-24-bitmask", "sparse-bitmask"])
    def test_formats_by_name(self, format, tmp_path):
        with pytest.raises(qcore.CheckpointError, match=f"its format is '{format}'"):
            read(edited("ct_w4a16_g128", lambda q: q.update(format=format)), tmp_path)

    def test_a_layer_of_no_group(self, tmp_path):
        layer = edited("ct_w4a16_g128", lambda q: q["config_groups"]["group_0"].update(targets=["re:other"]))
        with pytest.raises(qcore.CheckpointError, match="no target of config_groups matches"):
            read(layer, tmp_path)

    def test_groups_that_would_take_minutes(self, tmp_path, monkeypatch):
        """Many expressions, each of which is harmless by itself; `test_name_patterns` has them take their time."""
        monkeypatch.setattr(name_patterns, "_STEPS_OF_ALL", 100)
        for count, text in ((500, "take too long to compare"), (200_000, "more than 200,000 characters")):
            many = [f"re:.*x{i}" for i in range(count)]
            layer = edited("ct_w4a16_g128", lambda q, many=many: q["config_groups"]["group_0"].update(targets=many))
            with pytest.raises(qcore.CheckpointError, match=f"config_groups are too long: .*{text}.*\n.*fewer"):
                read(layer, tmp_path)

    @pytest.mark.parametrize(
        "groups",
        [None, {}, [], "x", {"a": None}, {"a": {}}, {"a": {"targets": "Linear", "weights": {}}},
         {"a": {"targets": ["re:("], "weights": {"num_bits": 4}}},
         {"a": {"targets": ["Linear"], "weights": {"num_bits": 99}}},
         {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": "x"}}}],
    )  # fmt: skip
    def test_damaged_groups(self, groups, tmp_path):
        with pytest.raises(qcore.CheckpointError):
            read(edited("ct_w4a16_g128", lambda q: q.update(config_groups=groups)), tmp_path)

    @given(data=st.data())
    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_settings(self, tmp_path, data):
        """One value in the settings of a group is another."""
        case = data.draw(st.sampled_from(sorted(CASES)))
        part = data.draw(st.sampled_from(["weights", "input_activations"]))
        value = data.draw(st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just([128, 128]))

        def change(q):
            group = q["config_groups"]["group_0"]
            held = copy.deepcopy(group.get(part)) or {"num_bits": 8}
            held[data.draw(st.sampled_from(sorted(held)))] = value
            group[part] = held

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qcore.QcoreWarning)
            with contextlib.suppress(qcore.CheckpointError):
                read(edited(case, change), tmp_path)

    @pytest.mark.parametrize("case", [*CASES, *WEIGHT_ONLY])
    @pytest.mark.parametrize(
        "change",
        [lambda t: t.flatten()[:1], lambda t: t.flatten()[:0], lambda t: t.reshape(1, -1), lambda t: t.float()],
    )
    @pytest.mark.filterwarnings("ignore::qcore.QcoreWarning")
    def test_damaged_tensors_never_crash(self, case, change, tmp_path):
        for number, name in enumerate(frozen(case).tensors):
            layer = frozen(case)
            layer.tensors[name] = change(layer.tensors[name]).contiguous()
            with contextlib.suppress(qcore.CheckpointError):
                read(layer, tmp_path / str(number))
