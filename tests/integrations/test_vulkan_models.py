"""Models of transformers on a Vulkan device: text with a static cache, greedy, is that of torch."""

import copy

import pytest
import torch
from smollm2 import needs_file

import qcore
from qcore import graphs

transformers = pytest.importorskip("transformers")
pytest.importorskip("qcore_vulkan")

from compiled_models import (  # noqa: E402 - needs transformers
    check_one_part_a_step,
    greedy,
    minilm,
    needs_minilm,
    smollm2_model,
    tiny_decoder,
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_tiny_decoders(kind):
    model = tiny_decoder(kind)
    compiled, ids = torch.compile(copy.deepcopy(model), backend="qcore_vulkan"), torch.tensor([[3, 1, 4, 1, 5]])
    assert greedy(compiled, model.config, ids, 24) == greedy(model, model.config, ids, 24)
    check_one_part_a_step(compiled)


def test_a_tiny_encoder():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.BertModel(config).eval()
    qcore.quantize_(model, "w8a16")
    compiled = torch.compile(copy.deepcopy(model), backend="qcore_vulkan")
    ids, mask = torch.randint(0, 128, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    with torch.no_grad():
        y, expected = (m(input_ids=ids, attention_mask=mask).last_hidden_state for m in (compiled, model))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@needs_minilm
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "tolerance", "attention"), [
    (None, 1e-5, "eager"), ("w8a16", 1e-5, "sdpa"), ("w8a8", 6e-2, "sdpa"),  # w8a8: each layer amplifies roundings
])  # fmt: skip
def test_minilm(scheme, tolerance, attention):
    model, ids, mask = minilm(attention)
    if scheme:
        qcore.quantize_(model, scheme)
    compiled = torch.compile(copy.deepcopy(model), backend="qcore_vulkan")
    y, expected = compiled(ids, mask), model(ids, mask)
    assert (y - expected).norm() <= tolerance * expected.norm()
    found = graphs.explain(compiled)
    assert not found.host, str(found)
    assert found.submissions == 1


@needs_file
@pytest.mark.grid  # minutes on lavapipe
def test_smollm2_writes_the_same_64_tokens():
    model, ids = smollm2_model()
    compiled = torch.compile(model, backend="qcore_vulkan")
    assert greedy(compiled, model.config, ids, 64) == greedy(model, model.config, ids, 64)
    check_one_part_a_step(compiled)
