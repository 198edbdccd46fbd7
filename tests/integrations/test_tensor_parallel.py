"""transformers' tensor parallel with quantized layers on two gloo ranks, against one process."""

from __future__ import annotations

import gloo
import pytest
import torch
from hf_parallel_cases import TOKENS, settings
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import qcore
import qcore.hf


def expected(model, path):
    model.eval()
    with torch.no_grad():
        tokens = model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0)
        torch.save({"logits": model(TOKENS).logits, "tokens": tokens}, path)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    base = tmp_path_factory.mktemp("tp")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**settings())).save_pretrained(base / "float")
    schemes = {
        "quantized": qcore.hf.QcoreConfig("w4a16-g32-asym@minmax", exclude=["lm_head"]),
        "fly": qcore.hf.QcoreConfig("w8a16"),
        "left": qcore.hf.QcoreConfig("w8a16", exclude=["lm_head", "*.0.mlp.up_proj"]),
    }
    for name, config in schemes.items():
        model = AutoModelForCausalLM.from_pretrained(base / "float", quantization_config=config)
        expected(model, base / f"{name}.pt")
        if name == "quantized":
            model.save_pretrained(base / name)
    moe = {**settings(num_local_experts=4, num_experts_per_tok=2)}
    MixtralForCausalLM(MixtralConfig(**{k: v for k, v in moe.items() if "bias" not in k})).save_pretrained(base / "m")
    model = AutoModelForCausalLM.from_pretrained(base / "m", quantization_config=qcore.hf.QcoreConfig("w8a16-g32"))
    expected(model, base / "moe.pt")
    model.save_pretrained(base / "moe")
    every = gloo.run("hf_parallel_cases", 2, base / "two")
    for name, values in every.items():
        assert not any(isinstance(v, str) for v in values), f"{name}: {values}"
    return every


@pytest.mark.parametrize("case", ["stored", "experts", "on the fly", "left float"])
def test_equals_one_process(found, case):
    for rank in found[case]:
        assert rank["error"] < 2e-6
        assert rank["same"]


def test_layers_are_cut(found):
    kinds = set(found["stored"][0]["kinds"].values())
    assert kinds >= {"ColumnParallelLinear", "RowParallelLinear"}
    assert len(found["stored"][0]["kinds"]) >= 14
    assert "ParallelExperts" in found["experts"][0]["kinds"].values()
    left = found["left float"][0]["kinds"]
    assert left["model.layers.0.mlp.up_proj"] == "FloatColumnParallelLinear"
    assert left["model.layers.1.mlp.up_proj"] == "ColumnParallelLinear"


def test_each_rank_reads_its_part_only(found):
    """Half of the codes, and of the scales but for groups that a border cuts; no linear layer is read whole."""
    codes = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 176)  # weights of two layers
    whole = codes // 2 + codes // 32 * (4 + 1)
    # Both ranks read the group of down_proj that the border cuts: 32 codes of half a byte, in 128 rows of two layers,
    # and two more pairs of scale and zero point, because the last group is ragged.
    torn = 2 * 128 * (16 + 2 * (4 + 1))
    embedding = 64 * 64 + 64 * 4 * (4 + 1)  # read whole, then cut
    for rank in found["stored"]:
        assert rank["whole"] == embedding
        assert whole / 2 <= rank["parts"] <= whole / 2 + torn


def test_parts_are_not_saved_as_a_model(found):
    for rank in found["stored"]:
        assert "UnsupportedError: save_pretrained: this rank holds a part" in rank["refused"]


def test_expert_parallel_is_refused():
    from qcore.hf.tensor_parallel import TensorParallel

    model = LlamaForCausalLM(LlamaConfig(**settings(num_hidden_layers=1)))
    model.config.distributed_config = type("Config", (), {"ep_size": 2, "tp_size": 1})()
    with pytest.raises(qcore.UnsupportedError, match="expert parallelism"):
        TensorParallel.of(model)
