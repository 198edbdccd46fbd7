"""Models of transformers on a Vulkan device: padded batches, beam search and copies of caches."""

import copy

import pytest
import torch

import qcore
from qcore import graphs

transformers = pytest.importorskip("transformers")
pytest.importorskip("qcore_vulkan")

from compiled_models import tiny_decoder  # noqa: E402 - needs transformers

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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


def decoder():
    """A tiny decoder whose words differ much, so that its beams change places, and a batch of two prompts."""
    model = tiny_decoder("Llama", bos_token_id=1, eos_token_id=2, pad_token_id=0)
    for weight in model.parameters():
        weight.data.mul_(6 if weight.dim() > 1 else 1)
    return model, torch.tensor([[3, 1, 4, 1, 5], [7, 8, 9, 10, 11]])


def generated(model, ids, beams):
    """Text of `generate` with a static cache."""
    return model.generate(
        ids, num_beams=beams, max_new_tokens=10, min_new_tokens=10, do_sample=False, cache_implementation="static",
        disable_compile=True,
    )  # fmt: skip


def test_beam_search_over_a_static_cache_is_an_error():
    expected, ids = decoder()
    model = copy.deepcopy(expected)
    model.forward = torch.compile(model.forward, backend="qcore_vulkan")
    assert torch.equal(generated(model, ids, 1), generated(expected, ids, 1))
    with pytest.raises(qcore.PluginError, match="made by torch from stale memory"):
        generated(model, ids, 3)


def reordered(cache, order):
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            states.copy_(states.index_select(0, order))
    return cache


def test_beam_search_that_reorders_on_the_device():
    expected, ids = decoder()
    model, orders = copy.deepcopy(expected), []
    model.forward = torch.compile(model.forward, backend="qcore_vulkan")
    reorder = torch.compile(reordered, backend="qcore_vulkan")
    model._reorder_cache = lambda cache, order: orders.append(order.tolist()) or reorder(cache, order)
    assert torch.equal(generated(model, ids, 3), generated(expected, ids, 3))
    assert any(order != [*range(6)] for order in orders)  # else nothing was tested


@torch.no_grad()
def test_copies_of_a_prompt_cache():
    expected, ids = decoder()
    compiled = torch.compile(copy.deepcopy(expected), backend="qcore_vulkan")
    first, place = ids[:1], torch.arange(5)[None]

    def step(model, cache, words, place):
        return model(input_ids=words, past_key_values=cache, position_ids=place, use_cache=True).logits

    def prompt(model):
        cache = transformers.StaticCache(config=expected.config, max_cache_len=32)
        cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
        step(model, cache, first, place)
        return cache

    kept, wanted = prompt(compiled), prompt(expected)
    step(compiled, copy.deepcopy(prompt(expected)), ids[1:, :1], torch.tensor([[5]]))  # it is compiled
    with pytest.raises(qcore.PluginError, match="made by torch from stale memory"):
        step(compiled, copy.deepcopy(kept), ids[1:, :1], torch.tensor([[5]]))
    graphs.synchronize([states for layer in kept.layers for states in (layer.keys, layer.values)])
    for word in ids[1]:
        y = step(compiled, copy.deepcopy(kept), word[None, None], torch.tensor([[5]]))
        torch.testing.assert_close(
            y, step(expected, copy.deepcopy(wanted), word[None, None], torch.tensor([[5]])), rtol=1e-3, atol=1e-3
        )
