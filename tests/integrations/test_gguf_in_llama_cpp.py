"""llama.cpp runs the GGUF files that qcore writes, vocabulary included, and says what the model says in qcore."""

import pytest
from smollm2 import FILE, dense_state, needs_file

import qcore

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
xllamacpp = pytest.importorskip("xllamacpp")
pytestmark = needs_file

PROMPT, TOKENS = "The capital of France is", 8


def said_by_llama_cpp(path):
    """The most likely next tokens, as text."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.warmup = 64, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    done = server.handle_completions({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "top_k": 1})
    return done["choices"][0]["text"]


def test_a_model_quantized_by_qcore(tmp_path):
    named = {"pretrained_model_name_or_path": FILE.parent, "gguf_file": FILE.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**named)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(**named))
    model.load_state_dict(dense_state(model), strict=False)
    model.half().eval()
    qcore.quantize_(model, {"embed_tokens": "w8a16-g32", "lm_head": "w8a16-g32", "*": "w4a16-g32@absmax"})
    qcore.save(model, tmp_path / "own")
    model.config.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    qcore.convert(tmp_path / "own", tmp_path / "model.gguf", "gguf")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    text = tokenizer.decode(model.float().generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :])
    assert said_by_llama_cpp(tmp_path / "model.gguf") == text


def test_a_file_of_mixed_blocks_there_and_back(tmp_path):
    qcore.convert(FILE, tmp_path / "own", "qcore")
    qcore.convert(tmp_path / "own", tmp_path / "back.gguf", "gguf")
    assert said_by_llama_cpp(tmp_path / "back.gguf") == said_by_llama_cpp(FILE)
