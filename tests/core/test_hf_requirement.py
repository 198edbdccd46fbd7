"""`qcore.hf` without transformers, or with another version than it works with."""

import importlib
import sys
from importlib import metadata
from types import ModuleType

import pytest


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
