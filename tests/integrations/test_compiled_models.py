"""Models of transformers, compiled as whole programs by each plugin that does: greedy text and vectors are torch's."""

import copy
import importlib.util

import pytest
import torch
from smollm2 import needs_file

import qcore
from qcore import graphs

pytest.importorskip("transformers")

from compiled_models import (
    check_one_part_a_step,
    greedy,
    minilm,
    needs_minilm,
    smollm2_model,
    tiny_decoder,
)

import qcore.hf

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.alternate]


@pytest.fixture(params=["qcore_vulkan", "qcore_xla"])
def backend(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_tiny_decoders(kind, backend):
    model = tiny_decoder(kind)
    compiled, ids = torch.compile(copy.deepcopy(model), backend=backend), torch.tensor([[3, 1, 4, 1, 5]])
    expected = greedy(model, model.config, ids, 24)
    assert greedy(compiled, model.config, ids, 24) == expected
    check_one_part_a_step(compiled)
    if kind != "Mistral":  # caches of sliding windows count in Python
        assert greedy(compiled, model.config, ids, 24, replayed=2) == expected


@pytest.mark.parametrize("kind", ["Mistral", "Gemma3Text"])
def test_sliding_windows_are_few_programs(kind, backend):
    """Their caches count in Python, are first filled and then moved."""
    model = tiny_decoder(kind, sliding_window=16, head_dim=16)
    compiled, ids = torch.compile(copy.deepcopy(model), backend=backend), torch.tensor([[3, 1, 4, 1, 5]])
    assert greedy(compiled, model.config, ids, 24) == greedy(model, model.config, ids, 24)
    check_one_part_a_step(compiled)
    assert len(graphs.explain(compiled).reports) == 3


@pytest.mark.parametrize(("kind", "window", "programs"), [("Llama", {}, 1), ("Mistral", {"sliding_window": 16}, 3)])
def test_generate_compiles_steps(kind, window, programs, backend):
    """Prompts run as without a backend; a window is empty at first, then counted, then full."""
    model, given = tiny_decoder(kind, **window), {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    compiled = {"cache_implementation": "static", "compile_config": qcore.hf.compile_config(backend)}
    for ids in (torch.tensor([[1, 5, 9, 2, 6]]), torch.tensor([[3, 1, 4]])):
        expected = model.generate(ids, **given)
        assert torch.equal(model.generate(ids, **given, **compiled), expected)
    check_one_part_a_step(model)
    assert len(graphs.explain(model).reports) == programs


def test_caches_that_count_in_python_have_no_replay(backend):
    model = tiny_decoder("Mistral", sliding_window=16)
    compiled, ids = torch.compile(copy.deepcopy(model), backend=backend), torch.tensor([[3, 1, 4, 1, 5]])
    with pytest.raises(qcore.UnsupportedError, match="cumulative_length_int"):
        greedy(compiled, model.config, ids, 4, replayed=3)


@needs_minilm
@torch.no_grad()
@pytest.mark.parametrize(("scheme", "tolerance", "attention"), [
    (None, 1e-5, "eager"), ("w8a16", 1e-5, "sdpa"), ("w8a8", 6e-2, "sdpa"),  # w8a8: each layer amplifies roundings
])  # fmt: skip
def test_minilm(scheme, tolerance, attention, backend):
    model, ids, mask = minilm(attention)
    if scheme:
        qcore.quantize_(model, scheme)
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    y, expected = compiled(ids, mask), model(ids, mask)
    assert (y - expected).norm() <= tolerance * expected.norm()
    found = graphs.explain(compiled)
    assert not found.host, str(found)
    assert found.submissions == 1


@needs_file
@pytest.mark.parametrize(
    ("backend", "tokens"), [("qcore_vulkan", 24), ("qcore_xla", 64)], indirect=["backend"]
)  # lavapipe takes about two seconds for a token
def test_smollm2_writes_the_same_tokens(backend, tokens):
    model, ids = smollm2_model()
    compiled = torch.compile(model, backend=backend)
    assert greedy(compiled, model.config, ids, tokens) == greedy(model, model.config, ids, tokens)
    check_one_part_a_step(compiled)
