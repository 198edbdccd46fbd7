"""`qcore.hf`: quantize while loading, save, load again, other tools' directories; tiny random models."""

import json
import subprocess
import sys

import pytest
import torch
from foreign_writers import FORMATS, write_directory

transformers = pytest.importorskip("transformers")

import qcore  # noqa: E402
import qcore.hf  # noqa: E402
from qcore.hf import QcoreConfig  # noqa: E402

Auto = transformers.AutoModelForCausalLM
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12) % 128


def llama(**more):
    return transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **more})


def saved(config, folder):
    """A random model of a configuration, saved, and the model."""
    torch.manual_seed(0)
    model = Auto.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits


def quantized_layers(model):
    return {n for n, m in model.named_modules() if isinstance(m, qcore.nn.QuantizedLinear)}


class TestQuantizing:
    @pytest.mark.parametrize("tied", [False, True])
    def test_is_what_quantize_does(self, tied, tmp_path):
        model = saved(llama(tie_word_embeddings=tied), tmp_path)
        loaded = Auto.from_pretrained(tmp_path, quantization_config=QcoreConfig("w4a16-g32"))
        qcore.quantize_(model, "w4a16-g32")
        assert torch.equal(logits(loaded), logits(model))
        assert loaded.is_quantized
        if tied:
            assert loaded.lm_head.weight.store is loaded.get_input_embeddings().weight.store

    def test_patterns(self, tmp_path):
        saved(llama(), tmp_path)
        config = QcoreConfig({"*.mlp.*": "w4a16-g32", "*_proj": "w8a16"}, exclude=["lm_head", "*.layers.1.*"])
        loaded = Auto.from_pretrained(tmp_path, quantization_config=config)
        layers = quantized_layers(loaded)
        assert len(layers) == 7
        assert all("layers.0" in name for name in layers)
        assert str(loaded.model.layers[0].mlp.up_proj.scheme) == "w4a16-g32"
        assert str(loaded.model.layers[0].self_attn.q_proj.scheme) == "w8a16"
        assert type(loaded.lm_head) is torch.nn.Linear

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_dtype(self, dtype, tmp_path):
        saved(llama(), tmp_path)
        loaded = Auto.from_pretrained(tmp_path, dtype=dtype, quantization_config=QcoreConfig("w8a16"))
        assert logits(loaded).dtype == dtype

    @pytest.mark.parametrize("kind", ["MixtralConfig", "Qwen3MoeConfig", "GptOssConfig"])
    def test_experts(self, kind, tmp_path):
        more = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
        config = getattr(transformers, kind)(**SIZES, **more, moe_intermediate_size=64, tie_word_embeddings=False)
        model = saved(config, tmp_path)
        loaded = Auto.from_pretrained(tmp_path, quantization_config=QcoreConfig("w8a16"))
        qcore.quantize_(model, "w8a16")
        assert any(isinstance(m, qcore.nn.QuantizedExperts) for m in loaded.modules())
        torch.testing.assert_close(logits(loaded), logits(model))

    def test_one_float_weight_at_a_time(self, tmp_path):
        """Of the float weights before one that is quantized, at most one is still in memory."""
        import gc
        import weakref

        from qcore.model.streamed import StreamedPlan

        saved(llama(num_hidden_layers=4), tmp_path)
        alive, most = [], []
        take = StreamedPlan.take

        def noted(self, name, value):
            gc.collect()
            most.append(sum(ref() is not None for ref in alive))
            alive.append(weakref.ref(value))
            return take(self, name, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StreamedPlan, "take", noted)
            Auto.from_pretrained(tmp_path, quantization_config=QcoreConfig("w8a16"))
        assert len(most) == 4 * 7 + 2
        assert max(most) <= 1

    def test_a_scheme_that_needs_calibration_is_refused(self, tmp_path):
        saved(llama(), tmp_path)
        with pytest.raises(qcore.FormatError, match="needs calibration"):
            Auto.from_pretrained(tmp_path, quantization_config=QcoreConfig("w4a16-g32@gptq"))

    def test_without_a_scheme(self, tmp_path):
        saved(llama(), tmp_path)
        with pytest.raises(qcore.FormatError, match="no scheme"):
            Auto.from_pretrained(tmp_path, quantization_config=QcoreConfig())

    def test_settings_that_are_none(self):
        with pytest.raises(qcore.FormatError, match="no setting 'excludes'"):
            QcoreConfig("w8a16", excludes=["lm_head"])
        with pytest.raises(qcore.FormatError):
            QcoreConfig("w5a16")

    def test_generate_and_compile(self, tmp_path):
        saved(llama(), tmp_path)
        model = Auto.from_pretrained(tmp_path, quantization_config=QcoreConfig("w8a16"))
        ids = IDS[:1, :5]
        eager = model.generate(ids, max_new_tokens=6, do_sample=False)
        compiled = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
        static = model.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation="static")
        assert torch.equal(eager, static)

    def test_device_map(self, tmp_path):
        saved(llama(), tmp_path)
        config = QcoreConfig("w8a16", exclude=["lm_head"])
        plain = Auto.from_pretrained(tmp_path, quantization_config=config)
        for device_map in ("auto", "cpu", {"": "cpu"}):
            mapped = Auto.from_pretrained(tmp_path, quantization_config=config, device_map=device_map)
            assert torch.equal(logits(mapped), logits(plain))


