"""Check one case: request it from the plugin and test every kernel that the plugin offers."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..contracts import Problem
from ..discovery.kernels import Kernel
from ..discovery.registry import Guarded
from ..formats import ScaleType, ZeroPoint
from ..formats.bits import raw
from ..resolving.verification import difference, same_bits
from ..weights.qtensor import QTensor
from .case_selection import PreparedCase
from .fallback_watch import Watch
from .results import Outcome, Result
from .target import Target


@dataclass(frozen=True)
class Fault:
    """The law that a kernel broke on a case, and an explanation."""

    law: str
    text: str


class BrokenLawError(Exception):
    """A kernel broke a law; carries the `Fault`."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(text)
        self.fault = Fault(law, text)


def check_case(target: Target, prepared: PreparedCase) -> Result:
    """Return the result of one case for one plugin, before known gaps are applied."""
    start, case = time.perf_counter(), prepared.case

    def result(outcome: Outcome, reason: str = "", law: str = "", **more: Any) -> Result:
        seconds = time.perf_counter() - start
        return Result(case.id, law, case.contract, case.scheme, outcome, reason, seconds=seconds, **more)

    problem = prepared.on(target.device)
    answer = target.ask(problem.request)
    if answer.broken:
        return result(Outcome.FAILED, answer.reason, "refusals")
    if not answer.kernels:
        return result(Outcome.REFUSED, answer.reason)
    here, worst = problem.to(target.device), 0.0
    names = tuple(str(getattr(kernel, "name", kernel)) for kernel in answer.kernels)
    for kernel, name in zip(answer.kernels, names, strict=True):
        error, fault = outcome_of(target, kernel, prepared, here)
        worst = max(worst, error)
        if fault is not None:
            return result(Outcome.FAILED, f"{name}: {fault.text}", fault.law, kernels=names, worst=worst)
    return result(Outcome.PASSED, kernels=names, worst=worst)


def outcome_of(target: Target, kernel: Kernel, prepared: PreparedCase, here: Problem) -> tuple[float, Fault | None]:
    """Return error / allowed error of the worst element, and the law that the kernel broke, if any."""
    try:
        return try_kernel(target, kernel, prepared, here), None
    except BrokenLawError as broken:
        return float("inf") if broken.fault.law == "results" else 0.0, broken.fault
    except Guarded as error:  # an accelerator may report an error only when its result is fetched
        return 0.0, Fault("raises", described_error(error))


def try_kernel(target: Target, kernel: Kernel, prepared: PreparedCase, here: Problem) -> float:
    """Pack, unpack, run and judge; returns error / allowed error of the worst element. Raises `BrokenLawError`."""
    check_origin(target, kernel)
    packed = pack_and_check(kernel, here)
    output = run_watched(target, kernel, here, packed)
    verdict = prepared.judge(here, output)
    if not verdict.ok:
        raise BrokenLawError("results", f"wrong result for x of shape {tuple(here.x.shape)}: {verdict.message}")
    return verdict.worst


def check_origin(target: Target, kernel: Kernel) -> None:
    """Raise `BrokenLawError` unless the kernel belongs to the plugin and has its name prefix."""
    if not isinstance(kernel, Kernel):
        raise BrokenLawError("origin", f"offered a {type(kernel).__name__}, which is not a qcore.Kernel")
    name = getattr(kernel, "name", None)
    if not isinstance(name, str) or not name.startswith(f"{target.name}."):
        raise BrokenLawError(
            "origin", f"the kernel is called {name!r}; a kernel of this plugin is called '{target.name}.something'"
        )
    if getattr(kernel, "name", None) != name:
        raise BrokenLawError("origin", f"the kernel {name!r} has another name each time it is read")
    if not target.is_fallback and type(kernel).__module__.startswith("qcore."):
        raise BrokenLawError("origin", f"offers qcore's own {type(kernel).__qualname__} as if it were the plugin's")


def pack_and_check(kernel: Kernel, here: Problem) -> dict[str, Tensor]:
    """Pack the problem's weight, which must stay as it is, and check that unpacking restores it bit for bit."""
    before = here.weight.map(Tensor.clone)
    packed = packed_by(kernel, here.weight)
    if changed := difference(here.weight, before):
        raise BrokenLawError("pack", f"pack changed the weight that it was given: {changed}")
    # Layers share kernels: a weight that is packed in between makes no difference, unless the kernel holds one.
    packed_by(kernel, _other(before))
    if lost := _lost(kernel, packed, before):
        held = not _lost(kernel, packed_by(kernel, before), before)
        why = "; only the weight that was packed last is right: a kernel must not hold one" if held else ""
        raise BrokenLawError("pack", f"unpack(pack(w)) is not w: {lost}{why}")
    elsewhere = {key: str(t.device) for key, t in packed.items() if t.device.type != here.weight.device.type}
    if elsewhere:
        raise BrokenLawError("pack", f"pack left tensors on another device than the weight's: {elsewhere}")
    return packed


def _lost(kernel: Kernel, packed: dict[str, Tensor], weight: QTensor) -> str:
    return difference(guarded("raises", "unpack", lambda: kernel.unpack(packed)), weight)


