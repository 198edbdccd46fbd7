"""Checking a kernel on small problems with known answers before it serves for the first time.

A verdict is kept in memory and, where the kernel passed, on disk: by plugin version, kernel, device, driver, torch
version and the form of the request. A kernel that ended an earlier process during its check is not tried again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._cache import crash_mark, crashed, read, write
from .contracts import Contract, Problem, contract_of
from .kernels import Kernel
from .plugins import Guarded, PluginStatus
from .qtensor import QTensor


@dataclass(frozen=True)
class Check:
    """The outcome of checking a kernel: ``ok``, and where it is not, ``reason`` with the numbers."""

    ok: bool
    reason: str = ""


_seen: dict[tuple[str, str], Check] = {}
_usable: set[torch.device] = set()


def forget() -> None:
    """Drop the verdicts held in memory; those on disk stay."""
    _seen.clear()


def check(
    status: PluginStatus, kernel: Kernel, request: Any, ask: Callable[[Any], list[Kernel]], mode: str = "once"
) -> Check:
    """Check ``kernel`` for ``request``; ``ask`` gets the plugin's kernels for another request."""
    if mode == "off" or request.device.type == "meta" or not can_run_on(request.device):
        return Check(True)
    key = verdict_key(status, kernel, request)
    if (key, mode) not in _seen:
        stored = _stored(key, mode)
        _seen[key, mode] = stored or _run(key, kernel, request, ask)
    return _seen[key, mode]


def can_run_on(device: torch.device) -> bool:
    """Whether torch can put a tensor on ``device`` here; `explain` is also asked about devices of other machines."""
    if device not in _usable:
        try:
            with undisturbed():
                torch.empty(1, device=device)
        except Guarded:
            return False
        _usable.add(device)
    return True


def verdict_key(status: PluginStatus, kernel: Kernel, request: Any) -> str:
    """What a verdict is kept under."""
    parts = (status.name, status.dist, status.version, kernel.name, request.device.type, status.device, status.driver)
    return "|".join(map(str, (*parts, torch.__version__, request.signature())))


def _stored(key: str, mode: str) -> Check | None:
    if crashed(f"verify {key}"):
        return Check(False, "ended an earlier process while it was checked; clear QCORE_CACHE_DIR to try again")
    return Check(True) if mode == "once" and read("verdicts", key) else None


def _run(key: str, kernel: Kernel, request: Any, ask: Callable[[Any], list[Kernel]]) -> Check:
    with crash_mark(f"verify {key}"), undisturbed():
        result = run_check(*_smallest(kernel, request, ask))
    if result.ok:
        # A failure is not kept: it is found again at once, and a repaired plugin is not held to it.
        write("verdicts", key, ok=True)
    return result


def _smallest(kernel: Kernel, request: Any, ask: Callable[[Any], list[Kernel]]) -> tuple[Kernel, Any]:
    """The same kernel made for a small weight, or where the plugin has another one for that, the kernel itself."""
    small = request.small()
    with contextlib.suppress(*Guarded):
        for other in ask(small):
            if other.name == kernel.name:
                return other, small
    return kernel, request


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No gradients, no autocast, no fake tensors, no default device of the user's."""
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda", "xpu"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def run_check(kernel: Kernel, request: Any) -> Check:
    """Run every probe problem of the request's contract; the first failure is the reason."""
    contract = contract_of(request)
    for problem in contract.probe(request):
        try:
            reason = _fault(contract, kernel, problem)
        except Guarded as error:
            reason = f"raised {type(error).__name__}: {error}"
        if reason:
            return Check(False, reason)
    return Check(True)


def _fault(contract: Contract, kernel: Kernel, problem: Problem) -> str:
    """What is wrong with a kernel's answer to one problem; empty where nothing is."""
    here = problem.to(problem.request.device)
    packed = kernel.pack(here.weight)
    lost = difference(kernel.unpack(packed), here.weight)
    if lost:
        return f"unpack(pack(w)) is not w: {lost}"
    verdict = contract.judge(problem, kernel(here.x, packed, here.bias, **here.given))
    rows = tuple(problem.x.shape)
    return "" if verdict.ok else f"wrong result for x of shape {rows}: {verdict.message}"


def difference(found: Any, expected: QTensor) -> str:
    """In what a QTensor differs from another; empty where they are equal bit for bit (whatever their quantizer)."""
    if not isinstance(found, QTensor):
        return f"a {type(found).__name__} instead of a QTensor"
    if found.format != expected.format or tuple(found.shape) != tuple(expected.shape):
        return f"{found.format} {tuple(found.shape)} instead of {expected.format} {tuple(expected.shape)}"
    mine, other = found.tensors(), expected.tensors()
    return next((f"{name} differs" for name in other if not same_bits(mine[name], other[name])), "")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
