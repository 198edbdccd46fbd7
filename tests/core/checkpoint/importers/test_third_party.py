"""Importers of plugins: asked after qcore's own, checked, named when they fail. The page of the docs is the plugin."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import qcore
from qcore.discovery.registry import registry

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "write-a-plugin" / "importers.md"


@pytest.fixture
def page():
    """The names that the example of the docs defines."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(code, names)
    return names


@pytest.fixture
def install():
    def add(importers):
        class Plugin:
            @qcore.hookimpl
            def qcore_importers(self):
                return importers()

        registry.add("rows", Plugin())

    yield add
    registry.remove("rows")


@pytest.fixture
def directory(tmp_path):
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (6, 10), dtype=torch.int8)
    tensors = {"fc.codes": codes, "fc.row_scale": torch.rand(6) + 0.1, "fc.bias": torch.randn(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "rowwise"}}))
    return tmp_path, tensors


def model():
    return torch.nn.ModuleDict({"fc": torch.nn.Linear(10, 6)})


def test_the_example_of_the_docs_reads_its_format(page, install, directory):
    folder, tensors = directory
    install(page["qcore_importers"])
    loaded = model()
    qcore.load_(loaded, folder)
    expected = tensors["fc.codes"].float() * tensors["fc.row_scale"][:, None]
    assert torch.equal(loaded["fc"].weight.dequantize(torch.float32), expected)
    assert torch.equal(loaded["fc"].bias, tensors["fc.bias"])


def test_without_the_plugin_the_error_lists_the_known_tools(directory):
    with pytest.raises(qcore.CheckpointError, match="'rowwise', which qcore does not read") as caught:
        qcore.load_(model(), directory[0])
    assert "gptq" in str(caught.value)


class Failing:
    name = "failing"

    def recognizes(self, source):
        return True

    def plan(self, source):
        raise KeyError("qweight")


class Wrong(Failing):
    def plan(self, source):
        return {"fc": "int8"}


@pytest.mark.parametrize(
    ("importers", "message"),
    [
        (lambda: [Failing()], "importer 'failing' of plugin 'rows' raised KeyError"),
        (lambda: [Wrong()], "instead of a qcore.plugin_api.Plan"),
        (lambda: [object()], "which is not an importer"),
        (lambda: 5, "qcore_importers raised TypeError"),
        (lambda: 1 / 0, "qcore_importers raised ZeroDivisionError"),
    ],
)
def test_a_failure_is_an_error_that_names_the_plugin(importers, message, install, directory):
    install(importers)
    with pytest.raises(qcore.CheckpointError, match=re.escape(message)):
        qcore.load_(model(), directory[0])
