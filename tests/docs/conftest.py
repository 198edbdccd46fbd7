"""The helpers of this folder import each other by name, whatever pytest's import mode."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("plugin_page")  # it holds tests


@pytest.fixture(autouse=True, scope="module")
def qcore_alone():
    """The pages show what qcore prints without plugins, whichever are installed where they are tested.

    Afterwards they are back: tests of other folders may run next in this process.
    """
    from qcore.discovery.registry import registry

    removed = {name: entry for name, entry in registry.entries().items() if entry.dist != "qcore"}
    for name in removed:
        registry.remove(name)
    yield removed
    registry.entries().update(removed)
    registry.generation += 1


@pytest.fixture
def with_plugin(qcore_alone):
    """``with_plugin("vulkan")`` brings one plugin back, where it is installed, for the page that is its own."""
    from qcore.discovery.registry import registry

    names = []

    def bring(name):
        if name in qcore_alone:
            registry.entries()[name] = qcore_alone[name]
            registry.generation += 1
            names.append(name)
        elif (Path(__file__).parents[2] / "plugins" / name).is_dir():
            pytest.skip(f"plugin {name!r} is not installed")

    yield bring
    for name in names:
        registry.remove(name)
