"""Each package of core says what it may import and who imports it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import qcore

ROOT = Path(qcore.__file__).parent
TOP = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
WITHIN = [ROOT / "checkpoint/importers", ROOT / "checkpoint/exporters", ROOT / "testing/laws"]
MODULES = [path for path in ROOT.rglob("*.py") if "templates" not in path.parts]


@cache
def _parsed(module: Path) -> ast.Module:
    return ast.parse(module.read_text("utf-8"))


def _docstring(package: Path) -> str:
    return ast.get_docstring(_parsed(package / "__init__.py")) or ""


@cache
def _imports(module: Path) -> frozenset[Path]:
    """What a module imports from qcore, as paths below ROOT with their parents; each name of a module is a path."""
    return frozenset(path for name in _imported_names(module) for path in (name, *name.parents))


def _imported_names(module: Path) -> Iterator[Path]:
    for node in ast.walk(_parsed(module)):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = [module, *module.parents][node.level].joinpath(*(node.module or "").split("."))
            yield from (start / name.name for name in node.names)


def _importers(package: Path) -> set[str]:
    """The packages next to ``package`` with a module that imports it, or the modules next to it if it lies deeper."""
    outside = (path for path in MODULES if package not in path.parents)
    return {_place(path, package.parent) for path in outside if package in _imports(path)}


def _place(module: Path, folder: Path) -> str:
    """What a docstring calls a module: its package or its own name in ``folder``, or its place in qcore."""
    near = module.relative_to(folder if folder in module.parents else ROOT).parts[0].removesuffix(".py")
    return "qcore" if near in ("__init__", "__main__") else near


def test_init_states_its_content():
    for package in TOP + WITHIN:
        assert _docstring(package).partition("\n")[0].endswith("."), package
        assert "May import:" in _docstring(package), package


@pytest.mark.parametrize("package", TOP + WITHIN, ids=lambda path: path.name)
def test_init_states_its_importers(package):
    stated = re.search(r"Imported by: (.*?)\.(?: |$)", " ".join(_docstring(package).split()))
    assert stated
    names = {name.strip("`") for name in stated[1].split(", ")} - {"no package"}
    assert names == _importers(package)


def test_core_imports_itself_by_relative_imports():
    """`_imports` reads no others."""
    for module in MODULES:
        for node in ast.walk(_parsed(module)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] != "qcore", module
