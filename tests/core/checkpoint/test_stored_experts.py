"""`quantize_checkpoint` of fused experts, and what stays float there and in `quantize_` unless it is named."""

import json

import pytest
import torch
from fused_experts import FusedParameters
from torch import nn

import qcore
from qcore.checkpoint import load_, quantize_checkpoint, save
from qcore.checkpoint.values import same_bits

E, H, INNER = 3, 24, 16
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
KINDS = [{}, {"transposed": True}, {"biased": True}, {"transposed": True, "biased": True}]


class Experts(FusedParameters):
    def __init__(self, **kind):
        super().__init__(E, H, INNER, **{"transposed": False, "biased": False, **kind})

    def _apply_gate(self, up):
        gate, up = up.chunk(2, -1)
        return nn.functional.silu(gate) * up


class Block(nn.Module):
    def __init__(self, **kind):
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = Experts(**kind)

    def forward(self, x):
        shares, chosen = self.router(x).softmax(-1).topk(2)
        return self.experts(x, chosen, shares)


class Model(nn.Module):
    def __init__(self, **kind):
        super().__init__()
        self.mlp = Block(**kind)
        self.embed_positions = nn.Embedding(4, H)
        self.out = nn.Linear(H, H)

    def forward(self, x):
        return self.out(self.mlp(x) + self.embed_positions.weight[0])


def model(**kind):
    torch.manual_seed(0)
    return Model(**kind)


def actions(rows):
    return {row.name: row.action for row in rows}


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "transposed", "biased", "both"])
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g8-asym", "mxfp4", "nvfp4", "wfp8afp8"])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_same_bits_as_quantize(kind, scheme, sharded, tmp_path):
    made = model(**kind)
    save(made, tmp_path / "float.safetensors")
    target = tmp_path / ("own" if sharded else "own.safetensors")
    done = []
    quantize_checkpoint(
        tmp_path / "float.safetensors", target, scheme, progress=lambda *now: done.append(now[:2]),
        **({"max_shard_size": 2000} if sharded else {}),
    )  # fmt: skip
    assert done[-1][0] == done[-1][1]
    report = qcore.quantize_(made, scheme)
    fresh = model(**kind)
    loaded = load_(fresh, target)
    assert [row.name for row in loaded.by_state("quantized")] == [row.name for row in report.by_state("quantized")]
    mine, theirs = made.state_dict(), fresh.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(same_bits(mine[name], theirs[name]) for name in mine)


def test_scales_in_another_dtype(tmp_path):
    save(model(), tmp_path / "float.safetensors")
    quantize_checkpoint(tmp_path / "float.safetensors", tmp_path / "own.safetensors", "w8a16", dtype=torch.bfloat16)
    fresh = model().bfloat16()
    load_(fresh, tmp_path / "own.safetensors")
    assert fresh.mlp.experts.down_proj.weight.scale.dtype == torch.bfloat16


@pytest.mark.parametrize("pattern", ["mlp.experts", "*.experts", "*.gate_up_proj", "mlp.experts.down_proj"])
def test_a_pattern_selects_both_weights(pattern, tmp_path):
    save(model(biased=True), tmp_path / "float.safetensors")
    rows = quantize_checkpoint(tmp_path / "float.safetensors", tmp_path / "own.safetensors", "w8a16", exclude=[pattern])
    found = actions(rows)
    assert found["mlp.experts.gate_up_proj"] == found["mlp.experts.down_proj"] == "excluded"
    load_(model(biased=True), tmp_path / "own.safetensors")


class Plain(nn.Module):
    """Experts without a gate: up (I, H) and down (H, I) look like transposed ones of H inner features."""

    def __init__(self, hidden, inner):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(E, inner, hidden))
        self.down_proj = nn.Parameter(torch.randn(E, hidden, inner))
        self.num_experts, self.has_gate, self.act_fn = E, False, torch.relu


@pytest.mark.parametrize(("config", "hidden", "action"), [
    ({}, H, "refused"), ({"hidden_size": H}, H, "quantized"), ({"text_config": {"hidden_size": H}}, H, "quantized"),
    ({"hidden_size": INNER}, INNER, "quantized"), ({"hidden_size": 7}, H, "refused"),
])  # fmt: skip
def test_without_a_gate_the_configuration_decides(config, hidden, action, tmp_path):
    inner = INNER if hidden == H else H
    made = nn.ModuleDict({"experts": Plain(hidden, inner)})
    save(made, tmp_path / "float")
    (tmp_path / "float" / "config.json").write_text(json.dumps({"model_type": "some", **config}))
    rows = quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
    assert set(actions(rows).values()) == {action}
    if action == "quantized":
        qcore.quantize_(made, "w8a16")
        fresh = nn.ModuleDict({"experts": Plain(hidden, inner)})
        load_(fresh, tmp_path / "own")
        for name in ("up_proj", "down_proj"):
            weights = [getattr(m["experts"], name).weight.dequantize() for m in (made, fresh)]
            assert torch.equal(*weights)


@pytest.mark.parametrize("sizes", [{"gate_up_proj": (E, 8, 6)}, {"gate_up_proj": (E, 9, 7), "down_proj": (E, 7, 5)}])
def test_sizes_that_do_not_fit_stay_float(sizes, tmp_path):
    save({f"mlp.experts.{name}": torch.ones(shape) for name, shape in sizes.items()}, tmp_path / "float.safetensors")
    rows = quantize_checkpoint(tmp_path / "float.safetensors", tmp_path / "own.safetensors", "w8a16")
    assert "quantized" not in actions(rows).values()


def test_nan_names_the_file_and_the_expert(tmp_path):
    made = model()
    made.mlp.experts.down_proj.data[1, 0, 0] = float("nan")
    save(made, tmp_path / "float.safetensors")
    with pytest.raises(qcore.CheckpointError, match=r"float\.safetensors: .*down_proj\[1\]"):
        quantize_checkpoint(tmp_path / "float.safetensors", tmp_path / "own.safetensors", "w8a16")


class TestStaysFloat:
    """Unless a pattern other than ``*`` names it, in both ways."""

    def quantized(self, tmp_path, scheme, **options):
        """The names that both ways quantize."""
        made = model()
        save(made, tmp_path / "float.safetensors")
        rows = quantize_checkpoint(tmp_path / "float.safetensors", tmp_path / "own.safetensors", scheme, **options)
        report = qcore.quantize_(made, scheme, **options)
        names = {name.removesuffix(".weight") for name, action in actions(rows).items() if action == "quantized"}
        assert names == {row.name for row in report.by_state("quantized")}
        return names, report

    def test_routers_and_positions(self, tmp_path):
        names, report = self.quantized(tmp_path, "w8a16")
        assert names == EXPERTS | {"out"}
        assert (report["mlp.router"].state, report["embed_positions"].state) == ("excluded", "excluded")
        assert "routes tokens to experts" in report["mlp.router"].reason
        assert "table of positions" in report["embed_positions"].reason

    def test_named_in_a_mapping(self, tmp_path):
        names, _ = self.quantized(tmp_path, {"*.router": "w8a16", "embed_positions": "w8a16", "*": "w4a16-g8"})
        assert names == EXPERTS | {"mlp.router", "embed_positions", "out"}

    def test_named_by_include(self, tmp_path):
        names, _ = self.quantized(tmp_path, "w8a16", include=["mlp.*", "embed_positions"])
        assert names == EXPERTS | {"mlp.router", "embed_positions"}
