"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1 and Q8_0, beside the weights that the package gguf makes of it."""

import pytest
import torch
from smollm2 import FILE, dense_state, needs_file

import qcore

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = needs_file


@pytest.fixture(scope="module")
def file():
    return FILE


def test_text_and_logits_are_those_of_the_dequantized_weights(file):
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model, dense = (transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    dense.load_state_dict(dense_state(dense), strict=False, assign=True)
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
