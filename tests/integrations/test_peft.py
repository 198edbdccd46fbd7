"""`qcore.adapters`: peft's LoRA over quantized layers. Runs where peft is installed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import qcore

peft = pytest.importorskip("peft")

from adapted_models import ALL, PRE, adapted, bits, dense_net, dense_twin, quantized_net, randomized, same_bits, tokens  # noqa: E402 - after the check that peft is there

import qcore.adapters as adapters  # noqa: E402, PLR0402

# Of transformers, about names that peft uses, and of torch, about an argument that transformers leaves out.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",
    "ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning",
)


def test_wraps_each_kind_of_layer_without_warnings(recwarn):
    model = adapted(quantized_net())
    kinds = {name: type(model.get_submodule(PRE + name)) for name in ALL}
    assert kinds == {
        "table": adapters.LoraEmbedding, "up": adapters.LoraLinear, "down": adapters.LoraLinear,
        "conv": adapters.LoraConv2d,
    }  # fmt: skip
    assert not [w for w in recwarn if "qcore" in str(w.message) or "Unsupported layer" in str(w.message)]


def test_registers_once():
    before = peft.tuners.lora.LoraModel._create_new_module
    adapters.register()
    assert peft.tuners.lora.LoraModel._create_new_module is before


@pytest.mark.parametrize("scheme", ["w4a16-g32", "nf4", "w8a16"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_equals_peft_over_the_dense_weight(scheme, use_rslora):
    net = quantized_net(scheme)
    # peft's own convolution drops the dilation, so it stands beside the layers that it gets right.
    targets = ["table", "up", "down"]
    options = {"targets": targets, "use_rslora": use_rslora}
    theirs, ours = adapted(dense_net(net), **options), adapted(net, **options)
    torch.testing.assert_close(ours(tokens()), theirs(tokens()), rtol=1e-4, atol=1e-4)


def test_convolution_equals_its_formula():
    net = quantized_net()
    twin, model = dense_net(net), adapted(net, ["conv"])
    layer = model.get_submodule(f"{PRE}conv")
    x = torch.randn(2, 4, 8, 8)
    down, up = layer.lora_A["default"], layer.lora_B["default"]
    wanted = twin.conv(x) + layer.scaling["default"] * up(
        torch.nn.functional.conv2d(x, down.weight, stride=2, padding=1, dilation=2)
    )
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)


def test_grouped_convolution_adapts_but_does_not_merge():
    model = adapted(quantized_net(groups=2), ["conv"])
    before = model(tokens())
    assert before.isfinite().all()
    with pytest.raises(qcore.UnsupportedError, match="groups"):
        model.merge_adapter()
    assert torch.equal(model(tokens()), before)


@pytest.mark.parametrize("scheme", ["nf4", "w4a16-g32"])
def test_gradients_equal_those_over_the_dense_weight(scheme):
    net = quantized_net(scheme)
    layers = [adapted(nn.Sequential(made), ["0"]) for made in (dense_twin(net.up), net.up)]
    found = []
    for layer in layers:
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
        layer(x).square().sum().backward()
        adapter = {n: p.grad for n, p in layer.named_parameters() if "lora_" in n}
        assert len(adapter) == 2
        found.append({"x": x.grad, **adapter})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["nf4", "w4a16-g32"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_trains(scheme, use_dora):
    targets = ["up", "down"] if use_dora else ALL
    net = quantized_net(scheme)
    frozen = {name: bits(getattr(net, name)) for name in ALL}
    model = peft.get_peft_model(net, peft.LoraConfig(r=8, target_modules=targets, use_dora=use_dora))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=1e-2), []
    x, wanted = tokens(32), torch.randn(32, model(tokens(1)).shape[1])
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(same_bits(frozen[name], bits(model.get_submodule(PRE + name + ".base_layer" * (name in targets))))
               for name in ALL)  # fmt: skip


def test_merges_to_the_quantized_sum_and_back_to_the_same_bits():
    net = quantized_net()
    model = adapted(net)
    base = {name: model.get_submodule(f"{PRE}{name}.base_layer") for name in ALL}
    before = {name: (bits(layer), layer.scheme) for name, layer in base.items()}
    separate = model(tokens())
    up = model.get_submodule(f"{PRE}up")
    total = up.base_layer.weight.dequantize(torch.float32) + up.get_delta_weight("default")
    model.merge_adapter()
    merged = model(tokens())
    fresh = qcore.quantize(total.detach(), base["up"].weight.format, base["up"].weight.quantizer)
    assert same_bits(bits(base["up"]), dict(fresh.tensors()))
    assert not any(same_bits(bits(layer), before[name][0]) for name, layer in base.items())
    assert all(layer.scheme == before[name][1] for name, layer in base.items())
    # Quantized once more, the sum differs by the rounding of the scheme: less than the adapters' own effect.
    with model.disable_adapter():
        plain = model(tokens())
    assert (merged - separate).norm() < 0.5 * (plain - separate).norm()
    assert all(same_bits(bits(layer), before[name][0]) for name, layer in base.items())
    model.merge_adapter()
    model.unmerge_adapter()
    assert torch.equal(model(tokens()), separate)
    assert all(same_bits(bits(layer), before[name][0]) for name, layer in base.items())


def test_merges_exactly_where_the_grid_holds_the_sum():
    """At 8 bits and an update much larger than the grid's step the merged layer is within that step."""
    model = adapted(quantized_net("w8a16-g32"), ["up"])
    layer = model.get_submodule(f"{PRE}up")
    wanted = layer.base_layer.weight.dequantize(torch.float32) + layer.get_delta_weight("default")
    model.merge_adapter(safe_merge=True)
    weight = layer.base_layer.weight
    step = weight.scale.t().repeat_interleave(32, 1)
    assert ((weight.dequantize(torch.float32) - wanted).abs() <= 0.51 * step).all()


