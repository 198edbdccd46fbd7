"""``save_pretrained``, ``from_pretrained`` and ``dequantize`` of models that `qcore.quantize_` has changed."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import hf_models  # noqa: E402
from hf_models import IDS, KINDS, built, loaded_float, outputs  # noqa: E402

import qcore  # noqa: E402
import qcore.hf  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Outputs of a quantized model of each kind before it was saved, and after it was loaded by another process."""
    root = tmp_path_factory.mktemp("written")
    before = {}
    for kind in KINDS:
        model = loaded_float(kind, root / "float" / kind)
        qcore.quantize_(model, "w8a16")
        before[kind] = outputs(model)
        model.save_pretrained(root / kind, max_shard_size="60KB")
    subprocess.run([sys.executable, hf_models.__file__, root, *KINDS], check=True, capture_output=True)
    after = torch.load(root / "outputs.pt")
    return root, {kind: (before[kind], *after[kind]) for kind in KINDS}


def again(model, folder, **more):
    """The model saved and loaded; raises if a tensor is missing or left over."""
    model.save_pretrained(folder, **more)
    found, about = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(about.values()), about
    return found


def settings(folder):
    return json.loads((Path(folder) / "config.json").read_text()).get("quantization_config")


def llama(**more):
    return built("llama", **more)


class TestSaving:
    @pytest.mark.parametrize("kind", KINDS)
    def test_another_process_loads_the_same_bits(self, kind, written):
        root, found = written
        before, after, about = found[kind]
        assert not about
        assert torch.equal(before, after)
        assert len(list((root / kind).glob("*.safetensors"))) > 1

    def test_a_model_that_was_never_in_a_file(self, tmp_path):
        """Of experts that files store one by one: nothing may take quantized ones apart."""
        model = built("mixtral")
        qcore.quantize_(model, "w8a16")
        assert torch.equal(outputs(again(model, tmp_path)), outputs(model))

    def test_patterns_and_two_schemes(self, tmp_path):
        model = llama()
        qcore.quantize_(model, {"*.mlp.*": "w4a16-g32", "*_proj": "w8a16"}, exclude=["*.layers.1.*"])
        found = again(model, tmp_path)
        assert torch.equal(outputs(found), outputs(model))
        schemes = {name: about["scheme"] for name, about in settings(tmp_path)["layers"].items()}
        assert len(schemes) == 7
        assert set(schemes.values()) == {"w4a16-g32", "w8a16"}
        assert type(found.lm_head) is torch.nn.Linear

    def test_more_layers_after_loading(self, tmp_path):
        model = llama()
        qcore.quantize_(model, "w8a16", include=["*.mlp.*"])
        found = again(model, tmp_path / "some")
        qcore.quantize_(found, "w4a16-g32", include=["*_proj"])
        third = again(found, tmp_path / "more")
        assert torch.equal(outputs(third), outputs(found))
        assert len(settings(tmp_path / "some")["layers"]) == 6
        assert len(settings(tmp_path / "more")["layers"]) == 14

    @pytest.mark.parametrize("way", ["part", "load_", "by hand", "pickle", "deepcopy"])
    def test_however_the_layers_came_in(self, way, tmp_path):
        model = llama()
        if way == "part":
            qcore.quantize_(model.model.layers, "w8a16")
        elif way == "by hand":
            model.lm_head = qcore.nn.QuantizedLinear.from_float(model.lm_head, "w8a16")
        else:
            qcore.quantize_(model, "w8a16")
        if way == "load_":
            qcore.save(model, tmp_path / "own.safetensors")
            model = llama()
            qcore.load_(model, tmp_path / "own.safetensors")
        elif way == "pickle":
            model = pickle.loads(pickle.dumps(model))
        elif way == "deepcopy":
            model = copy.deepcopy(model)
        assert torch.equal(outputs(again(model, tmp_path / "hf")), outputs(model))

    def test_a_part_that_is_a_model(self, tmp_path):
        model = llama()
        qcore.quantize_(model, "w8a16")
        found = again(model.model, tmp_path / "base")
        with torch.no_grad():
            assert torch.equal(found(IDS)[0], model.model(IDS)[0])
        assert torch.equal(outputs(again(model, tmp_path / "whole")), outputs(model))

    def test_a_float_model_with_the_same_configuration(self, tmp_path):
        first = llama()
        second = type(first)(first.config).eval()
        qcore.quantize_(first, "w8a16")
        first.save_pretrained(tmp_path / "quantized")
        assert torch.equal(outputs(again(second, tmp_path / "float")), outputs(second))

    def test_the_adapter_alone(self, tmp_path):
        peft = pytest.importorskip("peft")
        import qcore.adapters

        model = loaded_float("llama", tmp_path / "float")
        qcore.quantize_(model, "w8a16")
        model.save_pretrained(tmp_path / "own")
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        model.save_pretrained(tmp_path / "adapter")
        assert not (tmp_path / "adapter" / "config.json").exists()
        found = type(model).from_pretrained(tmp_path / "own")
        found.load_adapter(tmp_path / "adapter")
        assert torch.equal(outputs(found), outputs(model))