class TestSaving:
    @pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8", "mxfp4", "nf4", "wfp8afp8"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_the_same_bits_after_loading(self, scheme, tied, tmp_path):
        saved(llama(tie_word_embeddings=tied), tmp_path / "float")
        first = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig(scheme))
        first.save_pretrained(tmp_path / "own")
        second = Auto.from_pretrained(tmp_path / "own")
        assert torch.equal(logits(first), logits(second))
        assert quantized_layers(first) == quantized_layers(second)
        third = Auto.from_config(llama(tie_word_embeddings=tied)).eval()
        qcore.load_(third, tmp_path / "own")
        assert torch.equal(logits(first), logits(third))

    def test_nothing_is_reported_as_missing_or_unexpected(self, tmp_path, caplog):
        saved(llama(tie_word_embeddings=True), tmp_path / "float")
        model = Auto.from_pretrained(tmp_path / "float")
        qcore.quantize_(model, "w8a8-static", calibration=[IDS], exclude=["lm_head", "*embed_tokens"])
        qcore.save(model, tmp_path / "own")
        model.config.quantization_config = QcoreConfig("w8a16")
        model.config.save_pretrained(tmp_path / "own")
        caplog.clear()
        loaded = Auto.from_pretrained(tmp_path / "own")
        Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("w8a16")).save_pretrained(
            tmp_path / "b"
        )
        Auto.from_pretrained(tmp_path / "b")
        assert not [r for r in caplog.records if "LOAD REPORT" in r.message]
        assert torch.equal(logits(loaded), logits(model))

    def test_in_shards(self, tmp_path):
        saved(llama(), tmp_path / "float")
        first = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("w8a16"))
        first.save_pretrained(tmp_path / "own", max_shard_size="100KB")
        assert len(list((tmp_path / "own").glob("*.safetensors"))) > 1
        assert torch.equal(logits(Auto.from_pretrained(tmp_path / "own")), logits(first))

    def test_experts(self, tmp_path):
        config = transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=32,
            tie_word_embeddings=False,
        )  # fmt: skip
        saved(config, tmp_path / "float")
        first = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("w8a16"))
        first.save_pretrained(tmp_path / "own")
        assert torch.equal(logits(Auto.from_pretrained(tmp_path / "own")), logits(first))

    def test_biases_of_experts(self, tmp_path):
        """Those of quantized experts are called ``gate_up_proj.bias``, and ``gate_up_proj_bias`` in the float model."""
        model = saved(transformers.GptOssConfig(**SIZES, num_local_experts=4, head_dim=32), tmp_path / "float")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_proj_bias"):
                    parameter.normal_()
        model.save_pretrained(tmp_path / "float")
        first = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("w8a16"))
        first.save_pretrained(tmp_path / "own")
        second, about = Auto.from_pretrained(tmp_path / "own", output_loading_info=True)
        assert not about["missing_keys"]
        assert not about["unexpected_keys"]
        assert torch.equal(logits(second), logits(first))
        second.save_pretrained(tmp_path / "again")
        assert torch.equal(logits(Auto.from_pretrained(tmp_path / "again")), logits(first))

    def test_a_model_without_float_parameters(self, tmp_path):
        """As OLMo, whose norms have none: transformers reads device and dtype of a model from its parameters."""
        saved(transformers.OlmoConfig(**SIZES), tmp_path / "float")
        config = QcoreConfig("w8a16")
        first = Auto.from_pretrained(tmp_path / "float", quantization_config=config, dtype=torch.bfloat16)
        assert (first.dtype, first.device.type) == (torch.bfloat16, "cpu")
        first.save_pretrained(tmp_path / "own")
        second, about = Auto.from_pretrained(tmp_path / "own", output_loading_info=True)
        assert not about["unexpected_keys"]
        assert second.state_dict().keys() == first.state_dict().keys()
        texts = [model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0) for model in (first, second)]
        assert torch.equal(*texts)
        qcore.save(second, tmp_path / "again.safetensors")
        third = Auto.from_config(transformers.OlmoConfig(**SIZES), dtype=torch.bfloat16).eval()
        qcore.load_(third, tmp_path / "again.safetensors")
        with torch.no_grad():
            assert torch.equal(third(IDS).logits, logits(first))

    def test_config_says_what_each_layer_is(self, tmp_path):
        saved(llama(), tmp_path / "float")
        model = Auto.from_pretrained(
            tmp_path / "float", quantization_config=QcoreConfig("w4a16-g32", exclude="lm_head")
        )
        model.save_pretrained(tmp_path / "own")
        settings = json.loads((tmp_path / "own" / "config.json").read_text())["quantization_config"]
        assert settings["quant_method"] == "qcore"
        about = settings["layers"]["model.layers.0.mlp.up_proj"]
        assert about == {"format": "int4-g32/plain", "scheme": "w4a16-g32", "scale_dtype": "float32"}
        assert "lm_head" not in settings["layers"]

    def test_by_the_command_line(self, tmp_path):
        """`qcore quantize` writes what `from_pretrained` reads."""
        model = saved(llama(), tmp_path / "float")
        command = [sys.executable, "-m", "qcore", "quantize", tmp_path / "float", tmp_path / "own", "--scheme", "w8a16"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        qcore.quantize_(model, "w8a16")
        assert torch.equal(logits(Auto.from_pretrained(tmp_path / "own")), logits(model))

    @pytest.mark.parametrize("written", ["save_pretrained", "command line"])
    def test_without_qcore_it_is_an_error_not_random_weights(self, written, tmp_path):
        saved(llama(), tmp_path / "float")
        if written == "save_pretrained":
            model = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("w8a16"))
            model.save_pretrained(tmp_path / "own")
        else:
            qcore.checkpoint.quantize_checkpoint(tmp_path / "float", tmp_path / "own", "w8a16")
        code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path / 'own')!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "import qcore.hf" in done.stderr + done.stdout


