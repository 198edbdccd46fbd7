"""Launching Triton kernels at little cost to the host.

Triton looks at every argument and option each time a kernel is launched, which takes longer than a small product runs.
Here a compiled kernel is found by the few facts that it was compiled for, and started with plain addresses. This
rests on how Triton hands a compiled kernel its arguments, which is no public interface: so it is used with the versions
that it was tried with, and any other launches the ordinary way.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .device import Device

_TRIED = ("3.6.",)

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
# ruff: noqa: SLF001 - the raw stream has no public name


@lru_cache(maxsize=1)
def _quick() -> bool:
    import triton

    ordinary = os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None
    return not ordinary and triton.__version__.startswith(_TRIED)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, again: bool = False, **meta: Any) -> Start | None:
    """Run a Triton kernel on the current device and stream.

    ``args``: tensors, numbers or None for the kernel's first parameters; ``meta``: its constexprs and launch options.
    ``again``: return what starts the same kernel again, for calls that differ in nothing but the addresses of tensors,
    where there is such a thing.
    """
    if not _quick():
        kernel[grid](*args, **meta)
        return None
    index = torch._C._cuda_getDevice()
    facts: list[Any] = [kernel, index, *meta.values()]
    values: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            facts.append(arg.dtype if address % 16 == 0 else (arg.dtype, False))
            values.append(address)
        elif isinstance(arg, int):
            # What Triton may specialise on: its size, 1, and multiples of 16.
            facts.append((-(1 << 31) <= arg < 1 << 31, arg == 1, arg % 16 == 0))
            values.append(arg)
        elif arg is None or isinstance(arg, float):
            facts.append(type(arg))
            values.append(arg)
        else:  # a tensor descriptor: Triton takes it apart
            kernel[grid](*args, **meta)
            return None
    key = tuple(facts)
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **meta)
        _compiled[key] = compiled, tuple(meta[name] for name in kernel.arg_names[len(args) :])
        return None
    compiled, constants = found
    stream = torch._C._cuda_getCurrentRawStream(index)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants)
    if not again:
        return None
    numbers = (value for value, arg in zip(values, args, strict=True) if not isinstance(arg, Tensor))
    return Start.of(compiled, (x, y, z), index, (*numbers, *constants))


def options(device: Device, warps: int) -> dict[str, Any]:
    """Options of a launch: warps per program, and whether it may start before the previous one has ended."""
    if device.dependent:
        return {"PDL": True, "num_warps": warps, "launch_pdl": True}
    return {"PDL": False, "num_warps": warps}


class Start:
    """Starts one compiled kernel with one grid and one set of numbers: a call names the addresses of its tensors.

    The tensors must be the kernel's first parameters, on the current device, and on 16 bytes as those it was made with.
    """

    __slots__ = ("_after", "_before", "_index", "_run")

    def __init__(self, run: Any, before: tuple[Any, ...], after: tuple[Any, ...], index: int) -> None:
        self._run, self._before, self._after, self._index = run, before, after, index

    @classmethod
    def of(cls, compiled: Any, grid: tuple[int, int, int], index: int, numbers: tuple[Any, ...]) -> Start | None:
        """None where the kernel wants scratch memory, which only Triton knows how to provide."""
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)
        return cls(run.launch, (*grid, compiled.function, *flags), numbers, index)

    def __call__(self, *addresses: int) -> None:
        """Start it on the current stream."""
        x, y, z, function, *flags = self._before
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        self._run(x, y, z, stream, function, *flags, *addresses, *self._after)