class TestCommandLine:
    """`qcore quantize` decides like `qcore.quantize_`: the layers, and to the bit what they compute."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_quantizes_what_quantize_does(self, kind, tmp_path):
        model = loaded_float(kind, tmp_path / "float")
        qcore.quantize_(model, "w4a16-g32")
        qcore.checkpoint.quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w4a16-g32")
        found, about = type(model).from_pretrained(tmp_path / "own", output_loading_info=True)
        assert not any(about.values()), about
        assert layers_of(found) == layers_of(model)
        assert torch.equal(outputs(found), outputs(model))

    @pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "gpt-oss"])
    def test_experts_in_one_tensor(self, kind, tmp_path):
        model = built(kind)
        model.save_pretrained(tmp_path / "float", save_original_format=False)
        rows = qcore.checkpoint.quantize_checkpoint(
            tmp_path / "float", tmp_path / "own", "w8a16", max_shard_size="90KB"
        )
        qcore.quantize_(model, "w8a16")
        found = {row.name: row for row in rows}
        assert found["model.layers.0.mlp.experts.down_proj"].action == "quantized"
        routers = [row for row in rows if row.reason.startswith("it routes tokens")]
        assert len(routers) == 2
        loaded, about = type(model).from_pretrained(tmp_path / "own", output_loading_info=True)
        assert not any(about.values()), about
        assert layers_of(loaded) == layers_of(model)
        assert torch.equal(outputs(loaded), outputs(model))
        fresh = built(kind)
        qcore.load_(fresh, tmp_path / "own")
        assert torch.equal(outputs(fresh), outputs(model))


def layers_of(model):
    """The names of quantized layers, and their schemes."""
    kinds = tuple(getattr(qcore.nn, name) for name in ("QuantizedLinear", "QuantizedConv2d", "QuantizedEmbedding"))
    kinds += (qcore.nn.QuantizedGroupedLinear,)
    return {name: str(module.scheme) for name, module in model.named_modules() if isinstance(module, kinds)}


class TestStaysAsItWas:
    """transformers forbids several things for models that it takes for quantized; qcore's layers allow them."""

    @pytest.mark.parametrize("change", [
        lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16().float(), lambda m: m.to("cpu"),
    ])  # fmt: skip
    def test_casts(self, change, tmp_path):
        model = llama()
        qcore.quantize_(model, "w8a16")
        change(model)
        found = again(model, tmp_path)
        assert found.dtype == model.dtype
        found.model.rotary_emb = model.model.rotary_emb  # a cast rounds its buffers, which no file holds
        assert torch.equal(outputs(found), outputs(model))

    def test_generate(self, tmp_path):
        model = llama()
        qcore.quantize_(model, "w8a16")
        given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(again(model, tmp_path).generate(IDS[:1], **given), model.generate(IDS[:1], **given))

    @pytest.mark.parametrize("loaded", [False, True])
    def test_a_model_without_float_parameters_generates(self, loaded, tmp_path):
        model = built("olmo")
        qcore.quantize_(model, "w8a16")
        if loaded:
            qcore.save(model, tmp_path / "own.safetensors")
            model = built("olmo")
            qcore.load_(model, tmp_path / "own.safetensors")
        assert model.generate(IDS[:1], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 14)
        assert "qcore_place" not in "".join(model.state_dict())

    def test_a_float_model_has_no_quantizer(self):
        model = llama()
        qcore.quantize_(llama(), "w8a16")
        assert not hasattr(model, "hf_quantizer")
        assert not hasattr(type(model), "hf_quantizer")
        with pytest.raises(ValueError, match="first quantize"):
            model.dequantize()

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # by peft
    @pytest.mark.parametrize("adapted", [False, True])
    def test_trainer(self, adapted, tmp_path):
        peft = pytest.importorskip("peft")
        import qcore.adapters

        model = llama()
        qcore.quantize_(model, "w8a16", exclude=["lm_head"])
        if adapted:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        data = [{"input_ids": row, "labels": row} for row in IDS]
        given = {"max_steps": 2, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(tmp_path / "run", learning_rate=1e-2, **given), train_dataset=data
        )
        before = outputs(llama())
        trainer.train()
        trainer.save_model(tmp_path / "own")
        if adapted:
            assert (tmp_path / "own" / "adapter_config.json").exists()
        else:
            found = type(model).from_pretrained(tmp_path / "own")
            assert torch.equal(outputs(found), outputs(model.eval()))
            assert not torch.equal(outputs(found), before)


