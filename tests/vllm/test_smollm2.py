"""SmolLM2-135M, from a GGUF file and in qcore's own format. Nightly: minutes."""

from __future__ import annotations

import pytest
import torch
import transformers
from models import generated
from serving import in_own_process
from smollm2 import FILE, dense_state, needs_file

import qcore

pytestmark = needs_file
PROMPTS = [[504, 3575, 282, 4649, 314], [28, 253, 1123, 327, 260, 4]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The model in groups of 32 with zero points, and the tokens that transformers generates from it."""
    config = transformers.AutoConfig.from_pretrained(FILE.parent, gguf_file=FILE.name)
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(dense_state(model), strict=False)
    model.tie_weights()
    qcore.quantize_(model, "w4a16-g32-asym@minmax")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    qcore.save(model, folder)
    return folder, generated(model, PROMPTS)


@pytest.mark.parametrize("ranks", [1, 3])  # nine heads
def test_tokens(ranks, stored):
    folder, expected = stored
    found, log = in_own_process(folder, prompts=PROMPTS, tensor_parallel_size=ranks, quantization="qcore")
    assert found == expected, log[-5000:]


def test_the_gguf_file_beside_a_config(stored, tmp_path):
    config = transformers.AutoConfig.from_pretrained(stored[0])
    config.save_pretrained(tmp_path)
    (tmp_path / "model.gguf").symlink_to(FILE)
    model = transformers.LlamaForCausalLM(config).float().eval()
    qcore.load_(model, FILE)
    with torch.no_grad():
        expected = generated(model, PROMPTS)
    found, log = in_own_process(tmp_path, prompts=PROMPTS, quantization="qcore")
    assert found == expected, log[-5000:]
