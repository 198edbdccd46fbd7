"""Float steps on a device: operands from tensors, and what a step makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qcore_vulkan.builder import Builder, Place, Ref
from qcore_vulkan.device import Device
from qcore_vulkan.steps.operand import Operand, over

WORD = {torch.bool: torch.int32, torch.int64: torch.int32}


class Runner:
    """Collects the steps of one program; its operands have the strides of their tensors."""

    def __init__(self, device: Device):
        self.b = Builder(device)
        self._inputs: list[tuple[Place, Tensor]] = []

    def operand(self, x: Tensor) -> Operand:
        """A tensor on the device, as a view of all of its storage."""
        flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        dtype = {torch.int64: torch.int32}.get(x.dtype, x.dtype)
        words = flat.to(WORD.get(x.dtype, x.dtype)).contiguous()
        ref = self.b.input(words.nbytes)
        self._inputs.append((Place(ref, 1, words.nbytes, words.nbytes), words))
        return Operand(ref, tuple(x.shape), x.stride(), dtype, x.storage_offset())

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> Operand:
        """Contiguous memory that the host reads."""
        size = 4 * max(1, torch.Size(shape).numel())
        return over(self.b.output(size), shape, dtype)

    def read(self, *results: Operand) -> list[Tensor]:
        """Run, and return operands, whatever their memory."""
        places, memory = [], []
        for x in results:
            ref: Ref = x.ref
            if not isinstance(ref.buffer, int) or ref.buffer != 3:
                ref = self.b.output(x.ref.bytes)
                self.b.copy(x.ref, ref)
            places.append(Place(ref, 1, ref.bytes, ref.bytes))
            word = torch.float32 if x.dtype == torch.float32 else torch.int32
            memory.append(torch.empty(ref.bytes // 4, dtype=word))
        self.b.program([place for place, _ in self._inputs], places).run([x for _, x in self._inputs], memory)
        values = [m.as_strided(x.shape, x.strides, x.offset).clone() for m, x in zip(memory, results, strict=True)]
        return [v.bool() if x.dtype == torch.bool else v for v, x in zip(values, results, strict=True)]


def run(device: Device, step: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """``step(b, ...)`` with tensors as operands; its result, or its results, as tensors."""
    assert next(iter(inspect.signature(step).parameters)) == "b"
    runner = Runner(device)
    args = tuple(runner.operand(x) if isinstance(x, Tensor) else x for x in args)
    more = {name: runner.operand(x) if isinstance(x, Tensor) else x for name, x in more.items()}
    made = step(runner.b, *args, **more)
    return runner.read(*made) if isinstance(made, tuple) else runner.read(made)[0]
