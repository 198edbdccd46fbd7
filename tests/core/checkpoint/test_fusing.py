"""Experts that a file stores one by one, for models that hold them in one parameter: joined as they are, or refused."""

from __future__ import annotations

import pytest
import torch
from fused_experts import FusedParameters
from safetensors.torch import save_file
from torch import Tensor, nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint import load_, save

E, H, INNER, TOP = 3, 64, 32, 2
X = torch.randn(5, H, generator=torch.Generator().manual_seed(0))
SPELLINGS = {
    "qwen": ("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    "dots": ("mlp.experts", "fc1", "fc3", "fc2"),
}


class Fused(FusedParameters):
    """The experts of transformers 5."""

    def __init__(self, *, transposed: bool = False, biased: bool = False, alternating: bool = False) -> None:
        super().__init__(E, H, INNER, transposed=transposed, biased=biased)
        self.is_concatenated = not alternating

    def _apply_gate(self, up: Tensor) -> Tensor:
        gate, up = up.chunk(2, -1)
        return nn.functional.silu(gate) * up


class Block(nn.Module):
    def __init__(self, router: str = "gate", **kind: bool) -> None:
        super().__init__()
        self.add_module(router, nn.Linear(H, E, bias=False))
        self.experts = Fused(**kind)


class Layer(nn.Module):
    def __init__(self, router: str = "gate", **kind: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mlp = Block(router, **kind)


class Model(nn.Module):
    def __init__(self, router: str = "gate", **kind: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(router, **kind)])


class Expert(nn.Module):
    def __init__(self, names: tuple[str, ...], *, biased: bool = False) -> None:
        super().__init__()
        for name, (n, k) in zip(names, ((INNER, H), (INNER, H), (H, INNER)), strict=True):
            self.add_module(name, nn.Linear(k, n, bias=biased))


def separate(spelling: str = "qwen", *, biased: bool = False) -> nn.Module:
    """The model as files have it, float."""
    torch.manual_seed(0)
    path, *names = SPELLINGS[spelling]
    block, layer, root = nn.Module(), nn.Module(), nn.Module()
    block.gate = nn.Linear(H, E, bias=False)
    block.experts = nn.ModuleList([Expert(tuple(names), biased=biased) for _ in range(E)])
    layer.norm = nn.LayerNorm(H)
    layer.add_module(path.partition(".")[0], block)
    root.layers = nn.ModuleList([layer])
    return root


def experts_of(model: nn.Module) -> nn.ModuleList:
    (layer,) = model.layers
    return (layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).experts


def dense(model: nn.Module, *, bias: bool = False) -> dict[str, Tensor]:
    """The joined float weights (or biases) of a model of single experts, quantized or not."""

    def of(layer: nn.Module) -> Tensor:
        if bias:
            return layer.bias.detach()
        weight = layer.weight
        return weight.dequantize(torch.float32) if isinstance(weight, qcore.QTensor) else weight.detach()

    rows = [list(expert.children()) for expert in experts_of(model)]
    return {
        "gate_up_proj": torch.stack([torch.cat([of(gate), of(up)]) for gate, up, _ in rows]),
        "down_proj": torch.stack([of(down) for *_, down in rows]),
    }


def check_quantized(fused: nn.Module, source: nn.Module) -> None:
    experts = fused.layers[0].mlp.experts
    assert isinstance(experts, qcore.nn.QuantizedExperts)
    for name, expected in dense(source).items():
        assert torch.equal(experts.projections()[name].weight.dequantize(torch.float32), expected)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_float_experts(tmp_path, spelling, transposed, biased):
    source = separate(spelling, biased=biased)
    save(source, tmp_path / "m.safetensors")
    fused = Model(transposed=transposed, biased=biased)
    load_(fused, tmp_path / "m.safetensors")
    experts = fused.layers[0].mlp.experts
    for name, expected in dense(source).items():
        assert torch.equal(getattr(experts, name), expected.transpose(1, 2) if transposed else expected)
    for name, expected in dense(source, bias=True).items() if biased else ():
        assert torch.equal(getattr(experts, f"{name}_bias"), expected)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scheme", ["w4a16-g16-asym", "w8a16", "mxfp4", "wfp8afp8-g32", "nf4", "w8a8"])
@pytest.mark.parametrize("start", ["float", "meta", "quantized"])
def test_quantized_experts(tmp_path, spelling, scheme, start):
    source = separate(spelling, biased=True)
    qcore.quantize_(source, scheme, include=["*.experts.*"])
    save(source, tmp_path / "m.safetensors")
    with torch.device("meta" if start == "meta" else "cpu"):
        fused = Model(biased=True, transposed=start == "meta")
    if start == "quantized":
        qcore.quantize_(fused, "w8a16", include=["*.experts"])
    load_(fused, tmp_path / "m.safetensors")
    check_quantized(fused, source)
    assert fused.layers[0].mlp.experts.scheme == qcore.Scheme.parse(scheme)
    for name, expected in dense(source, bias=True).items():
        assert torch.equal(fused.layers[0].mlp.experts.projections()[name].bias, expected)
    save(fused, tmp_path / "again.safetensors")
    again = Model(biased=True)
    load_(again, tmp_path / "again.safetensors")
    check_quantized(again, source)


@pytest.mark.parametrize("router", ["gate", "router"])
@pytest.mark.parametrize("scheme", ["", "w8a16"])
def test_the_router_has_the_models_name(tmp_path, router, scheme):
    source = separate("mixtral")
    if scheme:
        qcore.quantize_(source, scheme)
    save(source, tmp_path / "m.safetensors")
    fused = Model(router)
    load_(fused, tmp_path / "m.safetensors")
    stored = source.layers[0].block_sparse_moe.gate
    x = torch.randn(2, H)
    assert torch.equal(getattr(fused.layers[0].mlp, router)(x), stored(x))


def ordered(layer: nn.Module, order: Tensor) -> None:
    layer.weight = layer.weight.derived(order=order.int())


def test_orders_stay_and_others_get_the_plain_one(tmp_path):
    source = separate()
    qcore.quantize_(source, "w4a16-g16", include=["*.experts.*"])
    first, _, third = experts_of(source)
    for expert in (first, third):  # the second has none
        order = torch.randperm(H)
        ordered(expert.gate_proj, order)
        ordered(expert.up_proj, order)
    save(source, tmp_path / "m.safetensors")
    fused = Model()
    load_(fused, tmp_path / "m.safetensors")
    check_quantized(fused, source)
    up = fused.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(up.weight.order[1], torch.arange(H, dtype=torch.int32))
    expected = torch.cat([x.unsqueeze(0) @ w.t() for x, w in zip(X[:E], dense(source)["gate_up_proj"], strict=True)])
    torch.testing.assert_close(up(X[:E], torch.arange(1, E + 1).int()), expected, rtol=1e-4, atol=1e-4)


def test_experts_without_zero_points_get_zeros(tmp_path):
    source = separate()
    qcore.quantize_(source, {"*.experts.1.*": "w4a16-g16", "*.experts.*": "w4a16-g16-asym"}, include=["*.experts.*"])
    save(source, tmp_path / "m.safetensors")
    fused = Model()
    load_(fused, tmp_path / "m.safetensors")
    check_quantized(fused, source)
    assert str(fused.layers[0].mlp.experts.down_proj.weight.format) == "int4-g16-asym/plain"


@pytest.mark.parametrize("scheme", ["nvfp4", "wfp4a16-g16-e4m3d"])
@pytest.mark.parametrize("equal", [False, True])
def test_global_scales_of_gate_and_up(tmp_path, scheme, equal):
    source = separate()
    qcore.quantize_(source, scheme, include=["*.experts.*"])
    for expert in experts_of(source) if equal else ():
        expert.up_proj.weight = expert.up_proj.weight.derived(global_scale=expert.gate_proj.weight.global_scale)
    save(source, tmp_path / "m.safetensors")
    fused = Model()
    load_(fused, tmp_path / "m.safetensors")
    check_quantized(fused, source)
    experts, format = fused.layers[0].mlp.experts, qcore.Scheme.parse(scheme).weight
    assert str(experts.down_proj.weight.format) == str(format)
    assert str(experts.gate_up_proj.weight.format) == (str(format) if equal else "fp4-g16/plain")


def static(scale: float) -> str:
    return f"wfp8afp8-static({scale})"


def test_one_input_scale_stays(tmp_path):
    source = separate()
    qcore.quantize_(source, static(0.25), include=["*.experts.*"])
    save(source, tmp_path / "m.safetensors")
    fused = Model()
    load_(fused, tmp_path / "m.safetensors")
    assert fused.layers[0].mlp.experts.down_proj.scheme.activation == qcore.StaticFP8(0.25)


def test_many_input_scales_are_left_out_with_a_warning(tmp_path):
    source = separate()
    schemes = {f"*.experts.{e}.down_proj": static(0.5 + e) for e in range(E)}
    qcore.quantize_(source, {**schemes, "*.experts.*": static(0.25)}, include=["*.experts.*"])
    save(source, tmp_path / "m.safetensors")
    fused = Model()
    with pytest.warns(qcore.QcoreWarning, match=r"experts\.down_proj' has a different input scale"):
        load_(fused, tmp_path / "m.safetensors")
    check_quantized(fused, source)
    assert fused.layers[0].mlp.experts.down_proj.scheme.activation is None
    assert fused.layers[0].mlp.experts.gate_up_proj.scheme.activation == qcore.StaticFP8(0.25)


def test_a_model_of_single_experts_loads_as_ever(tmp_path):
    source = separate("mixtral")
    qcore.quantize_(source, "w8a16")
    save(source, tmp_path / "m.safetensors")
    fresh = separate("mixtral")
    load_(fresh, tmp_path / "m.safetensors")
    assert all(torch.equal(dense(fresh)[name], expected) for name, expected in dense(source).items())


# What cannot be joined.


def refused(path, match: str, **kind: bool) -> None:
    model = Model(**kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        load_(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("schemes", "match"),
    [
        ({"*.experts.1.up_proj": "w8a16", "*": "w4a16-g16"}, r"experts': .*experts\.1\.up_proj\.weight' int8/plain"),
        ({"*.experts.1.up_proj": "wfp8a16", "*": "w4a16-g16-asym"}, r"1\.up_proj\.weight' fp8/plain"),
        ({"*.experts.2.down_proj": "w4a16-g32", "*": "w4a16-g16"}, r"2\.down_proj\.weight' int4-g32"),
        ({"*.experts.2.down_proj": "w8a8", "*": "w8a16"}, r"experts\.down_proj' have activations of different kinds"),
    ],
    ids=["bits", "elements", "groups", "activations"],
)
def test_different_formats_are_refused_by_name(tmp_path, schemes, match):
    source = separate()
    qcore.quantize_(source, schemes, include=["*.experts.*"])
    save(source, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", match)


def test_experts_of_which_some_are_float(tmp_path):
    source = separate()
    qcore.quantize_(source, "w8a16", include=["*.experts.0.*"])
    save(source, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", r"of the 6 tensors of its gate_up_proj only 2 are quantized")


def test_gate_and_up_of_different_orders(tmp_path):
    source = separate()
    qcore.quantize_(source, "w4a16-g16", include=["*.experts.*"])
    ordered(experts_of(source)[2].up_proj, torch.arange(H).flip(0))
    save(source, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", r"experts\.gate_up_proj\.weight': .*different order")


def test_scales_of_different_dtypes(tmp_path):
    source = separate()
    qcore.quantize_(source, "w8a16", include=["*.experts.*"])
    layer = experts_of(source)[1].down_proj
    layer.weight = layer.weight.derived(scale=layer.weight.scale.half())
    save(source, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", r"scales have different dtypes: .*1\.down_proj")


def test_rows_that_alternate_in_the_model(tmp_path):
    save(separate(), tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", "alternate", alternating=True)


PREFIX = "layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({f"{PREFIX}.1.up_proj.weight": None}, r"Missing in the checkpoint: .*experts\.gate_up_proj"),
        ({f"{PREFIX}.7.up_proj.weight": torch.ones(INNER, H)}, r"Missing in the checkpoint: .*experts\.gate_up_proj"),
        ({f"{PREFIX}.01.up_proj.weight": torch.ones(2)}, r"Not used by the model: .*\.01\.up_proj"),
        ({f"{PREFIX}.{'9' * 5000}.w1.weight": torch.ones(2)}, "Not used by the model"),
        ({f"{PREFIX}.1.up_proj.weight": torch.ones(INNER, H + 1)}, r"1\.up_proj\.weight' .*65"),
        ({f"{PREFIX}.1.up_proj.weight": torch.ones(INNER, H).half()}, r"1\.up_proj\.weight' .*float16"),
        ({f"{PREFIX}.0.up_proj.weight": torch.ones(INNER * H)}, r"0\.up_proj\.weight' .*float32"),
        ({f"{PREFIX}.0.gate_proj.weight": torch.ones(INNER, H).int()}, r"0\.gate_proj\.weight' is torch\.int32"),
        ({f"{PREFIX}.0.gate_proj.weight": torch.ones(())}, r"0\.gate_proj\.weight' is torch\.float32 of shape \(\)"),
        ({f"{PREFIX}.0.gate_proj.bias": torch.ones(INNER)}, "Not used by the model"),
        ({f"{PREFIX}.gate_up_proj": torch.ones(E, 2 * INNER, H)}, "two tensors of the file map to it"),
    ],
    ids=range(11),
)
def test_damaged_files(tmp_path, changes, match):
    tensors = {name: tensor.clone() for name, tensor in separate().state_dict().items()} | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", match)


def test_another_number_of_experts(tmp_path):
    tensors = {name: tensor.clone() for name, tensor in separate().state_dict().items() if f"{PREFIX}.2." not in name}
    save_file(tensors, tmp_path / "m.safetensors")
    refused(
        tmp_path / "m.safetensors", r"experts\.gate_up_proj' has shape \(2, 64, 64\); the model needs \(3, 64, 64\)"
    )


def test_two_names_for_one_block(tmp_path):
    tensors = {name: tensor.clone() for name, tensor in separate().state_dict().items()}
    tensors["layers.0.block_sparse_moe.gate.weight"] = torch.ones(E, H)
    save_file(tensors, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", r"mlp\.gate\.weight': two tensors of the file map to it")


def test_files_with_biases_of_fused_quantized_experts(tmp_path):
    """gpt-oss stores ``gate_up_proj_bias`` beside its blocks; quantized experts call it ``gate_up_proj.bias``."""
    torch.manual_seed(0)
    codes = {"gate_up_proj": (2 * INNER, H), "down_proj": (H, INNER)}
    tensors = {f"layers.0.{name}": t.clone() for name, t in Layer().state_dict().items() if "experts" not in name}
    for name, (n, k) in codes.items():
        tensors[f"{PREFIX}.{name}_blocks"] = torch.randint(0, 256, (E, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{PREFIX}.{name}_scales"] = torch.randint(120, 130, (E, n, k // 32), dtype=torch.uint8)
        tensors[f"{PREFIX}.{name}_bias"] = torch.randn(E, n)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    for quantized in (False, True):
        model = Model(transposed=True, biased=True, alternating=True)
        if quantized:
            qcore.quantize_(model, "mxfp4", include=["*.experts"])
        load_(model, tmp_path)
        for name, layer in model.layers[0].mlp.experts.projections().items():
            assert torch.equal(layer.bias, tensors[f"{PREFIX}.{name}_bias"])
            assert str(layer.weight.format) == "fp4-g32-e8m0/plain"
