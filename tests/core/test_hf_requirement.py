"""`qcore.hf` without transformers, or with another version than it works with."""

import importlib
import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch

import qcore
from qcore.runtime import companions


@pytest.fixture
def fresh(monkeypatch):
    """Neither transformers nor `qcore.hf` has been imported."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "transformers" or name.startswith("qcore.hf"):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("module", "found", "said"), [
    (ModuleType("transformers"), "5.17.0", "transformers 5.17.0 is installed"), (None, None, "is not installed"),
])  # fmt: skip
def test_an_import_that_fails_says_why(fresh, monkeypatch, module, found, said):
    def version(_name):
        if found is None:
            raise metadata.PackageNotFoundError("transformers")
        return found

    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=r"needs transformers 5\.23 or later") as caught:
        importlib.import_module("qcore.hf")
    assert said in str(caught.value)
    assert "pip install 'qcore[hf]'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_another_import_that_fails_is_not_about_transformers(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "qcore.hf.config", None)
    with pytest.raises(ImportError, match=r"qcore\.hf\.config"):
        importlib.import_module("qcore.hf")


def test_a_version_that_cannot_save_quantized_layers_is_told(fresh, monkeypatch):
    """Its save_pretrained would write no records, and its from_pretrained random weights; one warning is enough."""
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", ModuleType("transformers.modeling_utils"))
    monkeypatch.setitem(companions._waiting, "transformers.modeling_utils", qcore._join_transformers)
    monkeypatch.setattr(metadata, "version", lambda _name: "5.17.0")
    layer = torch.nn.Linear(8, 8)
    with pytest.warns(qcore.QcoreWarning, match=r"(?s)use qcore\.save: .* transformers 5\.17\.0 is installed"):
        qcore.nn.QuantizedLinear.from_float(layer, "w8a16")
    qcore.nn.QuantizedLinear.from_float(layer, "w8a16")
