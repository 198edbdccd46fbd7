"""fp8 of DeepSeek and fbgemm, NVFP4 and FP8 of modelopt, MXFP4 of gpt-oss: the tools' layers and formulas."""

import contextlib
import json

import pytest
import torch
from foreign_layers import FrozenLayer, frozen
from foreign_layers import load_layer as read

import qcore

LAYER = "model.fc"


def written(scale, *, n=200, k=256, settings, **more):
    """A layer of e4m3 weights; ``scale``: name and tensor."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=g).mul(20).to(torch.float8_e4m3fn)
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.{scale[0]}": scale[1]}
    tensors |= {f"{LAYER}.{name}": tensor for name, tensor in more.items()}
    metadata = {"config": json.dumps({"quantization_config": settings}), "shape": f"{n},{k}"}
    return FrozenLayer(LAYER, tensors, metadata, None), weight.float()


def scales(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1


@pytest.mark.parametrize(
    ("case", "scheme"),
    [("fp8_block_ragged", "wfp8afp8-g128"), ("modelopt_nvfp4", "wfp4a16-g16-e4m3")],
)
def test_dequantizes_to_what_the_tool_computes(case, scheme, tmp_path):
    layer = frozen(case)
    module = read(layer, tmp_path)
    assert layer.is_dense(module.weight.dequantize(torch.float32))
    assert module.scheme.weight == qcore.Scheme.parse(scheme).weight


def test_experts_of_gpt_oss(tmp_path):
    layer = frozen("gptoss_mxfp4_experts")
    found = qcore.checkpoint.inspect(layer.write(tmp_path))
    (weight,) = found.quantized
    assert (weight.name, weight.shape) == (f"{layer.layer}.weight", layer.shape)
    with qcore.checkpoint.opening.open_checkpoint(tmp_path) as archive:
        assert layer.is_dense(archive.quantized(weight.name).dequantize(torch.float32))


@pytest.mark.parametrize(("n", "k"), [(256, 256), (200, 256), (129, 384), (5, 130)])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128)])
def test_blocks(n, k, block, tmp_path):
    scale = scales(-(-n // block[0]), -(-k // block[1]))
    layer, weight = written(
        ("weight_scale_inv", scale), n=n, k=k, settings={"quant_method": "fp8", "weight_block_size": list(block)}
    )
    spread = scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    module = read(layer, tmp_path)
    assert torch.equal(module.weight.dequantize(torch.float32), weight * spread)
    assert module.scheme.activation == qcore.DynamicFP8(block[1])


def test_scales_that_are_powers_of_two(tmp_path):
    exponents = torch.randint(120, 130, (2, 2), dtype=torch.uint8)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    layer, weight = written(("weight_scale_inv", exponents), settings=settings)
    spread = torch.exp2(exponents.float() - 127).repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    assert torch.equal(read(layer, tmp_path).weight.dequantize(torch.float32), weight * spread)


@pytest.mark.parametrize("shape", [(), (1,), (200, 1), (200,)])
def test_scales_of_the_tensor_and_of_rows(shape, tmp_path):
    scale = scales(*shape)
    layer, weight = written(("weight_scale", scale), settings={"quant_method": "fbgemm_fp8"})
    module = read(layer, tmp_path)
    assert torch.equal(module.weight.dequantize(torch.float32), weight * scale.reshape(-1, 1))
    assert module.scheme.activation == qcore.DynamicFP8()


@pytest.mark.parametrize("method", ["fp8", "modelopt"])
def test_static_activations(method, tmp_path):
    layer, _ = written(
        ("weight_scale", scales()), settings={"quant_method": method}, input_scale=torch.tensor([0.03125])
    )
    module = read(layer, tmp_path)
    assert module.scheme.activation == qcore.StaticFP8(0.03125)


def test_static_activations_without_a_scale(tmp_path):
    layer, _ = written(("weight_scale", scales()), settings={"quant_method": "fp8", "activation_scheme": "static"})
    with pytest.warns(qcore.QcoreWarning, match=r"no input_scale for its static activations: .* at run time"):
        module = read(layer, tmp_path)
    assert module.scheme.activation == qcore.DynamicFP8()


def test_dynamic_activations_with_a_scale(tmp_path):
    """The tools do not read it."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    layer, _ = written(("weight_scale", scales()), settings=settings, input_scale=torch.tensor([0.03125]))
    assert read(layer, tmp_path).scheme.activation == qcore.DynamicFP8()


