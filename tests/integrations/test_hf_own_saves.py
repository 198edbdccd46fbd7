"""Directories that `qcore.save` wrote, with a ``config.json`` beside the weights: the right model, or a clear error."""

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import KINDS, built, outputs  # noqa: E402

import qcore  # noqa: E402
import qcore.hf  # noqa: E402


def saved(folder, kind="llama", scheme="w8a16", path=None):
    model = built(kind)
    qcore.quantize_(model, scheme)
    qcore.save(model, path or folder)
    model.config.save_pretrained(folder)
    return model


def loaded(model, folder):
    """The directory's model; raises if a tensor is missing or left over."""
    found, about = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(about.values()), about
    return found


def refusal(folder, caplog):
    """What transformers says of the directory here, where qcore.hf is imported."""
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.LlamaForCausalLM.from_pretrained(folder)
    return caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_then_the_configuration(kind, tmp_path):
    model = saved(tmp_path, kind)
    assert torch.equal(outputs(loaded(model, tmp_path)), outputs(model))
    fresh = built(kind)
    report = qcore.load_(fresh, tmp_path)
    assert not report.unexpected
    assert torch.equal(outputs(fresh), outputs(model))


def test_one_file(tmp_path):
    model = saved(tmp_path, path=tmp_path / "model.safetensors")
    assert torch.equal(outputs(loaded(model, tmp_path)), outputs(model))


def test_shards(tmp_path):
    model = built("llama")
    qcore.quantize_(model, "w8a16")
    qcore.save(model, tmp_path, max_shard_size="60KB")
    model.config.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(outputs(loaded(model, tmp_path)), outputs(model))


def test_the_dtype_of_the_model(tmp_path):
    """Not that of the first tensor in the file, which may be a scale."""
    model = built("olmo").to(torch.bfloat16)
    qcore.quantize_(model, "w8a16")
    qcore.save(model, tmp_path)
    model.config.save_pretrained(tmp_path)
    assert loaded(model, tmp_path).dtype == torch.bfloat16


def test_a_float_model_of_the_configuration(tmp_path):
    """A model that is no longer quantized does not keep the description of an earlier save."""
    model = saved(tmp_path / "own")
    again = type(model)(model.config).eval()
    qcore.save(again, tmp_path / "float")
    again.config.save_pretrained(tmp_path / "float")
    assert torch.equal(outputs(loaded(again, tmp_path / "float")), outputs(again))


@pytest.mark.parametrize("path", ["", "model.safetensors"])
def test_without_qcore_it_is_an_error(path, tmp_path):
    saved(tmp_path, path=tmp_path / path)
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "import qcore.hf" in done.stderr + done.stdout


def test_a_configuration_written_too_early(tmp_path, caplog):
    model = built("llama")
    model.config.save_pretrained(tmp_path)
    qcore.quantize_(model, "w8a16")
    qcore.save(model, tmp_path)
    assert "write config.json with save_pretrained of the quantized model" in refusal(tmp_path, caplog)
