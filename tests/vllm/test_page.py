"""The examples of the page "Serve with vLLM" run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers
from models import llama
from tokenizers import Tokenizer, models, pre_tokenizers

import qcore

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "serve-with-vllm.md"
BLOCK = re.compile(r"<!-- not run: needs vLLM; tests/vllm/test_page.py runs it -->\n```python\n(.*?)```", re.DOTALL)


def tokenizer():
    words = ["The", "capital", "of", "France", "is", *(f"w{i}" for i in range(384))][:384]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token="w1")


def test_page(tmp_path, monkeypatch, log):
    monkeypatch.chdir(tmp_path)
    model = llama(attention_bias=False, mlp_bias=False)
    model.to(torch.bfloat16).save_pretrained("my-model")
    tokenizer().save_pretrained("my-model")
    qcore.quantize_(model.float(), "w4a16-g32-asym@minmax", exclude=["embed_tokens", "lm_head"])
    Path("own").mkdir()
    model.config.save_pretrained("own")
    qcore.save(model, "own")
    qcore.convert("own", "my-model-gptq", to="gptq", dtype=torch.float16)
    tokenizer().save_pretrained("my-model-gptq")
    blocks, names = BLOCK.findall(PAGE.read_text("utf-8")), {}
    assert len(blocks) == 3
    for block in blocks:
        if "llm" in names:
            names.pop("llm").llm_engine.engine_core.shutdown()
        exec(compile(block, PAGE.name, "exec"), names)
    names.pop("llm").llm_engine.engine_core.shutdown()
    assert [text.partition(":")[0] for text in log] == ["qcore serves this model"] * 3
    assert all(re.search(r"self_attn\.qkv_proj +QuantizedLinear +quantized +w4a16-g32", text) for text in log)
