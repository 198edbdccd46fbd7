"""Fused experts in checkpoints: models load them float, quantized or on meta, and are unchanged if a load fails."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from checkpoint_mutations import join, split
from fused_experts import FusedParameters
from torch import Tensor, nn

import qcore
from qcore import CheckpointError
from qcore.checkpoint import inspect, load_, save
from qcore.checkpoint.values import same_bits
from qcore.nn.experts import QuantizedExperts

E, H, INNER, TOP = 3, 20, 12, 2


class Experts(FusedParameters):
    """The parameters and attributes of an experts module of transformers 5, with a buffer in its gate."""

    def __init__(self, transposed: bool, biased: bool) -> None:
        super().__init__(E, H, INNER, transposed=transposed, biased=biased)
        self.register_buffer("limit", torch.rand(()) + 1)
        self.act = nn.PReLU()

    def _apply_gate(self, up: Tensor) -> Tensor:
        gate, up = up.chunk(2, -1)
        return self.act(gate).clamp(max=self.limit.item()) * up


class Model(nn.Module):
    def __init__(self, *, transposed: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = Experts(transposed, biased)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(TOP)
        return self.experts(x, chosen, shares)


KINDS = [{}, {"transposed": True}, {"biased": True}, {"transposed": True, "biased": True}]
X = torch.randn(5, H, generator=torch.Generator().manual_seed(0))


def model(seed: int = 0, scheme: str = "", **kind: bool) -> nn.Module:
    torch.manual_seed(seed)
    made = Model(**kind)
    if scheme:
        qcore.quantize_(made, scheme)
    return made


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "transposed", "biased", "both"])
@pytest.mark.parametrize("scheme", ["w4a16-g8-asym", "mxfp4", "nvfp4", "wfp8afp8"])
@pytest.mark.parametrize("start", ["float", "meta", "quantized", "quantized on meta"])
def test_experts_come_back(tmp_path, kind, scheme, start):
    saved = model(scheme=scheme, **kind)
    save(saved, tmp_path / "m.safetensors")
    save(saved, tmp_path / "d", max_shard_size=300)
    for path in (tmp_path / "m.safetensors", tmp_path / "d"):
        with torch.device("meta" if "meta" in start else "cpu"):
            fresh = model(1, "w8a16" if "quantized" in start else "", **kind)
        report = load_(fresh, path)
        assert isinstance(fresh.experts, QuantizedExperts)
        assert same(fresh, saved)
        assert torch.equal(fresh(X), saved(X))
        assert {row.state for row in report} == {"quantized"}
        assert not [name for name, p in fresh.named_parameters() if p.device.type == "meta"]


def test_the_file_holds_one_tensor_for_all_experts(tmp_path):
    save(model(scheme="nvfp4", biased=True), tmp_path / "m.safetensors")
    info = inspect(tmp_path / "m.safetensors")["experts.gate_up_proj.weight"]
    assert (info.kind, info.shape) == ("fp4-g16-e4m3/plain", (E, 2 * INNER, H))
    stored = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items() if name.startswith("experts.down")} == {
        "experts.down_proj.bias": (E, H),
        "experts.down_proj.weight.data": (E, H, INNER // 2),
        "experts.down_proj.weight.scale": (E, 1, H),
        "experts.down_proj.weight.global_scale": (E,),
    }


def test_orders_static_activations_and_dtypes(tmp_path):
    saved = model(scheme="wfp8afp8-static(0.02)")
    for layer in saved.experts.projections().values():
        order = torch.stack([torch.randperm(layer.in_features) for _ in range(E)]).int()
        layer.weight = layer.weight.derived(order=order)
    save(saved, tmp_path / "m.safetensors")
    fresh = model(1)
    load_(fresh, tmp_path / "m.safetensors")
    assert same(fresh, saved)
    assert fresh.experts.scheme == saved.experts.scheme
    assert torch.equal(fresh(X), saved(X))
    half = model(1).bfloat16()
    load_(half, tmp_path / "m.safetensors")
    assert half(X.bfloat16()).dtype == torch.bfloat16
    assert half.experts.down_proj.weight.dtype == torch.bfloat16


def test_experts_that_are_one_module_stay_one(tmp_path):
    saved = nn.Sequential(model(biased=True), model(biased=True))
    saved[1].experts = saved[0].experts
    qcore.quantize_(saved, "w8a16")
    assert saved[1].experts is saved[0].experts
    save(saved, tmp_path / "m.safetensors")
    fresh = nn.Sequential(model(1, biased=True), model(2, biased=True))
    fresh[1].experts = fresh[0].experts
    load_(fresh, tmp_path / "m.safetensors")
    assert fresh[1].experts is fresh[0].experts
    assert same(fresh, saved)


def test_hooks_mode_and_biases_of_the_float_module_stay(tmp_path):
    save(model(scheme="w8a16", biased=True), tmp_path / "m.safetensors")
    fresh, seen = model(1, biased=True).eval(), []
    bias = fresh.experts.down_proj_bias
    fresh.experts.register_forward_hook(lambda *_: seen.append(1))
    load_(fresh, tmp_path / "m.safetensors")
    fresh(X)
    assert (seen, fresh.experts.training, fresh.experts.down_proj.training) == ([1], False, False)
    assert fresh.experts.down_proj.bias is bias


# Failing loads.


def refused(path, match: str, **kind: bool) -> None:
    for start in ("", "w8a16"):
        fresh = model(1, start, **kind)
        before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
        modules = [id(module) for module in fresh.modules()]
        with pytest.raises(CheckpointError, match=match):
            load_(fresh, path)
        after = fresh.state_dict()
        assert [id(module) for module in fresh.modules()] == modules
        assert after.keys() == before.keys()
        assert all(same_bits(after[name], before[name]) for name in before)


def edited(path, edit) -> None:
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        notes = file.metadata()
    edit(tensors)
    safetensors.torch.save_file(tensors, path, notes)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t["experts.down_proj.weight.global_scale"].fill_(float("nan")), "'experts.down_proj.weight'"),
        (lambda t: t.pop("experts.down_proj.weight.scale"), "'experts.down_proj.weight.scale' is not"),
        (lambda t: t.pop("experts.down_proj.bias"), "Missing in the checkpoint: experts.down_proj.bias"),
        (lambda t: t.update({"experts.down_proj.bias": torch.ones(H)}), r"'experts.down_proj.bias' has shape"),
        (lambda t: t.pop("experts.gate.limit"), "Missing in the checkpoint: experts.gate.limit"),
    ],
    ids=range(5),
)
def test_damaged_files(tmp_path, edit, match):
    save(model(scheme="nvfp4", biased=True), tmp_path / "m.safetensors")
    edited(tmp_path / "m.safetensors", edit)
    refused(tmp_path / "m.safetensors", match, biased=True)


def test_experts_of_other_sizes_are_refused(tmp_path):
    save(model(scheme="w8a16"), tmp_path / "m.safetensors")
    path = tmp_path / "m.safetensors"
    tree, data = split(path.read_bytes())
    records = json.loads(tree["__metadata__"]["qcore.tensors"])
    records["experts.down_proj.weight"]["shape"] = [1, E * H, INNER]
    tree["__metadata__"]["qcore.tensors"] = json.dumps(records)
    path.write_bytes(join(tree, data))
    refused(path, "tensor 'experts.down_proj.weight'")
    other = Model()
    other.experts.down_proj = nn.Parameter(torch.randn(E, INNER, H))
    save(model(scheme="w8a16"), path)
    with pytest.raises(CheckpointError, match=r"down_proj.weight' has shape \(3, 20, 12\).*needs \(3, 12, 20\)"):
        load_(other, path)


def test_a_scheme_that_experts_cannot_have(tmp_path):
    path = tmp_path / "m.safetensors"
    save(model(scheme="w8a8"), path)
    tree, data = split(path.read_bytes())
    tree["__metadata__"]["qcore.tensors"] = tree["__metadata__"]["qcore.tensors"].replace('"w8a8"', '"w8a8-token"')
    path.write_bytes(join(tree, data))
    refused(path, r"'(experts|router)[\w.]*': .*scheme w8a8-token cannot be used")


def test_strict_settings_are_not_blamed_on_the_file(tmp_path):
    save(model(scheme="w8a16"), tmp_path / "m.safetensors")
    with qcore.using(strict=True), pytest.raises(qcore.UnsupportedError):
        load_(model(1), tmp_path / "m.safetensors")


def test_experts_that_cannot_be_replaced_are_named(tmp_path):
    save(model(scheme="w8a16"), tmp_path / "m.safetensors")
    fresh = model(1)
    fresh.experts.has_post_expert_norm = True
    with pytest.raises(CheckpointError, match=r"Missing in the checkpoint: experts\.gate_up_proj"):
        load_(fresh, tmp_path / "m.safetensors")


def test_a_failing_replacement_restores_the_model(tmp_path, monkeypatch):
    save(model(scheme="w8a16", biased=True), tmp_path / "m.safetensors")

    def fail(*_: object) -> None:
        raise RuntimeError("no report")

    monkeypatch.setattr("qcore.checkpoint.loading.report", fail)
    refused(tmp_path / "m.safetensors", "no report", biased=True)
