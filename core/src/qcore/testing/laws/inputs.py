"""Laws on unusual inputs of a kernel: strides, no rows, NaN, indices out of range, torch's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...contracts import Problem
from ...discovery.kernels import Kernel
from ...discovery.registry import Guarded
from ...runtime.process_state import snapshot
from ...weights.activations import StaticFP8, StaticInt8
from ..check import BrokenLawError, first_lines, memory, resized
from ..target import Target
from .base import InapplicableError, Law, Sample, run_kernel

Packed = dict[str, Tensor]


def empty(target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Call the kernel with an x without rows."""
    problem = resized(sample.prepared.on(target.device), 0)
    result = run_kernel("empty", f"{kernel.name} with no rows", kernel, problem.to(target.device), packed)
    verdict = sample.prepared.contract.judge(problem, result)
    if not verdict.ok:
        raise BrokenLawError("empty", f"{kernel.name} with no rows: {verdict.message}")


def strides(target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check results for an x and a bias in unusual memory: expanded, transposed, at an offset, in a larger tensor."""
    for how, problem in _laid_out(sample.prepared.on(target.device)):
        bias = None if problem.bias is None else _moved(problem.bias, target.device)
        here = replace(problem.to(target.device), x=_moved(problem.x, target.device), bias=bias)
        result = run_kernel("strides", f"{kernel.name} with {how}", kernel, here, packed)
        verdict = sample.prepared.contract.judge(problem, result)
        if not verdict.ok:
            raise BrokenLawError("strides", f"{kernel.name} with {how}: {verdict.message}")


def _laid_out(plain: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the problem laid out otherwise in memory, and a description of each layout."""
    for how, x in _strided(plain.x):
        yield f"x {how}", replace(plain, x=x)
    if plain.request.contract == "linear" and plain.x.dim() == 2:
        turned = torch.stack((plain.x, plain.x.roll(1, 0), plain.x.roll(2, 0))).transpose(0, 1)
        given = {name: value.repeat_interleave(3) for name, value in plain.given.items()}
        yield "x of three dimensions, the first two transposed", replace(plain, x=turned, given=given)
    if plain.bias is not None:
        yield "a bias at an offset in memory", replace(plain, bias=_behind(plain.bias, 1))


def _strided(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield x with other strides and a description of each; the first is one row, expanded."""
    yield "one row expanded", x[:1].expand(x.shape)
    yield "every other element", torch.stack((x, x), dim=-1)[..., 0]
    yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
    around = torch.full([size + 2 for size in x.shape], _FOREIGN, dtype=x.dtype)
    inside = around[tuple(slice(1, -1) for _ in x.shape)]
    yield "inside of a larger tensor", inside.copy_(x)
    # As x[1:] of a contiguous tensor: all that tells it from a new one is its offset.
    yield "at an offset in memory", _behind(x, x[:1].numel())


_FOREIGN = 77
"""A conspicuous value, which a kernel gets that reads outside of x."""


def _behind(tensor: Tensor, offset: int) -> Tensor:
    """Copy a tensor to memory that begins ``offset`` elements before it."""
    around = torch.full((offset + tensor.numel(),), _FOREIGN, dtype=tensor.dtype)
    return around[offset:].view(tensor.shape).copy_(tensor)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """Copy the whole storage of x to ``device`` and return the same view of it."""
    return memory(x).clone().view(x.dtype).to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def nan(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check that a NaN in x makes NaN of every result that depends on it, and of no other.

    Under a static scale, and as int8 codes, those results are undefined; the others must be right all the same.
    """
    plain, prepared = sample.prepared.problem, sample.prepared
    if not plain.x.is_floating_point():
        raise InapplicableError("x holds no floats")
    x = plain.x.clone(memory_format=torch.contiguous_format)
    x.view(-1)[x.numel() * 3 // 5] = float("nan")
    what, here = f"{kernel.name} with a NaN in x", replace(sample.here, x=x.to(sample.here.x.device))
    result = run_kernel("nan", what, kernel, here, packed).cpu()
    request, activation = plain.request, plain.request.activation
    floats = replace(request, output=None) if request.output else request  # int8 codes would hide where NaN came to
    reached = prepared.contract.reference(replace(plain, x=x, request=floats)).isnan()
    if result.shape == reached.shape:
        undefined = request.output is not None or isinstance(activation, (StaticInt8, StaticFP8))
        lost = 0 if undefined else int((reached & ~result.isnan()).sum())
        if lost:
            raise BrokenLawError("nan", f"{what}: of {int(reached.sum())} results that depend on it {lost} are not NaN")
        result = torch.where(reached, prepared.reference(plain).to(result.dtype), result)
    verdict = prepared.judge(plain, result)
    if not verdict.ok:
        raise BrokenLawError("nan", f"{what}: a result that does not depend on it is wrong: {verdict.message}")


def indices(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check that on the CPU an index out of range raises `IndexError`."""
    here = sample.here
    if here.request.contract != "embedding" or here.x.device.type != "cpu":
        raise InapplicableError("there are no indices on the CPU")
    size = here.request.n
    for index in (-1, size, 2**31 - 1):
        x = here.x.clone()
        x.view(-1)[-1] = index
        what = f"{kernel.name} with the index {index} for {size} rows"
        try:
            kernel(x, packed, None)
        except IndexError:
            continue
        except Guarded as error:
            text = f"raised {type(error).__name__} instead of IndexError: {first_lines(error)}"
            raise BrokenLawError("indices", f"{what} {text}") from error
        raise BrokenLawError("indices", f"{what} raised nothing; it must raise IndexError")


def modes(_target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check that results are right in torch's modes: dtypes and accuracy are those of the request, autocast or not."""
    for name, mode in _modes(sample.here.x.device.type).items():
        with mode:
            here = replace(sample.here, x=sample.here.x.clone())
            result = run_kernel("modes", f"{kernel.name} under {name}", kernel, here, packed)
        verdict = sample.prepared.judge(sample.here, result)
        if not verdict.ok:
            raise BrokenLawError("modes", f"{kernel.name}: a wrong result under {name}: {verdict.message}")


def _modes(device: str) -> dict[str, contextlib.AbstractContextManager[Any]]:
    found: dict[str, contextlib.AbstractContextManager[Any]] = {
        "torch.inference_mode": torch.inference_mode(),
        "torch.enable_grad": torch.enable_grad(),
    }
    if torch.amp.is_autocast_available(device):
        found["torch.autocast"] = torch.autocast(device, torch.bfloat16)
    return found


def state(target: Target, sample: Sample, kernel: Kernel, packed: Packed) -> None:
    """Check that pack and a call change nothing of the process, from the second time on: the first ones import."""
    steps: dict[str, Callable[[], object]] = {
        "pack": lambda: kernel.pack(sample.here.weight),
        "a call": lambda: run_kernel("state", kernel.name, kernel, sample.here, packed),
    }
    target.baseline()  # the kernel has run before, and what it set then may stand
    restore = snapshot()
    try:
        torch.set_num_threads(2)  # other than what the kit sets
        torch.set_grad_enabled(True)
        for what, step in steps.items():
            changed = [_changed_by(step) for _ in range(2)][-1]
            if changed:
                raise BrokenLawError("state", f"{kernel.name}: {what} changed state of the process: {changed}")
    finally:
        restore()


def _changed_by(step: Callable[[], object]) -> str:
    """The names of what a step has changed, which is restored."""
    restore = snapshot()
    changed: list[str] = []
    try:
        step()
    finally:
        changed = restore()
    return ", ".join(changed)


LAWS = (
    Law("strides", "x and bias may have any strides and offsets, and their memory is unchanged", kernel=strides),
    Law("empty", "an x without rows gives a result without rows", kernel=empty),
    Law("nan", "a NaN in x makes NaN of the results that depend on it, and of no others", kernel=nan),
    Law("indices", "on the CPU an index out of range raises IndexError", kernel=indices),
    Law("state", "pack and calls change no state of the process, such as its default dtype or seed", kernel=state),
    Law("modes", "results are right under inference_mode, autocast and enable_grad", kernel=modes),
)
