"""Models of transformers as native programs: the text is that of the same model run layer by layer."""

import copy
import re
import textwrap
from pathlib import Path

import pytest
import torch
from smollm2 import needs_file

import qcore

transformers = pytest.importorskip("transformers")

from compiled_models import check_one_part_a_step, greedy, smollm2_model, tiny_decoder  # noqa: E402

import qcore.hf  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")
PAGE = Path(__file__).parents[2] / "docs/how-to/language-models.md"
IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.alternate
@pytest.mark.parametrize("scheme", ["w4a16-g32-asym", "w8a8"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_tiny_decoders(kind, scheme):
    model = tiny_decoder(kind)
    qcore.quantize_(model, scheme)
    compiled = torch.compile(copy.deepcopy(model), backend="qcore_cpu")
    expected = greedy(model, model.config, IDS, 24)
    assert greedy(compiled, model.config, IDS, 24) == expected
    check_one_part_a_step(compiled)
    assert greedy(compiled, model.config, IDS, 24, replayed=2) == expected


def test_sliding_windows_are_few_programs():
    """Their caches count in Python, are first filled and then moved."""
    model = tiny_decoder("Mistral", sliding_window=16)
    qcore.quantize_(model, "w8a16-g32")
    compiled = torch.compile(copy.deepcopy(model), backend="qcore_cpu")
    assert greedy(compiled, model.config, IDS, 24) == greedy(model, model.config, IDS, 24)
    check_one_part_a_step(compiled)
    assert len(qcore.graphs.explain(compiled).reports) == 3


def test_generate_as_the_page_says():
    text = PAGE.read_text("utf-8")
    examples = re.findall(r"<!-- not run: needs qcore-cpu.*?```python\n(.*?)```", text, re.DOTALL)
    model = tiny_decoder("Llama")
    qcore.quantize_(model, "w4a16-g32-asym")
    model.generation_config.pad_token_id = 0
    expected = model.generate(IDS, do_sample=False, max_new_tokens=16)
    names = {"torch": torch, "qcore": qcore, "model": model, "ids": IDS}
    for example in examples:
        names["text"] = None
        exec(textwrap.dedent(example), names)
        assert torch.equal(names["text"], expected)
    assert len(examples) == 2
    (report,) = qcore.graphs.explain(model).reports
    assert len(report.parts) == 1
    for length in (2, 9, 5):  # other prompts, the same program
        ids = torch.arange(length)[None]
        expected = model.generate(ids, do_sample=False, max_new_tokens=6)
        assert torch.equal(model.generate(ids, max_new_tokens=6, **names["given"]), expected)
    assert len(qcore.graphs.explain(model).reports) == 1


def test_backends_that_are_not_installed_are_errors():
    with pytest.raises(ValueError, match=r"no backend 'qcore_abacus' of torch\.compile: installed .* qcore_cpu"):
        qcore.hf.compile_config("qcore_abacus")


@needs_file
def test_smollm2_writes_the_same_tokens():
    model, ids = smollm2_model()
    qcore.quantize_(model, "w4a16-g32-asym@minmax")
    compiled = torch.compile(copy.deepcopy(model), backend="qcore_cpu")
    expected = greedy(model, model.config, ids, 32)
    assert greedy(compiled, model.config, ids, 32, replayed=2) == expected
    check_one_part_a_step(compiled)
