"""AWQ: a layer of autoawq 0.2.9, layers of GEMV made here, and files that are damaged or of other layouts."""

import json

import pytest
import torch
from foreign_layers import frozen, nested
from safetensors.torch import save_file

import qcore

GEMM = [0, 2, 4, 6, 1, 3, 5, 7]
N, K, GROUP = 24, 256, 64


def words(codes, order=range(8)):
    """Codes 0..15 (R, 8 C), packed along the last dimension one by one, as int32 (R, C)."""
    parts = codes.long().view(codes.shape[0], -1, 8)
    total = sum(parts[..., place] << (4 * i) for i, place in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def drawn(n=N, k=K, group=GROUP, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = k // group
    codes = torch.randint(0, 16, (n, k), generator=generator)
    zeros = torch.randint(0, 16, (groups, n), generator=generator)
    scales = (torch.rand(groups, n, generator=generator) + 0.1).half()
    wide = [t.repeat_interleave(group, 0).t().float() for t in (zeros, scales)]
    return codes, zeros, scales, (codes - wide[0]) * wide[1]


def gemm(codes, zeros, scales):
    return {"qweight": words(codes.t(), GEMM), "qzeros": words(zeros, GEMM), "scales": scales}


def gemv(codes, zeros, scales, width=2):
    """With ``width`` words of zero points per row, of which the scales fill less."""
    padded = [torch.nn.functional.pad(t.t(), (0, 8 * width - t.shape[0])) for t in (zeros, scales)]
    return {"qweight": words(codes), "qzeros": words(padded[0]), "scales": padded[1].contiguous()}


def written(folder, tensors, **settings):
    folder.mkdir(exist_ok=True)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, **settings}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file({f"up.{key}": tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def loaded(folder, n=N, k=K):
    model = nested("up", torch.nn.Linear(k, n, bias=False, device="meta"))
    qcore.load_(model, folder)
    return model.up.weight


def test_gemm_dequantizes_to_what_autoawq_computes(tmp_path):
    layer = frozen("awq_gemm_asym_g128")
    model = layer.model()
    qcore.load_(model, layer.write(tmp_path))
    weight = model.get_submodule(layer.layer).weight
    assert weight.format == qcore.Format.parse("int4-g128-asym")
    assert layer.is_dense(weight.dequantize(torch.float32))


@pytest.mark.parametrize(("pack", "version"), [(gemm, "gemm"), (gemm, "GEMM"), (gemv, "gemv")])
@pytest.mark.parametrize("group", [32, 64, 256])
def test_every_layout_dequantizes_to_the_formula(pack, version, group, tmp_path):
    codes, zeros, scales, dense = drawn(group=group)
    folder = written(tmp_path, pack(codes, zeros, scales), version=version, group_size=-1 if group == K else group)
    assert torch.equal(loaded(folder).dequantize(torch.float32), dense)


def test_old_names_of_settings(tmp_path):
    codes, zeros, scales, dense = drawn()
    folder = written(tmp_path, gemv(codes, zeros, scales), bits=None, w_bit=4, group_size=None, q_group_size=GROUP)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(format="gemv")
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(loaded(folder).dequantize(torch.float32), dense)


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq"])
def test_auto_round_writes_gemm(packing, tmp_path):
    codes, zeros, scales, dense = drawn()
    folder = written(tmp_path, gemm(codes, zeros, scales), quant_method="auto-round", packing_format=packing)
    assert torch.equal(loaded(folder).dequantize(torch.float32), dense)


def test_symmetric_weights_have_no_zero_points(tmp_path):
    codes, zeros, scales, _ = drawn()
    tensors = gemm(codes, torch.full_like(zeros, 8), scales)
    with_zeros = loaded(written(tmp_path / "a", tensors))
    del tensors["qzeros"]
    without = loaded(written(tmp_path / "b", tensors, zero_point=False))
    wide = scales.repeat_interleave(GROUP, 0).t().float()
    assert with_zeros.zero is None
    assert without.zero is None
    assert torch.equal(with_zeros.dequantize(torch.float32), (codes - 8) * wide)
    assert torch.equal(without.dequantize(torch.float32), (codes - 8) * wide)


def test_layers_that_are_not_converted_stay_float(tmp_path):
    codes, zeros, scales, _ = drawn()
    folder = written(tmp_path, gemm(codes, zeros, scales), modules_to_not_convert=["gate"])
    tensors = {f"up.{k}": t.contiguous() for k, t in gemm(codes, zeros, scales).items()}
    save_file({**tensors, "gate.weight": torch.ones(3, K)}, folder / "model.safetensors")
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(K, N, bias=False), "gate": torch.nn.Linear(K, 3, bias=False)})
    qcore.load_(model, folder)
    assert isinstance(model["gate"], torch.nn.Linear)
    assert torch.equal(model["gate"].weight, torch.ones(3, K))


@pytest.mark.parametrize("version", ["gemv_fast", "llm-awq", "exllama", "nonsense", ["gemm"], {"a": 1}])
def test_other_layouts_are_refused_by_name(version, tmp_path):
    folder = written(tmp_path, gemm(*drawn()[:3]), version=version)
    with pytest.raises(qcore.CheckpointError, match="qcore reads the layouts"):
        loaded(folder)


@pytest.mark.parametrize(
    "settings", [{"bits": 8}, {"bits": "4"}, {"bits": True}, {"group_size": 1.5}, {"group_size": {}}, {"bits": -4}]
)
def test_settings_that_cannot_be(settings, tmp_path):
    with pytest.raises(qcore.CheckpointError, match="quantization_config has"):
        loaded(written(tmp_path, gemm(*drawn()[:3]), **settings))


def cut(name, rows, columns):
    return lambda tensors: tensors | {name: tensors[name][:rows, :columns]}


DAMAGE = {
    "no zero points": lambda t: {k: v for k, v in t.items() if k != "qzeros"},
    "zero points of fewer groups": cut("qzeros", 2, None),
    "scales of fewer outputs": cut("scales", None, 16),
    "no groups": cut("scales", 0, None),
    "one dimension": lambda t: t | {"scales": t["scales"].flatten()},
    "three dimensions": lambda t: t | {"qweight": t["qweight"].unsqueeze(0)},
    "words of 16 bits": lambda t: t | {"qweight": t["qweight"].to(torch.int16)},
    "float zero points": lambda t: t | {"qzeros": t["qzeros"].float()},
    "integer scales": lambda t: t | {"scales": t["scales"].to(torch.int32)},
    "more groups than columns": lambda t: t | {n: t[n].repeat(100, 1) for n in ("scales", "qzeros")},
    "infinite scales": lambda t: t | {"scales": t["scales"] / 0},
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_layers_are_checkpoint_errors(damage, tmp_path):
    with pytest.raises(qcore.CheckpointError):
        loaded(written(tmp_path, damage(gemm(*drawn()[:3]))))


GEMV_DAMAGE = {
    "no zero points": DAMAGE["no zero points"],
    "zero points of fewer outputs": cut("qzeros", 2, None),
    "scales of fewer groups": cut("scales", None, 3),
    "no zero points stored": cut("qzeros", None, 0),
    "one dimension": DAMAGE["one dimension"],
    "words of 16 bits": DAMAGE["words of 16 bits"],
    "infinite scales": DAMAGE["infinite scales"],
}


@pytest.mark.parametrize("damage", GEMV_DAMAGE.values(), ids=GEMV_DAMAGE)
def test_damaged_layers_of_gemv_are_checkpoint_errors(damage, tmp_path):
    with pytest.raises(qcore.CheckpointError):
        loaded(written(tmp_path, damage(gemv(*drawn()[:3])), version="gemv"))


def test_another_model_is_a_checkpoint_error(tmp_path):
    with pytest.raises(qcore.CheckpointError, match="another model"):
        loaded(written(tmp_path, gemm(*drawn()[:3])), k=K // 2)
