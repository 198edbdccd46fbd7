"""Whole models to GGUF: read back by the package gguf, by transformers and by qcore, whose logits are the source's."""

import pytest
import torch
from model_zoo import MODELS, loaded, logits, quantized

import qcore

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.filterwarnings("ignore:.*no vocabulary")
@pytest.mark.parametrize("name", MODELS)
def test_qcore_reads_what_it_writes(name, tmp_path):
    model = quantized(name, tmp_path / "own")
    qcore.convert(tmp_path / "own", tmp_path / "model.gguf", "gguf")
    assert_close(logits(loaded(model, tmp_path / "model.gguf")), logits(model))


READ = {
    "llama": {},
    "llama-tied": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768},
    "phi3": {},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
}
"""What transformers reads of GGUF, and the sizes that it does not read there but takes for its defaults."""


@pytest.mark.filterwarnings("ignore:.*no vocabulary")
@pytest.mark.parametrize("name", READ)
def test_transformers_reads_it(name, tmp_path):
    model = quantized(name, tmp_path / "own", **READ[name])
    qcore.convert(tmp_path / "own", tmp_path / "model.gguf", "gguf")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert_close(logits(found.eval()), logits(model))