@pytest.mark.parametrize("lora_bias", [False, True])
def test_merge_and_unload_gives_quantized_layers(lora_bias):
    targets = ["up", "conv"] if lora_bias else ALL
    model = adapted(quantized_net("w8a16-g32"), targets, lora_bias=lora_bias)
    separate = model(tokens())
    plain = model.merge_and_unload(safe_merge=True)
    assert isinstance(plain.up, qcore.nn.QuantizedLinear)
    assert isinstance(plain.conv, qcore.nn.QuantizedConv2d)
    torch.testing.assert_close(plain(tokens()), separate, rtol=0.1, atol=0.1)


def test_restores_the_bias():
    model = adapted(quantized_net(), ["up"], lora_bias=True)
    base = model.get_submodule(f"{PRE}up.base_layer")
    before = base.bias.detach().clone()
    model.merge_adapter()
    assert not torch.equal(base.bias, before)
    model.unmerge_adapter()
    assert torch.equal(base.bias, before)


def test_refuses_to_merge_nan_and_leaves_the_layer_alone():
    model = adapted(quantized_net(), ["up"])
    layer = model.get_submodule(f"{PRE}up")
    before = bits(layer.base_layer)
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        model.merge_adapter()
    assert same_bits(bits(layer.base_layer), before)
    assert not layer.merged


def test_merges_several_adapters_with_one_rounding():
    model = adapted(quantized_net(), ["up"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up"]))
    randomized(model)
    layer = model.get_submodule(f"{PRE}up")
    before = bits(layer.base_layer)
    total = layer.base_layer.weight.dequantize(torch.float32)
    total = total + layer.get_delta_weight("default") + layer.get_delta_weight("other")
    layer.merge(adapter_names=["default"])
    with pytest.warns(UserWarning, match="additionally"):
        layer.merge(adapter_names=["other"])
    weight = layer.base_layer.weight
    assert same_bits(bits(layer.base_layer), dict(qcore.quantize(total, weight.format, weight.quantizer).tensors()))
    assert layer.merged_adapters == ["default", "other"]
    layer.unmerge()
    assert same_bits(bits(layer.base_layer), before)


def test_merging_one_of_two_tied_layers_leaves_the_other():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
            self.head.weight = self.table.weight
            self.norm = nn.LayerNorm(64)

        def forward(self, tokens):
            return self.head(self.norm(self.table(tokens)))

    torch.manual_seed(0)
    net = Tied()
    qcore.quantize_(net, "w8a16-g32")
    model = adapted(net, ["table"])
    separate, head = model(tokens()), model.get_submodule(f"{PRE}head")
    before = bits(head)
    model.merge_adapter()
    assert same_bits(bits(head), before)
    torch.testing.assert_close(model(tokens()), separate, rtol=0.1, atol=0.1)
    model.unmerge_adapter()
    assert model.get_submodule(f"{PRE}table.base_layer")._store is head._store
    assert torch.equal(model(tokens()), separate)


def test_quantizer_that_needs_inputs_is_replaced_in_a_merge():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32))
    qcore.quantize_(net, "w4a16-g32@gptq", calibration=[torch.randn(64, 64)])
    model = adapted(net, ["0"])
    base = model.get_submodule(f"{PRE}0.base_layer")
    before = bits(base)
    model.merge_adapter()
    assert base.scheme.quantizer == base.weight.quantizer == "mse"
    model.unmerge_adapter()
    assert base.scheme.quantizer == base.weight.quantizer == "gptq"
    assert same_bits(bits(base), before)


