"""Files of other tools that contradict themselves: other dtypes than the tool writes, missing tensors, other settings.

Each was read as other numbers, or ended in an error of torch.
"""

import json
import warnings

import pytest
import torch
from foreign_layers import FrozenLayer, edited, frozen
from foreign_layers import load_layer as load
from foreign_packing import packed_words, whole_words

import qcore
from qcore import CheckpointError
from qcore.checkpoint import quantize_checkpoint
from qcore.checkpoint.importers import gptq

WHOLE = (torch.int16, torch.int64, torch.uint8, torch.float32, torch.bool, torch.float8_e4m3fn)
DTYPES = {
    ("gptq_4_asym_v1_desc", "qweight"): WHOLE,
    ("gptq_4_asym_v1_desc", "qzeros"): WHOLE,
    ("gptq_4_asym_v2_desc", "g_idx"): (torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex64),
    ("gptq_4_asym_v1_desc", "scales"): (torch.int16, torch.float64, torch.float8_e4m3fn),
    ("ct_w4a16_actorder_group", "weight_g_idx"): (torch.float32, torch.float8_e4m3fn),
    ("ct_w4a16_asym", "weight_zero_point"): WHOLE,
    ("ct_nvfp4a16", "weight_global_scale"): (torch.int32, torch.bool, torch.float8_e4m3fn),
    ("ct_w8a8_dyn", "weight"): (torch.float8_e4m3fn, torch.uint8),
    ("ct_fp8_dyn", "weight"): (torch.int8, torch.uint8),
    ("bnb_nf4", "weight"): (torch.bool, torch.float8_e4m3fn),
    ("bnb_nf4_dq", "weight.absmax"): (torch.float32,),
    ("bnb_int8", "SCB"): (torch.float8_e4m3fn, torch.int32),
    ("hqq_4_axis1", "W_q"): (torch.float8_e4m3fn, torch.int8),
    ("hqq_4_axis1", "scale"): (torch.float8_e4m3fn, torch.int16),
    ("hqq_4_axis1", "zero"): (torch.float8_e4m3fn, torch.uint8),
    ("modelopt_nvfp4", "weight_scale_2"): (torch.int32, torch.bool, torch.float8_e4m3fn),
    ("quanto_qint4", "weight._scale"): (torch.int32, torch.uint8, torch.float8_e4m3fn),
    ("quanto_qint4", "weight._shift"): (torch.int32, torch.uint8, torch.float8_e4m3fn),
    ("quanto_qint8", "weight._data"): (torch.float8_e4m3fn, torch.float8_e5m2),
    ("quanto_qfloat8", "weight._data"): (torch.int8, torch.float8_e5m2),
    ("ao_int4", "_weight_zero_point"): (torch.int8, torch.int64),
}
FLAT = [(case, part, dtype) for (case, part), dtypes in DTYPES.items() for dtype in dtypes]
MISSING = [
    *((case, "weight_scale", "float8_e4m3fn and belongs to no weight") for case in ("ct_fp8_dyn", "ct_fp8_block")),
    ("fp8_block_ragged", "weight_scale_inv", "float8_e4m3fn and belongs to no weight"),
    ("ct_w8a8_dyn", "weight_scale", "int8 and belongs to no weight"),
    ("ct_w4a16_g128", "weight_scale", "int32 and belongs to no weight"),
    ("gptq_4_sym_v1_g128", "scales", "int32 and belongs to no weight"),
    ("awq_gemm_asym_g128", "scales", "int32 and belongs to no weight"),
    ("bnb_nf4", "weight.quant_map", "uint8 and belongs to no weight"),
    ("bnb_int8", "SCB", "int8 and belongs to no weight"),
    ("modelopt_nvfp4", "weight_scale", "uint8 and belongs to no weight"),
    ("ct_w4a16_asym", "weight_zero_point", "asymmetric, but it has no zero points"),
    ("ao_int8_asym", "_weight_zero_point", "its tensor 'zero_point' is missing"),
    ("ao_int4", "_weight_zero_point", "its tensor 'zero_point' is missing"),
    ("bnb_nf4", "weight", "it lacks weight"),
    ("bnb_nf4_dq", "weight.nested_absmax", "it lacks nested_absmax"),
    ("gptq_4_sym_v1_g128", "qzeros", "it has no qzeros"),
]
LAYER = "model.fc"


