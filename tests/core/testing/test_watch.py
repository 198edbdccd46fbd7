"""The watch over kernels that hand their work back."""

from pathlib import Path

import pytest

import qcore
from qcore.testing import fallback_watch
from qcore.testing.fallback_watch import Watch


@pytest.mark.parametrize("house", ["qcore", "qcore_acme"])
@pytest.mark.parametrize("module", ["resolving/resolver.py", "nn/linear.py", "functional/calls.py", "plugin.py"])
def test_only_the_house_itself_is_watched(house, module):
    # Where wheels are installed, a plugin's folder stands beside qcore's and begins with the same letters.
    file = Path(qcore.__file__).parents[1] / house / module
    entered = {}
    exec(compile("def call():\n    return 7\n", str(file), "exec"), entered)
    with Watch(is_fallback=False) as watch:
        assert entered["call"]() == 7
    assert watch.entered == ([f"{module}:call"] if house == "qcore" and module != "plugin.py" else [])


def test_every_module_that_is_forbidden_exists():
    house = Path(qcore.__file__).parent
    assert all((house / name).exists() for name in fallback_watch._FORBIDDEN)