def packed_by(kernel: Kernel, weight: QTensor) -> dict[str, Tensor]:
    """Pack a weight. Raises `BrokenLawError` unless the result is a dict of tensors by name."""
    packed: Any = guarded("raises", "pack", lambda: kernel.pack(weight))
    if not isinstance(packed, dict):
        raise BrokenLawError("pack", f"pack returned {described(packed)} instead of a dict of tensors")
    for key, value in packed.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise BrokenLawError("pack", f"pack returned {described(value)} as {key!r} instead of a tensor by name")
    return packed


def _other(weight: QTensor) -> QTensor:
    """Another weight of the same format: the same rows in reverse, and scales of another dtype if there are several."""
    rows = {"data": weight.dim() - 2, "scale": -1, "zero": -1}
    tensors = {name: raw(t).flip(rows[name]).view(t.dtype) for name, t in weight.tensors().items() if name in rows}
    if weight.format.scale is ScaleType.FLOAT:
        dtype = torch.bfloat16 if weight.scale.dtype == torch.float32 else torch.float32
        floats = ("scale", "zero") if weight.format.zero is ZeroPoint.FLOAT else ("scale",)
        tensors |= {name: tensors[name].to(dtype) for name in floats}
    return weight.derived(**tensors)


def described(value: object) -> str:
    """Return what a hook or kernel returned in place of a tensor, in words."""
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def run_watched(target: Target, kernel: Kernel, here: Problem, packed: Mapping[str, Tensor]) -> Any:
    """Call the kernel. Raises `BrokenLawError` if it changes its inputs or delegates the work to qcore."""
    with inputs_unchanged(here, packed):
        with threads_for(here), Watch(is_fallback=target.is_fallback) as watch:
            output = guarded("raises", "its call", lambda: kernel(here.x, packed, here.bias, **here.given))
        if watch.entered:
            entered = watch.entered[0]
            raise BrokenLawError("no-fallback", f"falls back secretly: its call entered qcore's {entered}")
    return output


@contextlib.contextmanager
def inputs_unchanged(here: Problem, packed: Mapping[str, Tensor], who: str = "") -> Iterator[None]:
    """Raise if the block changes x, bias, per-token parameters or packed weight, or memory between their strides."""
    inputs = _tensors(here, packed)
    before = {name: memory(tensor).clone() for name, tensor in inputs.items()}
    yield
    changed = [name for name, tensor in inputs.items() if not same_bits(memory(tensor), before[name])]
    if changed:
        raise BrokenLawError("inputs", f"{who}changed its input in place: {', '.join(changed)}")


_PLAIN_MEMORY = ("cpu", "cuda", "xpu")
"""Devices whose memory torch can read byte by byte."""


def memory(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes, including gaps between its strides.

    If torch cannot read the storage, the tensor itself (dense) is returned.
    """
    if tensor.layout is not torch.strided:  # oneDNN's own layouts cannot be compared
        return tensor.to_dense()
    if type(tensor) is not Tensor or tensor.device.type not in _PLAIN_MEMORY:
        return tensor
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


_THREADS = torch.get_num_threads()
_LARGE = 1 << 20
"""Number of multiplications from which a kernel may use all threads of torch."""


@contextlib.contextmanager
def threads_for(here: Problem) -> Iterator[None]:
    """Enable all threads for a large problem, so that parallel code paths of kernels are tested, too."""
    before = torch.get_num_threads()
    size = here.x.numel() * (here.request.n if here.request.contract != "embedding" else here.request.k)
    torch.set_num_threads(_THREADS if size >= _LARGE else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits, including NaN, for any memory layout."""
    return same_bits(*(memory(t.clone(memory_format=torch.contiguous_format)) for t in (a, b)))


def _tensors(here: Problem, packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {"x": here.x, **here.given, **{f"packed {key}": value for key, value in packed.items()}}
    return named if here.bias is None else {**named, "bias": here.bias}


def guarded(law: str, what: str, call: Callable[[], Any]) -> Any:
    """Return the result of a call; what it raises breaks the law."""
    try:
        return call()
    except Guarded as error:
        raise BrokenLawError(law, f"{what} raised {described_error(error)}") from error


def described_error(error: BaseException) -> str:
    """Return an exception's type and text, and the innermost line of the plugin: ``(in w8a16, kernels.py:27)``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_plugins(frame.filename)]
    where = f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_lines(error)}{where}"


_OTHERS = (*(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)), "<")
"""Where the files of qcore and torch begin, and the names of code without a file."""


def _is_plugins(file: str) -> bool:
    of_python = file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file
    return not of_python and not file.startswith(_OTHERS)


def first_lines(error: BaseException, most: int = 400) -> str:
    """Return an exception's text, cut to fit a report."""
    text = str(error).strip()
    return text if len(text) <= most else f"{text[:most]} ..."


def resized(problem: Problem, rows: int) -> Problem:
    """Return the problem with ``rows`` rows (images, indices), repeating its own rows as needed."""
    have = max(1, problem.x.shape[0])
    index = torch.arange(rows) % have
    given = {
        name: ends_within(value, 0, rows) if name == "offsets" else value[index]
        for name, value in problem.given.items()
    }
    return replace(problem, x=problem.x[index], given=given)


def ends_within(offsets: Tensor, start: int, stop: int) -> Tensor:
    """Return the ends of the experts' rows among the rows ``start .. stop``."""
    return (offsets - start).clamp(0, stop - start)
