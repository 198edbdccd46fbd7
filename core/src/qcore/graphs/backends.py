"""`GraphBackend`: what a plugin implements to run captured graphs on a device, and `Part`, what it is given to compile.

A minimal backend::

    class MyBackend(GraphBackend):
        name = "my_device"

        def why_not(self, node):
            return "" if base_name(node.target) in MY_OPS else f"{node.target} has no kernel here"

        def compile(self, part):
            program = record(part.graph)           # walk part.graph.nodes, each of the op list
            def run(tensors):                      # one tensor (or number) per input of the part
                return program(*tensors)           # the results, without those of part.updates
            return run

    torch_backend = torch_compile_backend(MyBackend())   # in the entry point group torch_dynamo_backends
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import UnsupportedError


class Role(enum.Enum):
    """What an input of a part is between calls."""

    WEIGHT = "weight"
    """Stands for the weight of a quantized layer (`weight_of`); its own bytes must not be read. It stays the same."""
    STATIC = "static"
    """A parameter or buffer: stays the same between calls, so it is kept on the device; see `Resident`."""
    STATE = "state"
    """A tensor that the part mutates (a KV cache): kept on the device, updated in place; see `qcore.graphs.states`."""
    FRESH = "fresh"
    """An argument of the call, or the result of another part."""
    NUMBER = "number"
    """A Python int, equal in every call of this part: sizes are constants of a compiled part."""


@dataclass(frozen=True)
class Input:
    """An input of a part.

    **Fields:** ``name``: of its placeholder; ``role``; ``example``: a fake tensor with its shape, strides and dtype, or
    a number; ``changes``: for a state, the output of the part's graph that it takes; ``ref``: see `value`.
    """

    name: str
    role: Role
    example: Any
    changes: int | None = None
    ref: Callable[[], Tensor | None] | None = None

    @property
    def value(self) -> Tensor | None:
        """The tensor of the call that the part is compiled for; None for the result of another part.

        Held weakly: later calls may bring other tensors of the same shape (``weight_of(input.value).shape`` holds for
        all of them).
        """
        return None if self.ref is None else self.ref()


@dataclass(frozen=True)
class Part:
    """A part of a graph that a backend has said it runs, to be compiled once for these shapes.

    **Fields:** ``graph``: functional (nothing is mutated in it): a placeholder per input, ``call_function`` nodes of
    the op list (`qcore.graphs.ops`) with a fake tensor in ``meta["val"]`` (sizes are ints), one output tuple;
    ``inputs``: one for each placeholder, in order; ``updates``: input to output position of each state: that
    output is written into the state, and **not** returned; ``device``: of the tensors that it takes and returns.
    """

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    updates: Mapping[int, int]
    device: torch.device

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls, in an order in which they can run."""
        return [node for node in self.graph.graph.nodes if node.op == "call_function"]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes whose values the graph returns, updates of states included."""
        return tuple(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def returned(self) -> tuple[int, ...]:
        """Positions of the outputs that a compiled part returns: all but the updates of states."""
        updated = set(self.updates.values())
        return tuple(i for i in range(len(self.outputs)) if i not in updated)


Compiled = Callable[[Sequence[Any]], Sequence[Tensor]]
"""A compiled part: takes one value per input, returns the outputs `Part.returned` as tensors on ``part.device``.

Raises `PartRefused` if it finds out only when it is called that the device does not run the part.
"""


class PartRefused(UnsupportedError):  # noqa: N818 - as LayerRefused: an answer, and no error
    """A compiled part cannot run, and has changed nothing: torch runs it, now and from now on.

    Its message is the reason that `explain` lists. ``once``: it is due to values of this call, and the device runs the
    next one.
    """

    def __init__(self, message: str, *, once: bool = False) -> None:
        super().__init__(message)
        self.once = once


class GraphBackend(ABC):
    """Runs parts of captured graphs on a device. One object serves all models of a process, from any thread."""

    name: str
    """The name for ``torch.compile(model, backend=name)``."""

    @abstractmethod
    def why_not(self, node: fx.Node) -> str:
        """Why the device does not run a node, a sentence for `explain`; empty if it does.

        The node calls an op of the op list or any other op of torch; ``node.meta["val"]`` holds its fake result, and
        so do the nodes among its arguments.
        """

    @abstractmethod
    def compile(self, part: Part) -> Compiled:
        """Compile a part for its shapes. An exception makes the whole graph run in torch, with it as the reason."""

    def why_not_device(self, device: torch.device) -> str:  # noqa: ARG002 - for subclasses
        """Why tensors on ``device`` are not supported (no driver, say), a sentence; empty if they are.

        Called before a graph is captured.
        """
        return ""

    def recognizes(self) -> frozenset[str]:
        """Names of float ops (`qcore.graphs.ops.WHOLE`) that patterns of simpler ops are replaced by: ``rms_norm``...

        A backend that fuses by itself leaves this empty.
        """
        return frozenset()

    def fewest_nodes(self) -> int:
        """Parts with fewer nodes run on the host: crossing over costs more than they save."""
        return 1

    def synchronize(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - optional
        """Write the values of states among ``tensors`` back to their host memory, if `defers_writes`."""

    def synchronize_all(self) -> bool:
        """Write back all states that this thread used last, if `defers_writes`; whether the memory of one was behind.

        Called after each call that torch may follow by itself; see `qcore.graphs.breaks` and `qcore.graphs.limits`.
        """
        return False

    defers_writes: bool = False
    """Whether host memory of a state may be behind after a call; see `qcore.graphs.states`."""
    counts_writes: bool = False
    """Whether a part counts what it writes to states, by `torch.autograd.graph.increment_version` at its end.

    Otherwise AOT autograd does before a call, and `version` does not tell whether torch has written since the last one.
    """
