"""Captures a model for a graph backend: what `torch.compile` calls, and what it gets back.

Dynamo records the model, AOT autograd makes the record functional and decomposes it to the op list, once for each set
of sizes (each bucket). Only inference is captured.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException

from ..errors import QcoreWarning, first_line
from ..nn.graph_ops import CAPTURES
from . import batches, overlaps, programs, states  # noqa: F401 - batches registers rules
from .backends import GraphBackend, Role
from .breaks import why_broken, why_eager, why_unrecorded
from .explaining import Record, Report, remember
from .integers import constants, take_integers
from .limits import Limit
from .noting import note_call
from .ops import QUANTIZED, decompositions, is_whole
from .rewriting import computes, keep_whole, scalars, with_scalars

_log = logging.getLogger("qcore.graphs")

GRADIENTS = (
    "graph backends run inference only, and this call needs gradients; call the model under torch.inference_mode() or "
    "torch.no_grad(), or compile it with another backend for training"
)
INNER_GRADIENTS = "graph backends run inference only, and this graph computes gradients within (torch.func)"
ASKS = (
    "torch asks a tensor for its value, as .item() does, to compile this graph, and the value is known only when it "
    "runs: pass a Python number where this one is a size or another number"
)
COPIES = "its arguments share memory with what it writes, and integers are indices of parts that it would copy"
_MANY = 16
"""For how many values of its numbers a graph is compiled before a warning says so."""


def torch_compile_backend(backend: GraphBackend) -> Callable[..., Callable[..., Any]]:
    """The function that `torch.compile` takes as ``backend=``; name it in the group ``torch_dynamo_backends``."""
    states.backends[backend.name] = backend

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        if options:
            given = ", ".join(sorted(options))
            raise TypeError(f"the backend {backend.name!r} takes no mode and no options, but got {given}.")
        return Captured(module, inputs, backend)

    compile_graph.__name__ = compile_graph.__qualname__ = backend.name
    setattr(compile_graph, CAPTURES, True)
    return compile_graph


class Captured:
    """A recorded graph, and a program for each set of its dynamic sizes."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], backend: GraphBackend) -> None:
        self._module, self._backend = module, backend
        self._recorded, self._integers = take_integers(keep_whole(module))
        self._roles = [_role(node) for node in self._recorded.graph.find_nodes(op="placeholder")]
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._overlaps = overlaps.Overlaps(self._roles)
        self._lock = threading.Lock()
        # The places of integers passed as tensors come last, and have no input.
        static = [value for value, role in zip(inputs, self._roles, strict=False) if role is not Role.FRESH]
        self._record = Record([], [weakref.ref(t) for t in static if isinstance(t, Tensor)])
        remember(self._record)
        self._why_not = INNER_GRADIENTS if computes(module, "_grad_increment_nesting") else ""
        self._numbers = constants(self._recorded)
        self._scalars = scalars(self._recorded)
        self._limit = Limit() if backend.defers_writes else None
        self._break = why_broken() if backend.defers_writes else ""
        self.__name__ = backend.name

    def __call__(self, *values: Any) -> Any:
        """Run the graph; compiles it first for sizes that it has not met."""
        results = self._run(values)
        why = self._why_returned()
        if why and self._backend.synchronize_all():
            _warn_of_return(self._backend.name, why)
        note_call(self, values, results)
        return results

    def _why_returned(self) -> str:
        """Why what models write must come back with this call: torch may read it; "" if it need not."""
        if self._limit is None:
            return ""
        return self._limit.why_near() or self._break or why_eager() or why_unrecorded()

    def _run(self, values: Sequence[Any]) -> Any:
        counts: Sequence[int | None] = ()
        if self._integers is not None:
            passed = self._integers.of(values)
            if passed is None:
                return self._refuse_call(values)
            counts, values = passed[0], (*values, *passed[1])
        numbers = tuple([values[i] for i in self._numbers]), tuple([values[i].item() for i in self._scalars])
        program = self._programs.get((*numbers, self._overlaps.of(values)))
        if program is None:
            program = self._new_program(numbers, values)
        results = program(*values)
        if not counts:
            return results
        return [result if count is None else count for result, count in zip(results, counts, strict=True)]

    def _new_program(self, numbers: tuple[Any, ...], values: Sequence[Any]) -> Callable[..., Any]:
        with _alone(), self._lock:
            overlap = self._overlaps.of(values)
            program = self._programs.get((*numbers, overlap)) or self._compiled(numbers[0], overlap, values)
            # What the graph writes may be known only now.
            self._programs[(*numbers, self._overlaps.of(values))] = program
            self._warn_of_many(numbers)
            return program

    def _warn_of_many(self, numbers: tuple[Any, ...]) -> None:
        met = dict.fromkeys((*integers, *floats) for integers, floats, _ in self._programs)
        if len(met) != _MANY or (*numbers[0], *numbers[1]) != [*met][-1]:
            return
        places = self._recorded.graph.find_nodes(op="placeholder")
        varied = [len({*values}) > 1 for values in zip(*met, strict=True)]
        names = [places[i].name for i in compress((*self._numbers, *self._scalars), varied)]
        warnings.warn(
            f"{self._backend.name}: this graph has been compiled for {_MANY} values of {', '.join(names)}, each in as "
            f"much time as the first. Pad sizes to a few (qcore.graphs.bucket), and pass numbers as tensors.",
            QcoreWarning,
            stacklevel=2,
        )

    def _compiled(self, numbers: Sequence[Any], overlap: overlaps.Overlap, values: Sequence[Any]) -> Callable[..., Any]:
        sizes = tuple(number for number in numbers if type(number) is int)
        report = Report(self._backend.name, sizes, broken=self._break)
        self._record.reports.append(report)
        why = self._why_not or _why_not(values, self._backend) or (overlaps.MANY if overlap is overlaps.OTHERS else "")
        why = why or (COPIES if overlap and self._integers is not None and self._integers.takes_copies else "")
        if why:
            return self._refuse(report, why)
        try:
            return self._lowered(values, overlap, report)
        except Exception as error:  # noqa: BLE001 - a backend's compiler may raise anything
            _log.debug("compiling for %s failed", self._backend.name, exc_info=True)
            report.parts, report.host = [], []
            asks = isinstance(error, DataDependentOutputException)
            return self._refuse(report, ASKS if asks else f"{type(error).__name__}: {first_line(error)}")

    def _given(self, values: Sequence[Any]) -> list[programs.Given]:
        refs = (weakref.ref(value) if isinstance(value, Tensor) else None for value in values)
        return [programs.Given(role, ref) for role, ref in zip(self._roles, refs, strict=True)]

    def _refuse(self, report: Report, why: str) -> Callable[..., Any]:
        report.refused = why
        warnings.warn(f"{report.backend}: this graph runs in torch: {why}.", QcoreWarning, stacklevel=2)
        return self._in_torch()

    def _refuse_call(self, values: Sequence[Any]) -> Any:
        why = "an integer is an index out of range, or from the other end than before, or more than its dtype holds"
        warnings.warn(f"{self._backend.name}: this call runs in torch: {why}.", QcoreWarning, stacklevel=4)
        return self._in_torch()(*values)

    def _in_torch(self) -> Callable[..., Any]:
        """The graph as Dynamo has recorded it, which ignores further arguments."""
        module = self._module  # and not self, which holds this: a cycle would keep reports of graphs that are gone
        count = len(module.graph.find_nodes(op="placeholder"))

        def run(*values: Any) -> Any:
            return module.forward(*values[:count])

        return states.synchronized(run) if self._backend.defers_writes else run

    def _lowered(self, values: Sequence[Any], overlap: overlaps.Overlap, report: Report) -> Callable[..., Any]:
        from torch._dynamo import disable
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._functorch.aot_autograd import aot_module_simplified
        from torch._guards import tracing

        counted, whole = states.TorchWrites(), True

        def compile_inference(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            nonlocal whole
            places = gm.graph.find_nodes(op="placeholder")
            # Fewer if AOT autograd has merged arguments that overlap, more if it has taken some apart.
            whole = len(places) == len(self._roles)
            given = self._given(values) if whole else [programs.Given(Role.FRESH)] * len(places)
            with _compiling(False):
                program = programs.build(gm, given, self._backend, report)
            if whole:
                self._overlaps.set_written(program.written)
                own = self._backend.defers_writes or self._backend.counts_writes
                counted.written = program.written if own else ()
            return make_boxed_func(counted.inner(program.run))

        def refuse(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            raise RuntimeError(GRADIENTS)

        known = {i: values[i].item() for i in self._scalars}
        # Outside of Dynamo's trace sizes are numbers.
        with tracing(None), torch.no_grad(), _compiling(True):
            run = aot_module_simplified(
                with_scalars(self._recorded, known), list(values), fw_compiler=refuse, bw_compiler=refuse,
                inference_compiler=compile_inference, decompositions=decompositions(),
                keep_inference_input_mutations=True,
            )  # fmt: skip
        run = counted.outer(run) if whole else _with_overlap(run, overlap)
        return disable(run)  # type: ignore[no-any-return, no-untyped-call]


@lru_cache(maxsize=64)
def _warn_of_return(backend: str, why: str) -> None:
    """Say once why states are copied at each call."""
    warnings.warn(
        f"{backend}: what models write, such as KV caches, comes back from the device after each call, because torch "
        f"may read it: {why}",
        QcoreWarning,
        stacklevel=4,
    )


def _with_overlap(run: Callable[..., Any], overlap: overlaps.Overlap) -> Callable[..., Any]:
    """``run``, a call with arguments that AOT autograd makes one tensor of, which no backend knows."""

    def merging(*values: Any) -> Any:
        states.synchronize(values)
        results = run(*values)
        overlaps.count_writes(values, overlap)
        return results

    return merging


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Compile in one thread at a time, as Dynamo does: torch's tracing patches modules for all threads."""
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock:
        yield


@contextlib.contextmanager
def _compiling(is_so: bool) -> Iterator[None]:
    """Let torch know whether it compiles: compiled models that other threads call raise in any other trace."""
    before = torch.compiler._is_compiling_flag  # noqa: SLF001 - what Dynamo sets
    try:
        torch.compiler._is_compiling_flag = is_so  # noqa: SLF001
        yield
    finally:
        torch.compiler._is_compiling_flag = before  # noqa: SLF001


# ruff: noqa: ARG001 - compilers have torch's argument names


def _role(node: fx.Node) -> Role:
    """What a placeholder of a recorded graph is between calls."""
    if not isinstance(node.meta.get("example_value"), Tensor):
        return Role.NUMBER
    users = list(node.users)
    if users and all(is_whole(user.target) and _stands_for_weight(user, node) for user in users):
        return Role.WEIGHT
    static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    return Role.STATIC if static else Role.FRESH


def _stands_for_weight(user: fx.Node, node: fx.Node) -> bool:
    names = [argument.name for argument in user.target._schema.arguments]  # type: ignore[union-attr] # noqa: SLF001
    quantized = user.target._schema.name.partition("::")[2] in QUANTIZED  # type: ignore[union-attr] # noqa: SLF001
    return quantized and user.args[names.index("weight")] is node


def _why_not(values: Sequence[Any], backend: GraphBackend) -> str:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return GRADIENTS
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return " ".join(dict.fromkeys(why for device in devices if (why := backend.why_not_device(device))))