def test_merges_alike_for_a_config_for_conv1d():
    """GPT-2's layers are (K, N) when float and (N, K) when quantized: fan_in_fan_out no longer applies to them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    qcore.quantize_(net, "w8a16")
    config = peft.LoraConfig(target_modules=["0", "1"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(net, config).eval()
    x = torch.randn(3, 64)
    before = model(x).detach()
    after = model.merge_and_unload()(x).detach()
    assert float((after - before).norm() / before.norm()) < 0.02
    assert config.fan_in_fan_out


def test_saves_and_loads(tmp_path):
    model = adapted(quantized_net())
    wanted = model(tokens())
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(quantized_net(), tmp_path)
    assert torch.equal(loaded(tokens()), wanted)
    assert type(loaded.get_submodule(f"{PRE}up")) is adapters.LoraLinear


def test_dora_equals_peft_over_the_dense_weight_and_merges(tmp_path):
    net = quantized_net("w8a16-g32")
    targets = ["up", "down"]
    theirs, ours = adapted(dense_net(net), targets, use_dora=True), adapted(net, targets, use_dora=True)
    for model in (ours, theirs):
        for name in targets:
            magnitude = model.get_submodule(PRE + name).lora_magnitude_vector["default"].weight
            with torch.no_grad():
                magnitude.mul_(torch.linspace(0.5, 1.5, len(magnitude)))
    wanted = theirs(tokens())
    torch.testing.assert_close(ours(tokens()), wanted, rtol=1e-4, atol=1e-4)
    # peft's file of the float model fits.
    theirs.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(quantized_net("w8a16-g32"), tmp_path)
    torch.testing.assert_close(loaded(tokens()), wanted, rtol=1e-4, atol=1e-4)
    before = bits(ours.get_submodule(f"{PRE}up.base_layer"))
    ours.merge_adapter()
    torch.testing.assert_close(ours(tokens()), wanted, rtol=0.05, atol=0.05)
    ours.unmerge_adapter()
    assert same_bits(bits(ours.get_submodule(f"{PRE}up.base_layer")), before)


def test_dora_with_dropout_trains():
    model = adapted(quantized_net(), ["up"], use_dora=True, lora_dropout=0.3)
    model.train()
    torch.manual_seed(5)
    model(tokens()).sum().backward()
    layer = model.get_submodule(f"{PRE}up")
    assert layer.lora_A["default"].weight.grad.isfinite().all()
    assert layer.lora_magnitude_vector["default"].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"target_modules": ["table"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["conv"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["up"], "init_lora_weights": "pissa"}, "pissa"),
        ({"target_modules": ["up"], "init_lora_weights": "olora"}, "olora"),
        ({"target_modules": ["up"], "modules_to_save": ["down"]}, "frozen"),
        ({"target_modules": ["up"], "trainable_token_indices": {"table": [1, 2]}}, "frozen"),
    ],
)
def test_refuses_in_words(options, word):
    with pytest.raises(qcore.UnsupportedError, match=word):
        peft.get_peft_model(quantized_net(), peft.LoraConfig(r=4, **options))


def test_refuses_experts():
    net = nn.ModuleDict({"norm": nn.LayerNorm(64)})
    net["experts"] = qcore.nn.QuantizedGroupedLinear.from_float(torch.randn(2, 32, 64), "w4a16-g32")
    with pytest.raises(qcore.UnsupportedError, match=r"experts.*QuantizedGroupedLinear"):
        peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["experts"]))


def test_refuses_padding_that_lora_would_not_apply():
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"))
    qcore.quantize_(net, "w8a16")
    with pytest.raises(qcore.UnsupportedError, match="reflect"):
        peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0"]))


def test_other_tuners_refuse_by_themselves():
    with pytest.raises(TypeError, match="not supported"):
        peft.get_peft_model(quantized_net(), peft.LoHaConfig(r=4, target_modules=["up"]))


def test_leaves_float_layers_and_mapped_classes_to_peft():
    class Own(peft.tuners.lora.Linear):
        pass

    net = quantized_net()
    net.up = nn.Linear(64, 96)
    config = peft.LoraConfig(r=4, target_modules=["up", "down"])
    config._register_custom_module({qcore.nn.QuantizedLinear: Own})
    with pytest.warns(UserWarning, match="Unsupported layer type"):
        model = peft.get_peft_model(net, config)
    assert type(model.get_submodule(f"{PRE}up")) is peft.tuners.lora.Linear
    assert type(model.get_submodule(f"{PRE}down")) is Own


def test_one_batch_mixes_adapters():
    model = adapted(quantized_net(), ["table", "up", "down"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["table", "up", "down"]))
    randomized(model).eval()
    x = tokens(3)
    alone = []
    for row, name in enumerate(("default", "other")):
        model.set_adapter(name)
        alone.append(model(x)[row])
    with model.disable_adapter():
        alone.append(model(x)[2])
    with torch.no_grad():
        mixed = model(x, adapter_names=["default", "other", "__base__"])
    torch.testing.assert_close(mixed, torch.stack(alone), rtol=1e-4, atol=1e-4)


def test_adds_weighted_adapters():
    model = adapted(quantized_net(), ["up"])
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["up"]))
    randomized(model)
    model.base_model.add_weighted_adapter(["default", "other"], [0.5, 0.25], "both", combination_type="cat")
    layer = model.get_submodule(f"{PRE}up")
    wanted = 0.5 * layer.get_delta_weight("default") + 0.25 * layer.get_delta_weight("other")
    torch.testing.assert_close(layer.get_delta_weight("both"), wanted)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "wfp8a16", "w4a16-g32-fzp", "w8a8", "w4a8-g32-asym"])
def test_merges_in_every_kind_of_scheme(scheme):
    model = adapted(quantized_net(scheme), ["up", "down"])
    layer = model.get_submodule(f"{PRE}up.base_layer")
    before, separate = (bits(layer), layer.scheme), model(tokens())
    model.merge_adapter()
    assert (layer.scheme, layer.weight.format) == (before[1], before[1].weight)
    assert (model(tokens()) - separate).norm() < 0.2 * separate.norm()
    model.unmerge_adapter()
    assert same_bits(bits(layer), before[0])
    assert torch.equal(model(tokens()), separate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_dora", [False, True])
def test_half_precision(dtype, use_dora):
    model = adapted(quantized_net("w8a16-g32").to(dtype), ["up", "down"], use_dora=use_dora)
    single = adapted(quantized_net("w8a16-g32"), ["up", "down"], use_dora=use_dora)
    wanted = single(tokens())
    found = model(tokens())
    assert found.dtype == dtype
    assert (found.float() - wanted).norm() < 0.03 * wanted.norm()
    model.merge_adapter()
    assert (model(tokens()).float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("use_dora", [False, True])
def test_loads_lazily_a_second_time_and_without_the_first(use_dora, tmp_path):
    model = adapted(quantized_net(), ["up", "down"], use_dora=use_dora)
    wanted = model(tokens())
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(quantized_net(), tmp_path, low_cpu_mem_usage=True)
    assert torch.equal(loaded(tokens()), wanted)
    loaded.load_adapter(tmp_path, "again")
    loaded.set_adapter("again")
    loaded.delete_adapter("default")
    assert torch.equal(loaded(tokens()), wanted)
    assert type(loaded.unload().up) is qcore.nn.QuantizedLinear


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, as it traces
def test_compiles_and_differentiates():
    model = adapted(quantized_net(), ["up", "down"])
    wanted = model(tokens())
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()), wanted)
    compiled(tokens()).sum().backward()
    assert model.get_submodule(f"{PRE}up").lora_A["default"].weight.grad.abs().sum() > 0


def test_moves_while_merged():
    model = adapted(quantized_net(), ["up"])
    layer = model.get_submodule(f"{PRE}up")
    before, separate = bits(layer.base_layer), model(tokens())
    model.merge_adapter()
    model.double()
    model.float()
    layer.unmerge()
    assert same_bits(bits(layer.base_layer), before)
    torch.testing.assert_close(model(tokens()), separate)


def test_copies_and_keeps_what_was_merged():
    model = adapted(quantized_net(), ["up"])
    before = bits(model.get_submodule(f"{PRE}up.base_layer"))
    model.merge_adapter()
    twin = copy.deepcopy(model)
    twin.unmerge_adapter()
    assert same_bits(bits(twin.get_submodule(f"{PRE}up.base_layer")), before)
    assert model.get_submodule(f"{PRE}up").merged