class TestDisk:
    @pytest.mark.parametrize("stored", [False, True])
    @pytest.mark.parametrize("place", ["disk", "cpu"])
    def test_experts_with_biases(self, place, stored, tmp_path):
        model = loaded_float("gpt-oss", tmp_path / "float")
        qcore.quantize_(model, "w8a16")
        model.save_pretrained(tmp_path / "own")
        places = {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.1", "norm", "rotary_emb")}
        inside = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.router")
        places |= {"lm_head": "disk", "model.layers.0.mlp.experts": place}
        places |= {f"model.layers.0.{name}": "disk" for name in inside}
        given = {} if stored else {"quantization_config": qcore.hf.QcoreConfig("w8a16")}

        def load():
            folder = tmp_path / ("own" if stored else "float")
            return type(model).from_pretrained(folder, device_map=places, offload_folder=tmp_path / "disk", **given)

        if place == "disk":
            with pytest.raises(qcore.UnsupportedError, match=r"layers\.0\.mlp\.experts' are experts with biases"):
                load()
        else:
            assert torch.equal(outputs(load()), outputs(model))


class TestDequantizing:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_float_model_again(self, kind, tmp_path):
        model = loaded_float(kind, tmp_path / "float")
        layers = {name: type(module) for name, module in model.named_modules()}
        qcore.quantize_(model, "w8a16")
        before = outputs(model)
        model.dequantize()
        assert {name: type(module) for name, module in model.named_modules()} == layers
        torch.testing.assert_close(outputs(model), before, atol=1e-5, rtol=1e-4)
        found = again(model, tmp_path / "own")
        assert settings(tmp_path / "own") is None
        assert torch.equal(outputs(found), outputs(model))

    def test_after_loading(self, tmp_path):
        model = built("tied-llama")
        qcore.quantize_(model, "w8a16")
        found = again(model, tmp_path)
        found.dequantize(torch.bfloat16)
        assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
        assert found.lm_head.weight is found.get_input_embeddings().weight
        assert found.lm_head.weight.requires_grad
        assert not found.is_quantized
        assert found.half().dtype == torch.float16
        again(found, tmp_path / "float")
        assert settings(tmp_path / "float") is None

    @pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
    @pytest.mark.parametrize("padding", ["same", "valid", 1, (2, 1)])
    @pytest.mark.parametrize("mode", ["zeros", "reflect"])
    def test_convolutions(self, padding, mode):
        layer = torch.nn.Conv2d(4, 8, (2, 3), padding=padding, padding_mode=mode, groups=2)
        model = built("vit")
        model.extra = torch.nn.Sequential(layer)
        qcore.quantize_(model, "w8a16", include=["extra.0"])
        x = torch.randn(1, 4, 6, 6)
        wanted = model.extra(x)
        model.dequantize()
        assert type(model.extra[0]) is torch.nn.Conv2d
        torch.testing.assert_close(model.extra(x), wanted, atol=1e-5, rtol=1e-4)

    def test_a_layer_whose_weight_stays_neutral(self, tmp_path):
        model = llama()
        model.lm_head = qcore.nn.NeutralLinear.from_float(model.lm_head, "w8a16")
        torch.testing.assert_close(outputs(again(model, tmp_path)), outputs(model))
        model.dequantize()
        assert type(model.lm_head) is torch.nn.Linear
        assert not hasattr(model, "hf_quantizer")

    def test_offloaded_weights_are_refused(self):
        model = llama()
        qcore.quantize_(model, "w8a16")
        model.model.layers[0].mlp.up_proj.to("meta")
        with pytest.raises(qcore.UnsupportedError, match=r"layers\.0\.mlp\.up_proj' is offloaded"):
            model.dequantize()
        assert isinstance(model.lm_head, qcore.nn.QuantizedLinear)
