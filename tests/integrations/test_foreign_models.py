"""Whole tiny models of transformers in the formats of other tools: the logits of the dense weights, to rounding."""

import copy

import pytest
import torch
from foreign_writers import FORMATS, write_directory

import qcore

transformers = pytest.importorskip("transformers")


def config(**more):
    return transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config()).eval()


def linears(model):
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]


@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_those_of_the_dense_weights(format, model, tmp_path):
    dense = write_directory(tmp_path, model.config.to_dict(), model.state_dict(), linears(model), format)
    expected = copy.deepcopy(model)
    expected.load_state_dict(dense)
    with torch.device("meta"):
        loaded = transformers.LlamaForCausalLM(config()).eval()
    report = qcore.load_(loaded, tmp_path)
    assert sum(row.state == "quantized" for row in report) == len(linears(model))
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, wanted = loaded(ids).logits, expected(ids).logits
    if format == "fp8":  # activations are fp8 there
        assert float((found - wanted).norm() / wanted.norm()) < 0.1
        return
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("format", ["gptq", "fp8", "bitsandbytes NF4"])
def test_saved_as_qcore_s_own_and_loaded_again(format, model, tmp_path):
    write_directory(tmp_path / "foreign", model.config.to_dict(), model.state_dict(), linears(model), format)
    models = []
    for source in ("foreign", "own"):
        with torch.device("meta"):
            models.append(transformers.LlamaForCausalLM(config()).eval())
        qcore.load_(models[-1], tmp_path / source)
        qcore.save(models[-1], tmp_path / "own")
    ids = torch.randint(0, 128, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)
