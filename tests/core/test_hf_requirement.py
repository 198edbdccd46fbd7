"""`qcore.hf` without transformers, or with another version than it works with."""

import importlib
import sys
from importlib import metadata

import pytest


@pytest.mark.parametrize(("found", "said"), [("5.17.0", "transformers 5.17.0 is installed"), (None, "is not installed")])
def test_an_import_that_fails_says_why(monkeypatch, found, said):
    def version(_name):
        if found is None:
            raise metadata.PackageNotFoundError("transformers")
        return found

    for name in [*sys.modules]:
        if name.partition(".")[0] == "transformers" or name.startswith("qcore.hf"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=r"needs transformers 5\.23 or later") as caught:
        importlib.import_module("qcore.hf")
    assert said in str(caught.value)
    assert "pip install 'qcore[hf]'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
