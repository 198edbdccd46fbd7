"""Verifies a kernel on problems with known results before its first use.

This is done twice: on small problems, before it is selected (`check`), and with a layer's own weight, once per size,
before it gets the layer's input (`check_weight`): a kernel may be wrong on large weights only. A verdict is kept in
memory and, if the kernel passed, on disk: by plugin version, kernel, device, driver, torch version and the signature of
the request; for a plugin under development also by the state of its code. A kernel whose check crashed an earlier
process is not tried again, except for plain torch ops: there is no other kernel behind them, and a process that was
killed during their check (by a limit on memory or time, say) would end their use on this machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract, EmbeddingRequest, Problem, Request, Verdict, contract_of
from ..contracts.sampling import sampled
from ..discovery.answers import name_of
from ..discovery.kernels import Kernel
from ..discovery.registry import Guarded, PluginStatus
from ..formats import BrokenLayoutError
from ..formats.bits import has_values, raw
from ..formats.tracing import outside_transforms
from ..runtime.code_state import code_state
from ..runtime.disk_cache import crash_mark, crashed, left_over, read, write
from ..weights.qtensor import QTensor

KernelSource = Callable[[Request], list[Kernel]]
"""Returns one plugin's kernels for a request."""


@dataclass(frozen=True)
class Check:
    """The result of verifying a kernel: ``ok``, or ``reason`` with the numbers."""

    ok: bool
    reason: str = ""


_seen: dict[tuple[str, str], Check] = {}
_seen_sizes: set[tuple[str, str]] = set()
_MAX_SIZES = 4096
_usable: set[torch.device] = set()
_LAST_RESORT = "torch.plain."
"""The names of the kernels in plain torch ops start so."""


def forget() -> None:
    """Clear the verdicts in memory; those on disk remain."""
    _seen.clear()
    _seen_sizes.clear()


def check(
    status: PluginStatus,
    kernel: Kernel,
    request: Request,
    kernels_for: KernelSource,
    mode: str = "once",
) -> Check:
    """Check ``kernel`` for ``request``; ``kernels_for`` returns the plugin's kernels for another request."""
    if mode == "off" or request.device.type == "meta" or not can_run_on(request.device):
        return Check(True)
    key = verdict_key(status, kernel, request)
    if (key, mode) not in _seen:
        stored = _stored(key, kernel, mode)
        if len(_seen) >= _MAX_SIZES:  # convolutions are verified per geometry
            _seen.clear()
        _seen[key, mode] = stored or _run(key, kernel, request, kernels_for)
    return _seen[key, mode]


def size_key(status: PluginStatus, kernel: Kernel, request: Request, mode: str = "once") -> str:
    """The key of the verdict on ``kernel`` at the size of ``request``; empty if no check is needed.

    No check is needed if ``mode`` is ``off``, on ``meta``, for sizes that `check` covers, and if a verdict is cached.
    """
    if mode == "off" or request.device.type == "meta" or contract_of(request).is_probed_whole(request):
        return ""
    key = f"{verdict_key(status, kernel, request)}|{request.n}x{request.k}"
    if (key, mode) in _seen_sizes or (mode == "once" and read("verdicts", key)):
        _remember_size(key, mode)
        return ""
    return key


def _remember_size(key: str, mode: str) -> None:
    if len(_seen_sizes) >= _MAX_SIZES:  # unbounded sizes
        _seen_sizes.clear()
    _seen_sizes.add((key, mode))


def check_weight(
    key: str, kernel: Kernel, request: Request, weight: QTensor, packed: Mapping[str, Tensor], mode: str = "once"
) -> Check:
    """Check ``kernel`` with a layer's own ``weight``, which it has packed; ``key`` comes from `size_key`.

    The reference is computed for some rows and columns of the result (`contracts.sampling`), so it costs milliseconds.
    """
    if not has_values(weight.data):
        return Check(True)
    if _crashed(key, kernel):
        return _crash_verdict(key)
    with _crash_mark(key, kernel), clean_torch_state():
        result = _try_weight(kernel, request, weight, packed)
    if result.ok:
        _remember_size(key, mode)
        write("verdicts", key, ok=True)
    return result


def _try_weight(kernel: Kernel, request: Request, weight: QTensor, packed: Mapping[str, Tensor]) -> Check:
    size = f"{request.n} x {request.k}"
    try:
        diff = difference(kernel.unpack(packed), weight)
        if diff:
            return Check(False, f"unpack(pack(w)) is not w for a weight of {size}: {diff}")
        for problem in contract_of(request).around(request, weight):
            here, drawn = problem.to(request.device), torch.Generator().manual_seed(0)
            reason = call_defect(partial(sampled, here, generator=drawn), kernel, here, packed)
            if reason:
                return Check(False, f"with a weight of {size}: {reason}")
    except BrokenLayoutError:  # not the kernel's fault
        raise
    except Guarded as error:
        return Check(False, f"with a weight of {size}: raised {type(error).__name__}: {error}")
    return Check(True)


def can_run_on(device: torch.device) -> bool:
    """Whether torch can put a tensor on ``device`` here; `explain` also takes devices of other machines."""
    if device not in _usable:
        try:
            with clean_torch_state():
                torch.empty(1, device=device)
        except Guarded:
            return False
        _usable.add(device)
    return True


def verdict_key(status: PluginStatus, kernel: Kernel, request: Request) -> str:
    """The cache key of a verdict."""
    plugin = (status.name, status.dist, status.version, name_of(kernel), request.device.type, status.device)
    fields = (*plugin, status.driver, torch.__version__, request.signature(), code_state(status.dist))
    return "|".join(map(str, fields))


