"""`qcore.fuse_` on models of transformers: which layers are joined, and that results stay."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import qcore  # noqa: E402
from qcore.nn.siblings import SiblingLinear  # noqa: E402

TEXT = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BERT = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
BOTH = {"d_model": 128, "vocab_size": 128}
MODELS = {
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), 2 * 2),
    "qwen2": (lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT)), 2 * 2),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**BERT)), 2),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                **BOTH,
                d_kv=32,
                d_ff=192,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
                decoder_start_token_id=0,
            )
        ),
        # Of each layer q, k and v, and wi_0 and wi_1; of each of the decoder's also k and v of its cross attention.
        2 * 2 + 2 * 3,
    ),
    "bart": (
        lambda: transformers.BartModel(
            transformers.BartConfig(
                **BOTH,
                encoder_layers=2,
                decoder_layers=2,
                encoder_ffn_dim=192,
                decoder_ffn_dim=192,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
            )
        ),
        2 + 2 * 2,
    ),
}
IDS = torch.arange(24).reshape(2, 12) % 128


def made(name, scheme):
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    qcore.quantize_(model, scheme)
    return model


def results(model):
    more = {"decoder_input_ids": IDS[:, :5]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **more)[0]


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8"])
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_stay_as_they_were(name, scheme):
    model = made(name, scheme)
    expected, state = results(model), copy.deepcopy(model.state_dict())
    groups = qcore.fuse_(model)
    assert len(groups) == MODELS[name][1], groups
    assert not any("cross" in group[0] and len(group) == 3 for group in groups)
    for _ in range(3):
        torch.testing.assert_close(results(model), expected, rtol=1e-4, atol=1e-4)
    siblings = [module for module in model.modules() if isinstance(module, SiblingLinear)]
    assert len(siblings) == sum(map(len, groups))
    assert all(module.siblings for module in siblings)  # nothing was computed in vain
    assert state.keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_generation_and_saving(name, tmp_path):
    model = made(name, "w4a16-g32")
    ask = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    expected = model.generate(IDS[:1, :6], **ask)
    qcore.fuse_(model)
    assert torch.equal(model.generate(IDS[:1, :6], **ask), expected)
    qcore.save(model, tmp_path)
    fresh = MODELS[name][0]().eval()
    qcore.load_(fresh, tmp_path)
    assert torch.equal(fresh.generate(IDS[:1, :6], **ask), expected)
    qcore.fuse_(fresh)
    assert torch.equal(fresh.generate(IDS[:1, :6], **ask), expected)