def refused(layer, folder, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        load(layer, folder)
    assert layer.layer in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(("case", "part", "dtype"), FLAT, ids=[f"{c}-{p}-{str(d)[6:]}" for c, p, d in FLAT])
def test_other_dtypes_are_refused(tmp_path, case, part, dtype):
    layer = frozen(case)
    name = f"{layer.layer}.{part}"
    layer.tensors[name] = layer.tensors[name].to(dtype)
    refused(layer, tmp_path, ".")


@pytest.mark.parametrize(("case", "part", "match"), MISSING, ids=[f"{c}-{p}" for c, p, _ in MISSING])
def test_missing_tensors_are_refused(tmp_path, case, part, match):
    layer = frozen(case)
    del layer.tensors[f"{layer.layer}.{part}"]
    refused(layer, tmp_path, match)


def test_one_layer_among_others_without_scales(tmp_path):
    layer = frozen("gptq_4_sym_v1_g128")
    others = {n.replace("q_proj", "k_proj"): t.clone() for n, t in layer.tensors.items() if "scales" not in n}
    layer.tensors |= others
    with pytest.raises(CheckpointError, match=r"k_proj.qweight': it is int32 and belongs to no weight"):
        load(layer, tmp_path)


@pytest.mark.parametrize("case", ["gptq_4_sym_v1_g128", "bnb_int8"])
def test_causal_masks_are_not_codes(tmp_path, case):
    """Old files of GPT-2 hold them as uint8; here all weights are float, although the settings name a tool."""
    layer, mask = frozen(case), torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()
    layer.tensors = {"model.fc.weight": torch.ones(4, 8), "bias": mask}
    model = torch.nn.Module()
    model.register_buffer("bias", torch.zeros_like(mask))
    model.model = torch.nn.Module()
    model.model.fc = torch.nn.Linear(8, 4, bias=False)
    qcore.load_(model, layer.write(tmp_path / "in"))
    assert torch.equal(model.bias, mask)
    assert torch.equal(model.model.fc.weight, torch.ones(4, 8))
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", "w8a16")


@pytest.mark.parametrize("case", ["gptq_4_sym_v1_g128", "awq_gemm_asym_g128", "hqq_4_axis1", "ao_int8wo"])
def test_an_unknown_layout_of_a_known_tool(tmp_path, case):
    """Such as Marlin's ``B`` and ``s``: nothing would be read, and the rest of the model loaded."""
    layer = frozen(case)
    layer.tensors = {f"{layer.layer}.B": torch.zeros(4, 64, dtype=torch.int32), f"{layer.layer}.s": torch.ones(2, 64)}
    with pytest.raises(CheckpointError, match=r"B': it is int32 and belongs to no weight"):
        qcore.convert(layer.write(tmp_path / "in"), tmp_path / "out")


def test_words_of_16_bits_are_not_read_as_8_bit_codes(tmp_path):
    layer = frozen("gptq_4_sym_v1_g128")  # gptqmodel's pack_dtype="int16"
    for part in ("qweight", "qzeros"):
        name = f"{layer.layer}.{part}"
        rows, columns = layer.tensors[name].shape
        halves = layer.tensors[name].view(torch.int16).view(rows, columns, 2)
        taller = halves.transpose(1, 2).reshape(2 * rows, columns)
        layer.tensors[name] = (taller if part == "qweight" else halves.flatten(1)).contiguous()
    refused(layer, tmp_path, "qweight is int16; it must be int32")


def test_an_importer_that_raises_is_an_error_of_the_file(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(gptq._Settings, "of", fail)
    with pytest.raises(CheckpointError, match="importer 'gptq' raised RuntimeError: a defect"):
        load(frozen("gptq_4_sym_v1_g128"), tmp_path)


# compressed-tensors.


@pytest.mark.parametrize(
    ("points", "match"),
    [
        (torch.full((64, 1), 3.5), "weight_zero_point is float32"),
        (torch.full((64, 1), 200, dtype=torch.int32), "outside the range of int8"),
        (torch.full((64, 1), 200, dtype=torch.uint8), "outside the range of int8"),
    ],
)
def test_zero_points_are_not_cast(tmp_path, points, match):
    layer = edited("ct_w8a8_dyn", lambda s: s["config_groups"]["group_0"]["weights"].update(symmetric=False))
    layer.tensors[f"{layer.layer}.weight_zero_point"] = points
    refused(layer, tmp_path, match)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("case", ["ct_nvfp4a16", "ct_fp8_dyn", "ct_mxfp4a16"])
def test_zero_points_of_float_codes(tmp_path, case, dtype):
    layer = frozen(case)
    name = f"{layer.layer}.weight_zero_point"
    layer.tensors[name] = torch.zeros(layer.shape[0], 1).to(dtype)
    assert layer.is_dense(load(layer, tmp_path / "zeros").weight.dequantize(torch.float32))
    layer.tensors[name] = torch.ones(layer.shape[0], 1).to(dtype)
    refused(layer, tmp_path / "ones", "weight_zero_point is not zero")


def transformed(location):
    apply = [{"targets": ["Linear"], "location": location}]
    return lambda s: s.update(transform_config={"config_groups": {"R": {"type": "hadamard", "apply": apply}}})


@pytest.mark.parametrize("location", ["input", "output", "k_cache", None, 5])
def test_transforms_at_run_time_are_refused(tmp_path, location):
    with pytest.raises(CheckpointError, match="transforms at run time"):
        load(edited("ct_w4a16_g128", transformed(location)), tmp_path)


def test_transforms_within_the_weights_are_fine(tmp_path):
    layer = edited("ct_w4a16_g128", transformed("weight_input"))
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


def test_groups_of_activations_only_are_skipped(tmp_path):
    group = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}
    layer = edited("ct_w4a16_g128", lambda s: s["config_groups"].update(attention=group))
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


@pytest.mark.parametrize("target", [r"re:(.)\1*", "re:(?P<a>.*)q_proj(?P=a)?"])
def test_targets_that_cannot_be_compared(tmp_path, target):
    refused(
        edited("ct_w4a16_g128", lambda s: s["config_groups"]["group_0"].update(targets=[target])),
        tmp_path,
        "cannot be compared with its name: groupref is not supported",
    )


def test_columns_that_were_never_sorted(tmp_path):
    layer = frozen("ct_w4a16_actorder_weight")
    layer.tensors[f"{layer.layer}.weight_g_idx"] = torch.full((256,), -1, dtype=torch.int32)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


def packed(n, k, bits, group, *, pack=packed_words, version="0.20.0", asymmetric=True):
    """A layer by the formula, and its dense weight."""
    g = torch.Generator().manual_seed(n * k + bits)
    groups = -(-k // group)
    u, z = (torch.randint(0, 1 << bits, (n, size), generator=g, dtype=torch.uint8) for size in (k, groups))
    z = z if asymmetric else torch.full_like(z, 1 << (bits - 1))
    scale = torch.rand(n, groups, generator=g) - 0.5
    index = torch.arange(k) // group
    dense = (u.float() - z.float()[:, index]) * scale[:, index]
    tensors = {"weight_packed": pack(u, bits, 1), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    tensors |= {"weight_zero_point": pack(z, bits, 0)} if asymmetric else {}
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": not asymmetric}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "version": version}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = json.dumps({"quantization_config": settings})
    named = {f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}
    return FrozenLayer(LAYER, named, {"config": config, "shape": f"{n},{k}"}, dense), dense


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(1, 64, 32), (3, 128, 64), (4, 40, 8), (7, 100, 50), (1, 9, 9)])
def test_few_rows_with_zero_points(tmp_path, n, k, group, bits):
    layer, dense = packed(n, k, bits, group)
    assert torch.equal(load(layer, tmp_path).weight.dequantize(torch.float32), dense)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_zero_points_of_old_versions_are_not_packed(tmp_path, bits):
    layer, dense = packed(24, 64, bits, 32, pack=whole_words, version="0.9.4")
    name = f"{LAYER}.weight_zero_point"
    unsigned = whole_words_of(layer.tensors[name], bits, 24)
    layer.tensors[name] = (unsigned.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(load(layer, tmp_path / "whole").weight.dequantize(torch.float32), dense)
    layer.tensors[name] = layer.tensors[name][:, :1].contiguous()
    refused(layer, tmp_path / "other", "its zero points have shape")


@pytest.mark.parametrize("case", ["ct_w8a8_dyn", "ct_w4a16_g128"])
@pytest.mark.parametrize("version", ["0.6.0", "0.9.2.a20250301"])
def test_old_versions_left_out_zero_points_of_zeros(tmp_path, case, version):
    def asymmetric(settings):
        settings["version"] = version
        settings["config_groups"]["group_0"]["weights"]["symmetric"] = False

    layer = edited(case, asymmetric)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


@pytest.mark.parametrize("version", ["0.10.0", "1.0", "", None])
def test_new_versions_store_zero_points_of_zeros(tmp_path, version):
    layer = edited("ct_w4a16_asym", lambda settings: settings.update(version=version))
    del layer.tensors[f"{layer.layer}.weight_zero_point"]
    refused(layer, tmp_path, "asymmetric, but it has no zero points")


def whole_words_of(words, bits, n):
    """The unsigned numbers (N, G) in words (W, G) whose fields do not cross words."""
    each = 32 // bits
    fields = [(words >> (bits * place)) & ((1 << bits) - 1) for place in range(each)]
    return torch.stack(fields, dim=1).flatten(0, 1)[:n]


@pytest.mark.parametrize("asymmetric", [True, False])
@pytest.mark.parametrize(("bits", "k"), [(3, 33), (3, 100), (5, 65), (6, 7), (7, 7)])
def test_the_version_says_how_codes_are_packed(tmp_path, bits, k, asymmetric):
    """Both ways take the same number of words here."""
    for pack, version in ((whole_words, "0.19.0"), (packed_words, "0.20.0"), (packed_words, "1.0.0")):
        layer, dense = packed(5, k, bits, k, pack=pack, version=version, asymmetric=asymmetric)
        assert torch.equal(load(layer, tmp_path / version).weight.dequantize(torch.float32), dense)


# bitsandbytes, quanto, fp8.


def test_bitsandbytes_of_old_versions_of_transformers(tmp_path):
    layer = edited("bnb_nf4", lambda s: s.pop("quant_method"))
    assert layer.config["quantization_config"]["load_in_4bit"] is True
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


def test_a_shape_is_not_guessed_from_any_name(tmp_path):
    layer = frozen("quanto_qint4")
    del layer.tensors[f"{layer.layer}.bias"]
    old, new = layer.layer, layer.layer.replace("q_proj", "dense_4h_to_h")
    tensors = {name.replace(old, new): tensor for name, tensor in layer.tensors.items()}
    metadata = {key: value.replace(old, new) for key, value in layer.metadata.items()}
    refused(FrozenLayer(new, tensors, metadata, layer.rows), tmp_path, "contains the shape of the weight")


def test_a_huge_block_takes_no_memory(tmp_path):
    layer = edited("fp8_block_ragged", lambda s: s.update(weight_block_size=[1 << 45, 128]))
    name = f"{layer.layer}.weight_scale_inv"
    layer.tensors[name] = layer.tensors[name][:1].contiguous()
    weight = load(layer, tmp_path).weight
    expected = layer.tensors[f"{layer.layer}.weight"].float() * layer.tensors[name].repeat_interleave(128, 1)
    assert torch.equal(weight.dequantize(torch.float32), expected)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", ["fp8_block_ragged", "ct_fp8_dyn"])
def test_8_bit_floats_whose_settings_are_lost(tmp_path, case, strict):
    """An error about names only would end in strict=False, and in weights without their scales."""
    layer = frozen(case)
    (layer.write(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"weight': it is float8_e4m3fn and .* its scale.*\n.*config.json"):
        qcore.load_(layer.model(), tmp_path, strict=strict)
    assert len(qcore.checkpoint.inspect(tmp_path)) == len(layer.tensors)


def test_8_bit_floats_without_scales_are_numbers(tmp_path):
    weight = torch.randn(8, 64).to(torch.float8_e4m3fn)
    qcore.save({"weight": weight}, tmp_path / "m.safetensors")
    model = torch.nn.Linear(64, 8, bias=False)
    qcore.load_(model, tmp_path / "m.safetensors")
    assert torch.equal(model.weight, weight.float())


@pytest.mark.parametrize("case", ["fp8_block_ragged", "ct_w4a16_g128", "modelopt_nvfp4"])
def test_scales_of_attention_are_left_out(case, tmp_path):
    """llm-compressor writes zero points, too, whether or not its caches are symmetric: in the dtype of the codes."""
    layer = frozen(case)
    for part in ("q", "k", "v"):
        layer.tensors[layer.layer.replace("q_proj", f"{part}_scale")] = torch.ones(())
        layer.tensors[layer.layer.replace("q_proj", f"{part}_zero_point")] = torch.zeros(1, dtype=torch.float8_e4m3fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qcore.QcoreWarning)
        module = load(layer, tmp_path)
    assert layer.is_dense(module.weight.dequantize(torch.float32))


@pytest.mark.parametrize("case", ["fp8_block_ragged", "ct_w4a16_g128"])
def test_scales_of_results_are_left_out(case, tmp_path):
    """Older tools describe queries and caches as the results of q_proj, k_proj and v_proj."""
    layer = frozen(case)
    layer.tensors[f"{layer.layer}.output_scale"] = torch.ones(1)
    layer.tensors[f"{layer.layer}.output_zero_point"] = torch.zeros(1, dtype=torch.int8)
    assert layer.is_dense(load(layer, tmp_path).weight.dequantize(torch.float32))


def test_static_scales_of_another_dtype(tmp_path):
    layer = frozen("ct_fp8_static")
    layer.tensors[f"{layer.layer}.input_scale"] = torch.ones(1, dtype=torch.int32)
    refused(layer, tmp_path, "its input_scale is int32")


def test_awq_with_settings_in_a_file_of_their_own(tmp_path):
    layer = frozen("awq_gemm_asym_g128")
    layer.write(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    old = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(old))
    model = layer.model()
    qcore.load_(model, tmp_path)
    assert layer.is_dense(model.get_submodule(layer.layer).weight.dequantize(torch.float32))


def test_other_files_with_the_name_of_awq_s(tmp_path):
    qcore.save({"a.weight": torch.ones(4, 8)}, tmp_path)
    (tmp_path / "quant_config.json").write_text("[]")
    model = torch.nn.Module()
    model.a = torch.nn.Linear(8, 4, bias=False)
    qcore.load_(model, tmp_path)
    assert torch.equal(model.a.weight, torch.ones(4, 8))


def test_marlin_of_old_versions(tmp_path):
    layer = edited("gptq_4_sym_v1_g128", lambda s: [s.pop("checkpoint_format", None), s.update(is_marlin_format=True)])
    with pytest.raises(CheckpointError, match="checkpoint_format is 'marlin'"):
        load(layer, tmp_path)