class TestForeign:
    @pytest.mark.parametrize("format", FORMATS)
    def test_adopted(self, format, tmp_path):
        torch.manual_seed(0)
        model = Auto.from_config(llama(hidden_size=256, attention_bias=True)).eval()
        layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        write_directory(tmp_path, config, model.state_dict(), layers, format)
        qcore.hf.adopt()
        loaded = Auto.from_pretrained(tmp_path)
        assert quantized_layers(loaded) == set(layers)
        other = Auto.from_config(llama(hidden_size=256, attention_bias=True)).eval()
        qcore.load_(other, tmp_path)
        assert torch.equal(logits(loaded), logits(other))
        loaded.save_pretrained(tmp_path / "own")
        assert torch.equal(logits(Auto.from_pretrained(tmp_path / "own")), logits(loaded))

    def test_an_unknown_method(self):
        with pytest.raises(qcore.UnsupportedError, match="cannot adopt 'gtpq'"):
            qcore.hf.adopt("gtpq")


class TestResizing:
    @pytest.mark.parametrize("scheme", ["w8a16", "w4a16-g32-asym", "wnf4a16-g32"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_rows_are_added(self, scheme, tied, tmp_path):
        saved(llama(tie_word_embeddings=tied), tmp_path / "float")
        model = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig(scheme))
        before, rows = logits(model), model.config.vocab_size
        model.resize_token_embeddings(rows + 5)
        after = logits(model)
        assert after.shape[-1] == model.config.vocab_size == rows + 5
        torch.testing.assert_close(after[..., :rows], before, rtol=1e-5, atol=1e-5)
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert (table._store is head._store) == tied
        assert table.weight.dequantize()[rows:].abs().amax(1).min() > 0
        assert torch.isfinite(model(torch.tensor([[rows + 4]])).logits).all()
        model.save_pretrained(tmp_path / "own")
        assert torch.equal(logits(Auto.from_pretrained(tmp_path / "own")), after)

    def test_rows_are_removed_and_padded(self, tmp_path):
        saved(llama(), tmp_path / "float")
        model = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("w8a16"))
        before = logits(model)
        model.resize_token_embeddings(model.config.vocab_size - 10)
        fewer = before.shape[-1] - 10
        torch.testing.assert_close(logits(model), before[..., :fewer], rtol=1e-5, atol=1e-5)
        model.resize_token_embeddings(pad_to_multiple_of=64)
        assert model.config.vocab_size % 64 == 0

    def test_a_head_with_a_tied_bias(self, tmp_path):
        """As BERT's: the patterns of its ties are looked up among the parameters."""
        sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
        masked = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
        masked.save_pretrained(tmp_path / "float")
        model = type(masked).from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("w8a16"))
        before, rows = logits(model), model.config.vocab_size
        model.resize_token_embeddings(rows + 5)
        torch.testing.assert_close(logits(model)[..., :rows], before, rtol=1e-5, atol=1e-5)
        assert model.get_output_embeddings()._store is model.get_input_embeddings()._store
        assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
        model.save_pretrained(tmp_path / "own")
        again = type(masked).from_pretrained(tmp_path / "own")
        assert torch.equal(logits(again), logits(model))

    def test_what_cannot_grow_says_why(self, tmp_path):
        saved(llama(), tmp_path / "float")
        model = Auto.from_pretrained(tmp_path / "float", quantization_config=QcoreConfig("wfp4a16-g16-e4m3"))
        with pytest.raises(qcore.UnsupportedError, match=r"global scale.*\n.*before it is quantized"):
            model.resize_token_embeddings(model.config.vocab_size + 1)
