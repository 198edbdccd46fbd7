"""Laws on a kernel: fakes, opcheck, compilation, determinism, threads, own results, memory, two devices, the decision.

`laws.inputs` has those on unusual inputs.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ... import nn
from ...contracts import Problem
from ...discovery.kernels import Kernel
from ...discovery.registry import Guarded
from ...resolving.decision import Decision
from ...resolving.resolver import resolve
from ...resolving.verification import same_bits
from ...runtime import settings
from ...weights.qtensor import QTensor
from ...weights.schemes import Scheme
from ..check import BrokenLawError, guarded, inputs_unchanged, resized, same_values
from ..fallback_watch import OwnOps
from ..target import Target
from .base import InapplicableError, Law, Sample, checked, run_kernel

_THREADS, _CALLS = 8, 3
_COMPILED_ROWS = {
    "linear": (11, 3, 17, 1),
    "embedding": (11, 3, 17, 1),
    "conv2d": (11, 3, 7, 1),
    "grouped_linear": (11, 3, 17, 1),
}
"""All row counts but 1 share a graph. The first count differs from all other sizes, because dynamo would identify equal
sizes; numbers of images stay below 16, from which torch's own convolutions specialise on the batch."""
Packed = dict[str, Tensor]


def fakes(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Run with fake tensors: shape, dtype and device must equal those of the real result."""
    from torch._subclasses import FakeTensorMode

    here = sample.here
    real = run_kernel("fake", kernel.name, kernel, here, packed)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_here = replace(
            here, x=mode.from_tensor(here.x), bias=_faked(mode, here.bias), given=_all_faked(mode, here.given)
        )
        fakes = _all_faked(mode, packed)
        call = partial(kernel, fake_here.x, fakes, fake_here.bias, **fake_here.given)
        what = f"{kernel.name} under fake tensors"
        fake = checked("fake", what, guarded("fake", what, call))
    for what in ("shape", "dtype", "device"):
        mine, true = getattr(fake, what), getattr(real, what)
        if mine != true:
            raise BrokenLawError("fake", f"{kernel.name}: its fake has {what} {mine}, the real result has {true}")


def _faked(mode: Any, tensor: Tensor | None) -> Any:
    return None if tensor is None else mode.from_tensor(tensor)


def _all_faked(mode: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}


def opcheck(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Run `torch.library.opcheck` for every op of the plugin that the kernel calls."""
    with OwnOps() as seen:
        run_kernel("opcheck", kernel.name, kernel, sample.here, packed)
    if not seen.calls:
        raise InapplicableError(f"{kernel.name} calls no op of its own, only torch's")
    _check_ops("opcheck", kernel, seen)


def _check_ops(law: str, kernel: Kernel, seen: OwnOps) -> None:
    for op, (args, kwargs) in seen.calls.items():
        # opcheck reads the storage of its arguments, which oneDNN's packed weights do not have.
        if not any(isinstance(arg, Tensor) and arg.layout is not torch.strided for arg in tree_leaves(args)):
            guarded(law, f"{kernel.name}: opcheck of {op}", partial(torch.library.opcheck, op, args, kwargs))


def compiles(target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Compile to one graph without breaks for any number of rows; 1 row may have a graph of its own."""
    graphs: set[Any] = set()
    seen = OwnOps()
    call = _compiled(kernel, packed, sample.here.bias, graphs, seen)
    for rows in _COMPILED_ROWS[sample.here.request.contract]:
        problem = resized(sample.prepared.on(target.device), rows)
        here = problem.to(target.device)
        what = f"{kernel.name}: torch.compile(fullgraph=True, dynamic=True) with {rows} rows"
        with inputs_unchanged(here, packed, f"{what} "):
            result = guarded("compile", what, partial(call, here.x, here.given))
        verdict = sample.prepared.contract.judge(problem, result)
        if not verdict.ok:
            raise BrokenLawError("compile", f"{what} returned a wrong result: {verdict.message}")
        if rows > 1 and len(graphs) > 1:
            raise BrokenLawError("compile", f"{what} needs a separate graph; one must support any number of rows")
    # A kernel may call some of its ops only in a trace.
    _check_ops("compile", kernel, seen)


def _compiled(
    kernel: Kernel, packed: Packed, bias: Tensor | None, graphs: set[Any], seen: OwnOps
) -> Callable[..., Tensor]:
    from torch._dynamo import lookup_backend, reset
    from torch._guards import CompileContext

    reset()
    eager = lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        # Dynamo may compile a graph in several attempts, which have the same id.
        identity = CompileContext.current_compile_id()
        graphs.add(identity.frame_compile_id if identity else len(graphs))
        return seen.watching(eager(graph, inputs))

    def call(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        return kernel(x, packed, bias, **given)

    return torch.compile(call, fullgraph=True, dynamic=True, backend=backend)


def deterministic(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check that equal inputs give equal bits."""
    first, second = (run_kernel("determinism", kernel.name, kernel, sample.here, packed) for _ in range(2))
    if not same_bits(first, second):
        raise BrokenLawError(
            "determinism", f"{kernel.name}: two calls with the same input differ in {_differing(first, second)}"
        )


def _differing(a: Tensor, b: Tensor) -> str:
    return f"{int((a.cpu() != b.cpu()).sum())} of {a.numel()} elements"


def threads(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Call the kernel with the same packed weight from eight threads."""
    inputs = [_rolled(sample.here, turn) for turn in range(_THREADS)]  # a mix-up of equal inputs would not show
    alone = [run_kernel("threads", kernel.name, kernel, here, packed) for here in inputs]
    start, cores = threading.Barrier(_THREADS), torch.get_num_threads()
    found: list[tuple[Tensor, Any]] = []

    def work(here: Problem, expected: Tensor) -> None:
        # Thread-local in OpenMP, too: a product that is split among more cores rounds its sums in another order.
        torch.set_num_threads(cores)
        with torch.no_grad():  # grad mode is thread-local
            start.wait()
            try:
                found.extend((expected, kernel(here.x, packed, here.bias, **here.given)) for _ in range(_CALLS))
            except Guarded as error:
                found.append((expected, error))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, alone, strict=True)]
    with contextlib.ExitStack() as unchanged:
        for here in inputs:
            unchanged.enter_context(inputs_unchanged(here, packed, f"{kernel.name} "))
        # Threads take turns within calls, which are shorter than the usual interval.
        unchanged.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_TURN)
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    what = f"{kernel.name}: in {_THREADS} threads it"
    for expected, result in found:
        if isinstance(result, BaseException):
            raise BrokenLawError("threads", f"{what} raised {type(result).__name__}: {result}")
        if not same_bits(checked("threads", what, result), expected):
            raise BrokenLawError(
                "threads",
                f"{kernel.name}: a result from one of {_THREADS} threads differs from the result of a single thread",
            )


def _rolled(here: Problem, turn: int) -> Problem:
    """The problem with the rows of x in another order."""
    return replace(here, x=here.x.roll(turn, 0)) if here.x.dim() else here


_TURN = 1e-5
"""Seconds after which a thread that runs Python lets another one run."""
_CALLS_KEPT = 4
"""Calls whose results are kept: enough to catch a kernel that alternates between two buffers."""


def own_results(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check that each result has its own memory, contiguous, not part of an input and not written to by later calls."""
    kept: list[tuple[Tensor, Tensor]] = []
    for turn in range(_CALLS_KEPT):
        here = _rolled(sample.here, turn)
        result = run_kernel("outputs", kernel.name, kernel, here, packed)
        # Images may lie in another memory format: modules convert them to that of x.
        if sample.prepared.contract.name != "conv2d" and not result.is_contiguous():
            raise BrokenLawError(
                "outputs",
                f"{kernel.name}: its result of shape {tuple(result.shape)} has strides {result.stride()}; models call "
                f"view() on it, as on torch's own: return y.contiguous()",
            )
        shared = _shared_with(result, {"x": here.x, "bias": here.bias, **packed})
        if shared:
            raise BrokenLawError("outputs", f"{kernel.name}: its result shares memory with {shared}")
        kept.append((result, result.clone()))
    if any(not same_values(result, before) for result, before in kept):
        raise BrokenLawError("outputs", f"{kernel.name}: a later call changed the result of an earlier one")
    if any(_shared_with(result, {"another": other}) for (result, _), (other, _) in combinations(kept, 2)):
        raise BrokenLawError("outputs", f"{kernel.name}: two calls returned the same memory")


def _shared_with(result: Tensor, others: Mapping[str, Tensor | None]) -> str:
    """Return the name of the first of ``others`` that shares memory with ``result``, or an empty string."""
    mine = _address(result)
    return next((name for name, other in others.items() if other is not None and mine == _address(other)), "")


def _address(tensor: Tensor) -> object:
    """Return device and address of a tensor's storage; if torch cannot tell, a unique object."""
    try:
        return (tensor.device, tensor.untyped_storage().data_ptr() or object())
    except (RuntimeError, NotImplementedError):
        return object()


_ROUNDS = 8
"""Rounds of pack and call, between two counts of tensors."""


def frees_memory(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Repeat pack and call: what was passed in and returned must be freed, once the caller has dropped it."""
    del packed
    _rounds(sample.here, kernel)  # caches by shape, buffers of a library, and what is imported on demand
    before = _alive(sample.here.x.device)
    _rounds(sample.here, kernel)
    after = _alive(sample.here.x.device)
    for what, count in after.items():
        if count - before[what] >= _ROUNDS:
            raise BrokenLawError(
                "memory",
                f"{kernel.name}: {_ROUNDS} rounds of pack and call left {count - before[what]} more {what} in memory; "
                f"keep no x, result or packed weight, or hold it weakly",
            )


def _rounds(here: Problem, kernel: Kernel) -> None:
    for _ in range(_ROUNDS):
        # Other objects each time: the caller's own would hide a cache that is keyed by them.
        fresh = replace(here, x=here.x.clone(), bias=None if here.bias is None else here.bias.clone())
        packed = guarded("memory", f"{kernel.name}: pack", partial(kernel.pack, here.weight))
        run_kernel("memory", kernel.name, kernel, fresh, packed)


def _alive(device: torch.device) -> dict[str, int]:
    """The tensors of this process, and the bytes of an accelerator's allocator."""
    gc.collect()
    found = {"tensors": sum(issubclass(type(item), Tensor) for item in gc.get_objects())}
    if device.type == "cuda":
        found["bytes of the device"] = torch.cuda.memory_allocated(device)
    return found


def _packed_call(kernel: Kernel, here: Problem) -> Tensor:
    return kernel(here.x, kernel.pack(here.weight), here.bias, **here.given)


def two_devices(target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check the kernels of a second device of the same kind while the first one is current."""
    del packed
    kind = target.device.type
    if kind == "cpu" or not torch.accelerator.is_available() or torch.accelerator.device_count() < 2:
        raise InapplicableError(f"there is only one {kind} device")
    second = torch.device(kind, 1 - (target.device.index or 0))
    problem = sample.prepared.on(second)
    here = problem.to(second)
    answer = target.ask(problem.request)
    for other in answer.kernels:
        result = guarded(
            "devices",
            f"{other.name} on {second}",
            partial(_packed_call, other, here),
        )
        verdict = sample.prepared.judge(problem, result)
        if not verdict.ok or result.device != second:
            raise BrokenLawError("devices", f"{kernel.name} on {second}: on {result.device}, {verdict.message}")


def decided(target: Target, sample: Sample) -> None:
    """Run a module with the plugin requested by name: the result is right, and the decision names the plugin."""
    here = sample.here
    with settings.using(target.name, verify="always"):
        if here.given:  # per-token parameters are passed with each call: modules do not take them
            _expect(target, guarded("decision", "resolving", lambda: resolve(here.request)))
            return
        module = guarded("decision", "creating a module", lambda: _module(here))
        with inputs_unchanged(here, {}, "the module "):
            result = guarded("decision", "calling the module", lambda: module(here.x))
    _expect(target, module.decision)
    verdict = sample.prepared.judge(here, result)
    if not verdict.ok:
        raise BrokenLawError("decision", f"the module returned a wrong result: {verdict.message}")


def _expect(target: Target, decision: Decision) -> None:
    if decision.plugin != target.name:
        rows = [f"{c.kernel or c.plugin} {c.stage}: {c.reason}" for c in decision.candidates if c.plugin == target.name]
        raise BrokenLawError(
            "decision", f"{decision.plugin or 'no plugin'} ran instead of {target.name}: {'; '.join(rows)}"
        )


def _module(here: Problem) -> Any:
    request, weight = here.request, QTensor(**{**vars(here.weight), "quantizer": None})
    if request.contract == "embedding":
        return nn.QuantizedEmbedding.from_qtensor(weight, dtype=request.out_dtype)
    scheme = Scheme(weight.format, "", request.activation, request.output)
    if request.contract == "grouped_linear":
        return _Experts(here, weight, scheme)
    if request.contract == "linear":
        return nn.QuantizedLinear.from_qtensor(weight, here.bias, scheme, dtype=request.x_dtype)
    names = ("in_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    geometry = {name: getattr(request, name) for name in names}
    return nn.QuantizedConv2d.from_qtensor(weight, here.bias, scheme, dtype=request.x_dtype, **geometry)


class _Experts(torch.nn.Module):
    """A module of experts that is called with x alone."""

    def __init__(self, here: Problem, weight: QTensor, scheme: Scheme) -> None:
        super().__init__()
        dtype, offsets = here.request.x_dtype, here.given["offsets"]
        self.inner = nn.QuantizedGroupedLinear.from_qtensor(weight, here.bias, scheme, dtype=dtype)
        self.offsets = offsets

    @property
    def decision(self) -> Decision | None:
        return self.inner.decision

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.offsets)  # type: ignore[no-any-return]


LAWS = (
    Law("decision", "requested by name, the plugin runs a module, and the decision says so", scheme=decided),
    Law(
        "fake",
        "under fake tensors, shape, dtype and device equal those of the real result",
        kernel=fakes,
        each_dtype=True,
    ),
    Law("opcheck", "torch.library.opcheck passes for the plugin's own ops", kernel=opcheck),
    Law(
        "compile",
        "torch.compile(fullgraph=True, dynamic=True): one graph supports any number of rows",
        kernel=compiles,
        sparse=True,
    ),
    Law("determinism", "equal inputs give equal bits", kernel=deterministic),
    Law("threads", "eight threads share a kernel, and each gets the result of its own x", kernel=threads),
    Law("outputs", "each result has contiguous memory of its own, which no later call modifies", kernel=own_results),
    Law(
        "memory",
        "calls and pack keep nothing: inputs, results and packed weights are freed",
        kernel=frees_memory,
        sparse=True,
    ),
    Law("devices", "on a machine with two devices of one kind, each gives correct results", kernel=two_devices),
)
