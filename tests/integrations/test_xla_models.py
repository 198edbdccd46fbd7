"""Models of transformers as one XLA program: text with a static cache, greedy, is that of torch."""

import copy

import pytest
import torch

import qcore
from qcore import graphs

transformers = pytest.importorskip("transformers")
pytest.importorskip("qcore_xla")

from compiled_models import (  # noqa: E402 - needs transformers
    check_one_part_a_step,
    greedy,
    minilm,
    needs_minilm,
    smollm2_model,
    tiny_decoder,
)
from smollm2 import needs_file  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_tiny_decoders(kind):
    model = tiny_decoder(kind)
    compiled, ids = torch.compile(copy.deepcopy(model), backend="qcore_xla"), torch.tensor([[3, 1, 4, 1, 5]])
    assert greedy(compiled, model.config, ids, 24) == greedy(model, model.config, ids, 24)
    check_one_part_a_step(compiled)


@needs_minilm
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "tolerance"), [(None, 1e-5), ("w4a16-g32-asym", 1e-5), ("w8a8", 6e-2)])
def test_minilm(scheme, tolerance):
    model, ids, mask = minilm()
    if scheme:
        qcore.quantize_(model, scheme)
    compiled = torch.compile(copy.deepcopy(model), backend="qcore_xla")
    y, expected = compiled(ids, mask), model(ids, mask)
    assert (y - expected).norm() <= tolerance * expected.norm()
    found = graphs.explain(compiled)
    assert not found.host, str(found)
    assert found.submissions == 1


@needs_file
def test_smollm2_writes_the_same_64_tokens():
    model, ids = smollm2_model()
    compiled = torch.compile(model, backend="qcore_xla")
    assert greedy(compiled, model.config, ids, 64) == greedy(model, model.config, ids, 64)
    check_one_part_a_step(compiled)
