"""Measures of the source: how long files and functions are, how much is typed, commented and documented.

    python tools/measure.py [FOLDER ...]

Prints one row per folder (by default the packages of this repository): files, lines, the median, 90th percentile and
maximum of lines per file and per function (docstrings not counted), the share of functions with every argument and the
result annotated, of lines that are comments, and of public modules, classes and functions with a docstring.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "core/src/qcore", "plugins/cpu/src/qcore_cpu", "plugins/cuda/src/qcore_cuda", "plugins/triton/src/qcore_triton",
    "plugins/vulkan/src/qcore_vulkan", "plugins/xla/src/qcore_xla", "plugins/xpu/src/qcore_xpu",
)  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Measures:
    """What was counted in the files of one folder."""

    files: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    typed: list[bool] = field(default_factory=list)
    documented: list[bool] = field(default_factory=list)
    comments: int = 0

    def add(self, text: str) -> None:
        """Count one file."""
        tree = ast.parse(text)
        self.files.append(len(text.splitlines()))
        self.comments += sum(
            token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline)
        )
        self.documented.append(ast.get_docstring(tree) is not None)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                self.functions.append(_length(node))
                self.typed.append(_is_typed(node))
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                self.documented.append(ast.get_docstring(node) is not None)

    def row(self, name: str) -> str:
        """The counts as a row of a Markdown table."""
        lines = sum(self.files)
        shares = (_percent(self.typed), round(100 * self.comments / lines, 1), _percent(self.documented))
        cells = (name, len(self.files), lines, _spread(self.files), _spread(self.functions), *shares)
        return f"| {' | '.join(map(str, cells))} |"


def _length(node: Function) -> int:
    """Lines of a function without its docstring."""
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    text = (first.end_lineno or 0) - first.lineno + 1 if is_text else 0
    return (node.end_lineno or 0) - node.lineno + 1 - text


def _is_typed(node: Function) -> bool:
    given = node.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    named = [a for a in arguments if a is not None and a.arg not in {"self", "cls"}]
    return node.returns is not None and all(a.annotation is not None for a in named)


def _percent(flags: list[bool]) -> int:
    return round(100 * sum(flags) / max(1, len(flags)))


def _spread(values: list[int]) -> str:
    """Median, 90th percentile and maximum."""
    ordered = sorted(values) or [0]
    return f"{round(statistics.median(ordered))}/{ordered[int(0.9 * (len(ordered) - 1))]}/{ordered[-1]}"


def measured(folders: list[Path]) -> Iterator[str]:
    """The table, line by line."""
    yield "| package | files | lines | file med/p90/max | func med/p90/max | typed % | comment % | docs % |"
    yield "|---|---|---|---|---|---|---|---|"
    for folder in folders:
        found = Measures()
        for path in sorted(folder.rglob("*.py")):
            found.add(path.read_text("utf-8"))
        yield found.row(folder.name)


if __name__ == "__main__":
    print("\n".join(measured([Path(a) for a in sys.argv[1:]] or [ROOT / folder for folder in FOLDERS])))
