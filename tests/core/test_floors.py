"""Each package of core says what it may import and who imports it."""

import ast
from pathlib import Path

import pytest

import qcore

PACKAGES = sorted(path.parent for path in Path(qcore.__file__).parent.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_init_states_content_imports_and_importers(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    assert text.splitlines()[0].endswith(".")
    assert "May import:" in text
    assert "Imported by:" in text
