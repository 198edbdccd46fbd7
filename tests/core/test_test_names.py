"""Names of tests fit a line of pytest's summary."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
LONGEST = 60


def test_names_are_short():
    modules = {path: ast.parse(path.read_text("utf-8")) for path in TESTS.rglob("test_*.py")}
    functions = (
        (path, node) for path, tree in modules.items() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    )
    names = [f"{path.relative_to(TESTS)}: {node.name}" for path, node in functions if len(node.name) > LONGEST]
    assert not names
