"""The demo's sentence model as whole programs of XLA: few compilations, and the vectors of layer by layer."""

from pathlib import Path

import pytest
import torch

import qcore

pytest.importorskip("transformers")
pytest.importorskip("qcore_xla")

from compiled_models import needs_minilm

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@needs_minilm
@qcore.using("torch")  # layer by layer
def test_sentence_models_need_few_compilations(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import expectations
    import sentences

    source, lines = sentences.SentenceModel(torch.device("cpu"), whole=True), sentences.read_sentences()
    model = source.trained()
    del model.encoder.layer[1:]  # for the time of compiling
    qcore.quantize_(model, "w8a16")
    whole = source.ready(model)
    for count in (3, 1, 4):  # 3 and 4 rows share a program
        torch.testing.assert_close(source.embed(whole, lines[:count]), source.embed(model, lines[:count]))
    assert whole.compilations == 2
    name = "w8a16", "float32"
    assert not list(expectations.check_programs({name: whole}))
    for wrong in (0, 11):
        whole.compilations = wrong
        (missed,) = expectations.check_programs({name: whole})
        assert f"compiled {wrong} times" in missed
