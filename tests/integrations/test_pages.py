"""The examples of pages that need transformers run, one after the other, in a folder with the models they name."""

import re
from pathlib import Path

import pytest
import torch
from foreign_writers import write_directory
from smollm2 import FILE, needs_file

from qcore.checkpoint.opening import open_checkpoint

transformers = pytest.importorskip("transformers")

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"<!-- not run: needs transformers[^>]*-->\n```python\n(.*?)```", re.DOTALL)


def run(page):
    blocks = BLOCK.findall((HOW_TO / page).read_text(encoding="utf-8"))
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def test_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("my-model")
    assert "model" in run("transformers.md")


def test_foreign_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny()
    layers = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    write_directory(tmp_path / "folder", config, model.state_dict(), layers, "gptq")
    assert "model" in run("foreign-checkpoints.md")


def write_smollm2():
    """Write the model and its tokenizer to the folder ``smollm2``, in bfloat16."""
    config = transformers.AutoConfig.from_pretrained(FILE.parent, gguf_file=FILE.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with open_checkpoint(FILE) as archive:
        state = {name: archive.quantized(name).dequantize(torch.bfloat16) for name in archive.records}
        state |= {name: archive.read(name).bfloat16() for name in archive.plain_names()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained("smollm2")
    transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name).save_pretrained("smollm2")


@needs_file
@pytest.mark.alternate
def test_language_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_smollm2()
    run("language-models.md")
    assert "Paris" in capsys.readouterr().out


@needs_file
@pytest.mark.alternate
def test_language_model_on_any_gpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("qcore_vulkan")
    monkeypatch.chdir(tmp_path)
    write_smollm2()
    run("language-model-on-any-gpu.md")
    assert "Paris" in capsys.readouterr().out
