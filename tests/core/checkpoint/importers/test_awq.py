"""AWQ: a layer of autoawq 0.2.9, and its other layouts by the formula."""

import contextlib
import json

import pytest
import torch
from foreign_layers import FrozenLayer, frozen, load_layer
from foreign_packing import packed_words

import qcore

LAYER = "model.fc"
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def read(layer, folder):
    return load_layer(layer, folder).weight


def in_words(codes):
    """Outputs of each eight in AWQ's order."""
    return packed_words(codes.unflatten(1, (-1, 8))[..., ORDER].flatten(1), 4, 1)


def written(layout, n=24, k=96, group=32, zeros=True, **settings):
    """A layer, and its dense weight."""
    g = torch.Generator().manual_seed(0)
    groups = -(-k // group) if group > 0 else 1
    u = torch.randint(0, 16, (k, n), generator=g, dtype=torch.uint8)
    z = torch.randint(0, 16, (groups, n), generator=g, dtype=torch.uint8)
    scales = (torch.rand(groups, n, generator=g) + 0.01).half()
    index = torch.arange(k) // (group if group > 0 else k)
    dense = (scales.float()[index] * (u.float() - (z.float()[index] if zeros else 8))).t()
    if layout == "gemm":
        tensors = {"qweight": in_words(u), "qzeros": in_words(z), "scales": scales}
    else:  # zero points and scales are padded to words
        padded = torch.nn.functional.pad(z.t(), (0, -groups % 8))
        scale = torch.nn.functional.pad(scales.t(), (0, -groups % 8)).contiguous()
        tensors = {"qweight": packed_words(u.t(), 4, 1), "qzeros": packed_words(padded, 4, 1), "scales": scale}
    if not zeros:
        del tensors["qzeros"]
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": layout,
        "zero_point": zeros,
        **settings,
    }
    metadata = {"config": json.dumps({"quantization_config": config}), "shape": f"{n},{k}"}
    return FrozenLayer(LAYER, {f"{LAYER}.{name}": t for name, t in tensors.items()}, metadata, dense[:2]), dense


def test_dequantizes_to_what_the_tool_computes(tmp_path):
    layer = frozen("awq_gemm_asym_g128")
    weight = read(layer, tmp_path)
    assert str(weight.format) == "int4-g128-asym/plain"
    assert layer.is_dense(weight.dequantize(torch.float32))


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 96, -1])
@pytest.mark.parametrize("zeros", [True, False])
def test_layouts(version, group, zeros, tmp_path):
    layer, dense = written(version, group=group, zeros=zeros)
    assert torch.equal(read(layer, tmp_path).dequantize(torch.float32), dense)


def test_auto_round(tmp_path):
    layer, dense = written("gemm", quant_method="auto-round", packing_format="auto_round:auto_awq")
    assert torch.equal(read(layer, tmp_path).dequantize(torch.float32), dense)


def test_names_of_older_settings(tmp_path):
    layer, dense = written("gemm", group_size=None, q_group_size=32, bits=None, w_bit=4)
    assert torch.equal(read(layer, tmp_path).dequantize(torch.float32), dense)


@pytest.mark.parametrize("version", ["gemv_fast", "llm-awq", "marlin", "ipex"])
def test_other_layouts_are_refused_by_name(version, tmp_path):
    layer, _ = written("gemm", version=version)
    with pytest.raises(qcore.CheckpointError, match=f"AWQ version is '{version}'"):
        read(layer, tmp_path)


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize(
    "change", [lambda t: t[:1], lambda t: t[..., :0], lambda t: t.flatten()[:3], lambda t: t.float() * float("nan")]
)
def test_damaged_tensors_never_crash(version, part, change, tmp_path):
    layer, dense = written(version)
    layer.tensors[f"{LAYER}.{part}"] = change(layer.tensors[f"{LAYER}.{part}"]).contiguous()
    with contextlib.suppress(qcore.CheckpointError):
        assert read(layer, tmp_path).shape == dense.shape


@pytest.mark.parametrize(("key", "value"), [("bits", 3), ("bits", "4"), ("group_size", 1 << 70), ("version", {})])
def test_damaged_settings_never_crash(key, value, tmp_path):
    layer, dense = written("gemm", **{key: value})
    with contextlib.suppress(qcore.CheckpointError):
        assert read(layer, tmp_path).shape == dense.shape
