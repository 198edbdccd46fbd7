"""Whole tiny models of transformers in the formats of other tools: the logits of the dense weights, to rounding."""

import copy

import pytest
import torch
from foreign_writers import FORMATS, write_directory

import qcore
import qcore.checkpoint

transformers = pytest.importorskip("transformers")

import qcore.hf  # noqa: E402


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


@pytest.mark.parametrize("parts", [("c_attn", "c_fc", "c_proj"), ("attn.c_proj",)], ids=["all", "square"])
@pytest.mark.parametrize("format", ["gptq", "bitsandbytes NF4"])
def test_conv1d_of_gpt2(format, parts, tmp_path):
    """Its float weight is (K, N), but tools store the quantized one as that of a linear layer, (N, K)."""
    sizes = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(sizes).eval()
    layers = [name for name, _ in model.named_modules() if name.endswith(parts)]
    weights = {f"{name}.weight" for name in layers}
    state = {n: t.t().contiguous() if n in weights else t for n, t in model.state_dict().items()}
    dense = write_directory(tmp_path / "foreign", sizes.to_dict(), state, layers, format)
    model.load_state_dict({n: t.t() if n in weights else t for n, t in dense.items()})
    ids = torch.arange(20).reshape(2, 10)
    found = []
    for source in ("foreign", "own"):
        loaded = transformers.GPT2LMHeadModel(sizes).eval()
        report = qcore.load_(loaded, tmp_path / source)
        assert sum(row.state == "quantized" for row in report) == len(layers)
        qcore.save(loaded, tmp_path / "own")
        with torch.no_grad():
            found.append(loaded(ids).logits)
    with torch.no_grad():
        wanted = model(ids).logits
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_conv1d_of_gpt2_quantized_here(tmp_path):
    sizes = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(sizes).eval()
    ids = torch.arange(20).reshape(2, 10)
    model.save_pretrained(tmp_path / "float")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "float", quantization_config=qcore.hf.QcoreConfig("w8a16")
    )
    loaded.save_pretrained(tmp_path / "own")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "own")
    with torch.no_grad():
        wanted = model(ids).logits
        report = qcore.quantize_(model, "w8a16")
        assert {row.state for row in report} == {"quantized"}
        found = model(ids).logits
        assert float((found - wanted).norm() / wanted.norm()) < 0.02
        assert torch.equal(again(ids).logits, loaded(ids).logits)
        layer, own = (one.transformer.h[1].attn.c_proj.weight for one in (model, loaded))
        assert torch.equal(layer.data, own.data)  # a square one
        assert type(loaded.transformer.h[0].attn.c_attn) is qcore.nn.QuantizedLinear


@pytest.mark.parametrize("config", [True, False])
def test_conv1d_of_gpt2_quantized_by_the_command_line(config, tmp_path):
    """Without the model, config.json tells which matrices are (K, N); without it, they are quantized as they are."""
    sizes = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=4, n_positions=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(sizes).eval()
    model.save_pretrained(tmp_path / "float")
    if not config:
        (tmp_path / "float" / "config.json").unlink()
    qcore.checkpoint.quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
    loaded = transformers.GPT2LMHeadModel(sizes).eval()
    report = qcore.load_(loaded, tmp_path / "own")
    assert report["transformer.h.0.attn.c_proj"].state == ("quantized" if config else "float")
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        found, wanted = loaded(ids).logits, model(ids).logits
        assert float((found - wanted).norm() / wanted.norm()) < 0.02
        if config:
            again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "own")
            qcore.quantize_(model, "w8a16")
            assert torch.equal(found, model(ids).logits)
            assert torch.equal(found, again(ids).logits)
