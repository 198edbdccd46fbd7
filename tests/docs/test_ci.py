"""What `.ci/run` runs in turn: every part has its turn soon, and every exhaustive test is in exactly one of them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
TURNS = range(700, 820)
WITHIN = {
    "--coverage": 3,
    **{f"grids {part}": 45 for part in range(30)},  # two turns out of three
    **dict.fromkeys(("xla_aot", "torch_xla", "xpu_peers", "demo", "Arm and macOS"), 3),
    **{f"kit {name}": 4 for name in ("torch", "vulkan", "xla", "xpu_stand_in")},
    "whole kit cpu": 8,
}
"""Each part, and after how many turns it comes round."""


@pytest.fixture(scope="module")
def shared():
    """tests/conftest.py, as a module."""
    spec = importlib.util.spec_from_file_location("shared_conftest", ROOT / "tests" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(turn, parts):
    """The plan that the script prints for a turn; the part of the grids by its number among ``parts``."""
    command = [shutil.which("bash"), str(ROOT / ".ci" / "run"), "--plan", str(turn)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[:-1]
    return {re.sub(r"(?<=^grids )\d+", lambda number: str(int(number[0]) % parts), line) for line in said}


@pytest.mark.skipif(os.name == "nt", reason="CI is a script of bash")
def test_every_part_has_its_turn_soon(shared):
    plans = [planned(turn, shared.TURNS) for turn in TURNS]
    assert set.union(*plans) == WITHIN.keys()
    for part, within in WITHIN.items():
        ran = [i for i, plan in enumerate(plans) if part in plan]
        gaps = [b - a for a, b in zip([-1, *ran], [*ran, len(plans)], strict=True)]
        assert max(gaps) <= within, part


def test_plugins_that_have_a_kit_are_all_in_turn():
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    # That of qcore-cpu has a sample each time; those of qcore-cuda and qcore-xpu take a GPU; triton serves both.
    named = {part.partition(" ")[2] for part in WITHIN if part.startswith("kit ")}
    assert plugins - {"cpu", "cuda", "triton", "xpu"} == named - {"torch", "xpu_stand_in"}


def test_exhaustive_tests_are_where_they_have_a_turn():
    """What sessions with an environment of their own run is `alternate`: they leave out tests marked `grid` always."""
    beside = {path.name for path in ROOT.glob("plugins/*")} | {"core", "thirdparty", "engines", "helpers", "docs"}
    marked = [
        path for path in ROOT.glob("tests/**/*.py") if re.search(r"mark\.grid|grids import", path.read_text("utf-8"))
    ]
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in marked} - {"conftest.py"}
    assert folders
    assert folders <= beside - {"cpu"}


class Item:
    """A test as far as the hook looks at it; ``marked``: "itself", in a "group" or in a marked "module"."""

    def __init__(self, number, marked):
        self.marked = marked
        self.nodeid, self.location = f"tests/x.py::test[{number}]", (f"tests/x{number % 7}.py", 1, "")

    def get_closest_marker(self, name):
        mark = pytest.mark.grid("group") if self.marked == "group" else pytest.mark.grid
        return mark.mark if self.marked and name == "grid" else None

    def getparent(self, kind):
        return SimpleNamespace(own_markers=[pytest.mark.grid.mark] if self.marked == "module" else [])


def left_by_turn(shared, monkeypatch, variable, turns, every):
    """What the hook leaves of ``every`` in each turn; an item without marks stays, and what goes is reported."""
    for turn in turns:
        gone = []
        config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items, gone=gone: gone.extend(items)))
        monkeypatch.setenv(variable, str(turn))
        plain = Item(0, "")
        items = [*every, plain]
        shared.pytest_collection_modifyitems(config, items)
        assert items.pop() is plain
        assert items
        assert len(gone) + len(items) == len(every)
        yield items


def test_an_exhaustive_test_is_in_one_turn(shared, monkeypatch):
    marked = ["itself"] * 400 + ["group"] * 30 + ["module"] * 50
    every, ran, together = [Item(*numbered) for numbered in enumerate(marked)], [], []
    for items in left_by_turn(shared, monkeypatch, "GRID_TURN", range(31, 31 + shared.TURNS), every):
        ran += items
        together += {item.location[0] for item in items if item.marked == "module"}
        together += {item.marked for item in items if item.marked == "group"}
    assert sorted(map(id, ran)) == sorted(map(id, every))
    assert len(together) == 7 + 1  # seven modules, one group


def test_alternating_tests_run_in_one_of_two_turns(shared, monkeypatch):
    class Alternating(Item):
        def get_closest_marker(self, name):
            named = pytest.mark.alternate("ranks") if self.marked == "group" else pytest.mark.alternate
            return named.mark if name == "alternate" else None

    every = [Alternating(*numbered) for numbered in enumerate(["itself"] * 40 + ["group"] * 9)]
    turns = [[*items] for items in left_by_turn(shared, monkeypatch, "ALTERNATE_TURN", (8, 9), every)]
    assert sorted(map(id, turns[0] + turns[1])) == sorted(map(id, every))
    assert sorted(sum(item.marked == "group" for item in items) for items in turns) == [0, 9]
