"""`qcore.adapters` with `quantize_`, and in language models. Runs where peft is installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcore

peft = pytest.importorskip("peft")

from adapted_models import ALL, PRE, Net, adapted, bits, quantized_net, randomized, same_bits, tokens  # noqa: E402 - after the check that peft is there

import qcore.adapters as adapters  # noqa: E402, PLR0402

# Of transformers, about names that peft uses, and of torch, about an argument that transformers leaves out.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",
    "ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning",
)


# quantize_ and adapters.


def test_quantize_keeps_adapters_and_adopts_their_bases():
    torch.manual_seed(0)
    net = Net()
    net.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)  # peft's own LoRA over a convolution drops the dilation
    model = adapted(net)
    separate = model(tokens())
    report = qcore.quantize_(model, "w8a16")
    assert {row.name for row in report.by_state("quantized")} == {f"{PRE}{name}.base_layer" for name in ALL}
    refused = {row.name: row.reason for row in report.by_state("refused")}
    assert f"{PRE}up.lora_A.default" in refused
    assert f"{PRE}conv.lora_B.default" in refused
    assert all("adapter" in reason for reason in refused.values())
    assert all(type(p) is nn.Parameter for n, p in model.named_parameters() if "lora_" in n)
    torch.testing.assert_close(model(tokens()), separate, rtol=0.1, atol=0.1)
    adopted = adapters.adopt_(model)
    assert set(adopted) == {f"{PRE}{name}" for name in ALL}
    before = bits(model.get_submodule(f"{PRE}up.base_layer"))
    model.merge_adapter()
    model.unmerge_adapter()
    assert same_bits(bits(model.get_submodule(f"{PRE}up.base_layer")), before)
    assert adapters.adopt_(model) == []


@pytest.mark.parametrize("targets", [["attn.c_proj"], ["c_attn", "c_fc", "c_proj"]], ids=["square", "all"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_adapters_over_conv1d_merge_into_what_replaces_it(targets):
    transformers = pytest.importorskip("transformers")
    sizes = transformers.GPT2Config(vocab_size=99, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=targets, fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(sizes).eval(), config)
    ids = torch.arange(12).view(1, 12)
    qcore.quantize_(model, "w8a16")
    assert adapters.adopt_(model)
    with torch.no_grad():
        separate = model(ids).logits
        model.merge_adapter()
        merged = model(ids).logits
    assert float((merged - separate).norm() / separate.norm()) < 0.05


def test_quantize_keeps_trained_copies_and_bases_that_are_read():
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["up"], modules_to_save=["down"], use_dora=True)
    model = peft.get_peft_model(Net(), config)
    report = qcore.quantize_(model, "w8a16")
    assert "trains" in report[f"{PRE}down.modules_to_save.default"].reason
    assert "reads" in report[f"{PRE}up.base_layer"].reason
    assert model(tokens()).isfinite().all()
    model = peft.get_peft_model(Net(), peft.LoHaConfig(r=4, target_modules=["up"]))
    assert "reads" in qcore.quantize_(model, "w8a16")[f"{PRE}up.base_layer"].reason


def test_prepares_for_training():
    net = quantized_net()
    with pytest.raises(qcore.UnsupportedError, match="use_gradient_checkpointing=False"):
        adapters.prepare_model_for_kbit_training(net)
    prepared = adapters.prepare_model_for_kbit_training(net, use_gradient_checkpointing=False)
    assert prepared is net
    assert not any(p.requires_grad for p in net.parameters())


# Models of transformers.

IDS = torch.arange(24).view(2, 12)


def llama(scheme: str = "nf4", tied: bool = False, **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    qcore.quantize_(model, scheme, **options)
    return model


def lora(targets, **options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=targets, **options)


@pytest.mark.parametrize("scheme", ["nf4", "w4a16-g32"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_qlora_of_a_language_model_with_checkpointing(scheme, reentrant):
    base = llama(scheme)
    adapters.prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model = peft.get_peft_model(base, lora("all-linear")).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    optimizer, losses = torch.optim.Adam(trained.values(), lr=3e-3), []
    for _ in range(30):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]


def test_all_linear_means_every_linear_layer_but_the_head():
    model = peft.get_peft_model(llama(exclude=["*.0.mlp.*"]), lora("all-linear"))
    kinds = {n.removeprefix(PRE): type(m) for n, m in model.named_modules() if hasattr(m, "base_layer")}
    assert len(kinds) == 14
    assert kinds["model.layers.0.mlp.up_proj"] is peft.tuners.lora.Linear
    assert kinds["model.layers.1.mlp.up_proj"] is adapters.LoraLinear
    model.add_adapter("second", lora("all-linear"))
    assert not [n for n, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m.base_layer, "base_layer")]
    assert len(model.get_submodule(f"{PRE}model.layers.1.mlp.up_proj").lora_A) == 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:Model with .tie_word_embeddings", "ignore:Setting .save_embedding_layers")
def test_language_model_saves_loads_and_merges(tied, tmp_path):
    targets = ["embed_tokens", "lm_head", "q_proj"]
    model = randomized(peft.get_peft_model(llama("w8a16-g32", tied), lora(targets)), 0.05)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(llama("w8a16-g32", tied), tmp_path).eval()
        assert torch.equal(loaded(input_ids=IDS).logits, wanted)
        merged = model.merge_and_unload()
        found = merged(input_ids=IDS).logits
    assert isinstance(merged.lm_head, qcore.nn.QuantizedLinear)
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_peft_prepares_it_as_well():
    base = llama()
    wanted = base(input_ids=IDS).logits
    prepared = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    assert not any(p.requires_grad for p in prepared.parameters())
    assert torch.equal(prepared(input_ids=IDS).logits, wanted)
