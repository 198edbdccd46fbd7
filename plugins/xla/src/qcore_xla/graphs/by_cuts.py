"""The programs of a part of a graph: one for each way in which models cut its weights over a mesh.

torch captures models of one class once: weights are inputs of the graph, and a second model runs what was compiled for
the first, though `shard_` may have cut only one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from qcore.plugin_api import GraphPart, Role

from .meshes import MeshCut, cuts_of
from .program import Program


class ByCuts:
    """Called with one tensor or number per input of the part, it returns the part's results."""

    def __init__(self, part: GraphPart) -> None:
        self._part = part
        self._weights = [i for i, one in enumerate(part.inputs) if one.role is Role.WEIGHT]
        first = cuts_of([part.inputs[i].value for i in self._weights])
        self._programs: dict[tuple[MeshCut | None, ...], Program] = {first: Program(part, given=first)}
        self._lock = threading.Lock()

    def __call__(self, values: Sequence[Any]) -> Sequence[Tensor]:
        """Run the program for the weights among ``values``."""
        cuts = cuts_of([values[i] for i in self._weights])
        program = self._programs.get(cuts)
        if program is None:
            with self._lock:
                program = self._programs.setdefault(cuts, Program(self._part, given=cuts))
        return program(values)
