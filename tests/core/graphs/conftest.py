import pytest
from graph_backends import KeepsStates

from qcore import graphs
from qcore.graphs import capture


@pytest.fixture
def backend():
    """A backend that keeps states to itself, and has not warned yet."""
    capture._warn_of_return.cache_clear()
    made = KeepsStates()
    yield made
    del graphs.states.backends[made.name]