@pytest.mark.parametrize(("n", "k"), [(256, 256), (200, 130)])
@pytest.mark.parametrize("power", [False, True])
def test_fused_experts(n, k, power, tmp_path):
    e, g = 3, torch.Generator().manual_seed(0)
    scale = scales(e, -(-n // 128), -(-k // 128))
    scale = torch.randint(120, 130, scale.shape, dtype=torch.uint8) if power else scale
    weight = torch.randn(e, n, k, generator=g).mul(20).to(torch.float8_e4m3fn)
    tensors = {"mlp.experts.down_proj": weight, "mlp.experts.down_proj_scale_inv": scale}
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    FrozenLayer("", tensors, {"config": json.dumps(settings)}, None).write(tmp_path)
    wide = torch.exp2(scale.float() - 127) if power else scale
    spread = wide.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]
    with qcore.checkpoint.opening.open_checkpoint(tmp_path) as archive:
        (record,) = archive.records.values()
        assert (record.name, record.shape) == ("mlp.experts.down_proj.weight", (e, n, k))
        assert torch.equal(archive.quantized(record.name).dequantize(torch.float32), weight.float() * spread)


class TestRefused:
    @pytest.mark.parametrize("shape", [(1 << 24, 0, 128), (1 << 20, 128, 0), (1 << 32, 0)])
    def test_any_number_of_scales_without_weights(self, shape, tmp_path):
        *experts, n, k = shape
        blocks = (*experts, -(-n // 128), -(-k // 128)) if experts else ()
        names = ("fc", "fc_scale_inv") if experts else ("fc.weight", "fc.weight_scale")
        tensors = dict(zip(names, (torch.empty(shape, dtype=torch.float8_e4m3fn), torch.ones(blocks)), strict=True))
        settings = {"quant_method": "fp8", **({"weight_block_size": [128, 128]} if experts else {})}
        FrozenLayer("", tensors, {"config": json.dumps({"quantization_config": settings})}, None).write(tmp_path)
        with pytest.raises(qcore.CheckpointError, match="although it is empty"):
            qcore.convert(tmp_path, tmp_path.with_name("out"))

    @pytest.mark.parametrize(
        "change",
        [
            {"fc": torch.ones(3, 256, 256)},
            {"fc": torch.ones(256, 256).to(torch.float8_e4m3fn)},
            {"fc_scale_inv": torch.ones(())},
            {"fc_scale_inv": torch.ones(2, 2, 2)},
            {"fc_scale_inv": torch.ones(3, 2)},
            {"fc_scale_inv": torch.full((3, 2, 2), 255, dtype=torch.uint8)},
            {"fc_scale_inv": torch.full((3, 2, 2), float("nan"))},
            {"fc_activation_scale": torch.ones(3)},
        ],
    )
    def test_fused_experts(self, change, tmp_path):
        tensors = {"fc": torch.ones(3, 256, 256).to(torch.float8_e4m3fn), "fc_scale_inv": torch.ones(3, 2, 2), **change}
        settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        FrozenLayer("", tensors, {"config": json.dumps(settings)}, None).write(tmp_path)
        with (
            pytest.raises(qcore.CheckpointError, match="'fc"),
            qcore.checkpoint.opening.open_checkpoint(tmp_path) as archive,
        ):
            archive.quantized("fc.weight")

    def test_a_power_of_gpt_oss_that_is_not_a_number(self, tmp_path):
        layer = frozen("gptoss_mxfp4_experts")
        layer.tensors[f"{layer.layer}_scales"].view(-1)[7] = 255
        with (
            pytest.raises(qcore.CheckpointError, match=f"'{layer.layer}"),
            qcore.checkpoint.opening.open_checkpoint(layer.write(tmp_path)) as archive,
        ):
            archive.quantized(f"{layer.layer}.weight")

    @pytest.mark.parametrize(
        ("weight", "more", "match"),
        [
            (torch.int8, {"weight_scale": torch.ones(256)}, "torch.int8; qcore reads modelopt"),
            (torch.uint8, {"weight_scale": torch.ones(256, 2)}, "torch.uint8; qcore reads modelopt"),
            (torch.uint8, {"weight_scale": torch.ones(9, 2), "weight_scale_2": torch.ones(())}, "scales have shapes"),
            (torch.float8_e4m3fn, {"weight_scale": torch.ones(()), "pre_quant_scale": torch.ones(9)}, "pre_quant"),
        ],
    )  # fmt: skip
    def test_other_formats_of_modelopt(self, weight, more, match, tmp_path):
        """INT8 with SmoothQuant, and 4-bit integers of AWQ."""
        tensors = {f"{LAYER}.weight": torch.ones(256, 256).to(weight)} | {f"{LAYER}.{n}": t for n, t in more.items()}
        config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}}
        layer = FrozenLayer(LAYER, tensors, {"config": json.dumps(config), "shape": "256,256"}, None)
        with pytest.raises(qcore.CheckpointError, match=rf"'model\.fc': .*{match}"):
            read(layer, tmp_path)

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    def test_not_a_number(self, code, tmp_path):
        layer, _ = written(("weight_scale", scales()), settings={"quant_method": "fp8"})
        layer.tensors[f"{LAYER}.weight"].view(torch.uint8)[3, 4] = code
        with pytest.raises(qcore.CheckpointError, match=r"model\.fc\.weight"):
            read(layer, tmp_path)

    def test_a_power_that_is_not_a_number(self, tmp_path):
        exponents = torch.full((2, 2), 255, dtype=torch.uint8)
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        layer, _ = written(("weight_scale_inv", exponents), settings=settings)
        with pytest.raises(qcore.CheckpointError, match=r"model\.fc\.weight"):
            read(layer, tmp_path)

    def test_scales_of_other_blocks(self, tmp_path):
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        layer, _ = written(("weight_scale_inv", scales(3, 3)), settings=settings)
        with pytest.raises(qcore.CheckpointError, match=r"blocks of \(128, 128\)"):
            read(layer, tmp_path)

    @pytest.mark.parametrize("value", [[0, 128], [128], "128", [128.0, 128], [-1, 1], None, {"a": 1}])
    def test_damaged_settings_never_crash(self, value, tmp_path):
        settings = {"quant_method": "fp8", "weight_block_size": value}
        layer, _ = written(("weight_scale_inv", scales(2, 2)), settings=settings)
        with pytest.raises(qcore.CheckpointError):
            read(layer, tmp_path)

    @pytest.mark.parametrize("case", ["modelopt_nvfp4", "gptoss_mxfp4_experts"])
    @pytest.mark.parametrize("change", [lambda t: t[:1], lambda t: t.flatten(), lambda t: t.to(torch.float32)])
    def test_damaged_tensors_never_crash(self, case, change, tmp_path):
        for number, name in enumerate(frozen(case).tensors):
            layer = frozen(case)
            layer.tensors[name] = change(layer.tensors[name].reshape(-1, 1, 1)).contiguous()
            folder = layer.write(tmp_path / str(number))
            with (
                contextlib.suppress(qcore.CheckpointError),
                qcore.checkpoint.opening.open_checkpoint(folder) as archive,
            ):
                for weight in archive.records:
                    archive.quantized(weight)