def _stored(key: str, kernel: Kernel, mode: str) -> Check | None:
    if _crashed(key, kernel):
        return _crash_verdict(key)
    return Check(True) if mode == "once" and read("verdicts", key) else None


def _is_last_resort(kernel: Kernel) -> bool:
    return name_of(kernel).startswith(_LAST_RESORT)


def _crashed(key: str, kernel: Kernel) -> bool:
    return not _is_last_resort(kernel) and crashed(f"verify {key}")


def _crash_mark(key: str, kernel: Kernel) -> contextlib.AbstractContextManager[None]:
    if _is_last_resort(kernel):
        return contextlib.nullcontext()
    plugin = key.partition("|")[0]
    return crash_mark(f"verify {key}", plugin=plugin, doing=f"the verification of {name_of(kernel)}")


def _crash_verdict(key: str) -> Check:
    how_to_clear = "run 'qcore doctor --clear' to retry"
    return Check(False, f"{left_over(f'verify {key}')} while it was verified; {how_to_clear}")


def _run(key: str, kernel: Kernel, request: Request, kernels_for: KernelSource) -> Check:
    with _crash_mark(key, kernel), clean_torch_state():
        result = run_check(*_smallest(kernel, request, kernels_for))
    if result.ok:
        # Failures are not cached: they reproduce quickly, and a repaired plugin must get a new chance.
        write("verdicts", key, ok=True)
    return result


def _smallest(kernel: Kernel, request: Request, kernels_for: KernelSource) -> tuple[Kernel, Request]:
    """The same kernel for a small weight; the kernel itself if the plugin offers none of that name for it."""
    small = request.small()
    with contextlib.suppress(*Guarded):
        for other in kernels_for(small):
            if name_of(other) == name_of(kernel):
                return other, small
    return kernel, request


@contextlib.contextmanager
def clean_torch_state() -> Iterator[None]:
    """No gradients, transforms, autocast or fake tensors, and the default device is the CPU."""
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as stack:
        stack.enter_context(outside_transforms())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda", "xpu"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def run_check(kernel: Kernel, request: Request) -> Check:
    """Run every probe problem of the request's contract; the first failure is the reason."""
    contract = contract_of(request)
    for problem in contract.probe(request):
        try:
            reason = _defect(contract, kernel, problem)
        except BrokenLayoutError:  # not the kernel's fault
            raise
        except Guarded as error:
            reason = f"raised {type(error).__name__}: {error}"
        if reason:
            return Check(False, reason)
    return Check(True)


def _defect(contract: Contract, kernel: Kernel, problem: Problem) -> str:
    """The defect that one problem reveals in a kernel; empty if there is none."""
    here = problem.to(problem.request.device)
    packed = kernel.pack(here.weight)
    diff = difference(kernel.unpack(packed), here.weight)
    if diff:
        return f"unpack(pack(w)) is not w: {diff}"
    fault = call_defect(partial(contract.judge, problem), kernel, here, packed)
    diff = "" if fault else difference(kernel.unpack(packed), here.weight)
    return f"its call changed the packed weight: {diff}" if diff else fault


def call_defect(judge: Callable[[Any], Verdict], kernel: Kernel, here: Problem, packed: Mapping[str, Tensor]) -> str:
    """The defect that two calls reveal in a kernel; empty if there is none.

    The first result must be correct and survive the second call, and the inputs must not change.
    """
    inputs = {"x": here.x, **here.given, **({} if here.bias is None else {"bias": here.bias})}
    before = {name: value.clone() for name, value in inputs.items()}
    first: Any = kernel(here.x, packed, here.bias, **here.given)
    kept = first.clone() if isinstance(first, Tensor) else first
    changed = [name for name, value in before.items() if not same_bits(inputs[name], value)]
    if changed:
        return f"its call changed {', '.join(changed)} in place"
    verdict = judge(kept)
    if not verdict.ok:
        return f"wrong result for x of shape {tuple(here.x.shape)}: {verdict.message}"
    kernel(_other_values(here), packed, here.bias, **here.given)
    return "" if _same_values(first, kept) else "its second call overwrote the result of the first"


def _other_values(here: Problem) -> Tensor:
    """An x of the same shape and dtype with other values: other indices, codes or floats."""
    if isinstance(here.request, EmbeddingRequest):
        return here.request.num_embeddings - 1 - here.x
    return here.x.neg() if here.x.is_floating_point() else here.x.bitwise_not()


def _same_values(a: Tensor, b: Tensor) -> bool:
    """`same_bits`, with NaN equal to itself: results too large for their dtype may hold it."""
    return same_bits(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else same_bits(a, b)


def difference(found: Any, expected: QTensor) -> str:
    """The first difference between two QTensors; empty if they are equal bit for bit (the quantizer may differ)."""
    if not isinstance(found, QTensor):
        return f"a {type(found).__name__} instead of a QTensor"
    if found.format != expected.format or tuple(found.shape) != tuple(expected.shape):
        return f"{found.format} {tuple(found.shape)} instead of {expected.format} {tuple(expected.shape)}"
    mine, other = found.tensors(), expected.tensors()
    if mine.keys() != other.keys():
        return f"tensors {', '.join(mine)} instead of {', '.join(other)}"
    return next((f"{name} differs" for name in other if not same_bits(mine[name], other[name])), "")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(raw(a).cpu(), raw(b).cpu())
