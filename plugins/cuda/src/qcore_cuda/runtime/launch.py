"""Launching Triton kernels with little work on the host.

Triton inspects every argument and option at each launch, which takes longer than a small product. Here a compiled
kernel is looked up by the few properties that Triton specializes on, and launched with raw pointers. This depends on
the signature of Triton's launcher, which is not a public interface: it is used with the versions of Triton that it was
tested with; with any other version, kernels are launched through Triton's own interface.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .device import Device, enter_context
from .replay import Launch, TensorMaps, recording

_TESTED = ("3.6.",)

_Found = tuple[Any, tuple[Any, ...]]
"""A compiled kernel, and its constexprs in the order of its parameters."""
_compiled: dict[tuple[Any, ...], _Found] = {}
# ruff: noqa: SLF001 - the raw stream has no public name


@lru_cache(maxsize=1)
def _quick() -> bool:
    import triton

    ordinary = os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None
    return not ordinary and triton.__version__.startswith(_TESTED)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run a Triton kernel on the current device and stream.

    ``args``: tensors, their descriptors, numbers or None for the first parameters; ``meta``: constexprs and options of
    the launch. A recording in progress records the launch, see `replay`.
    """
    found, notes = _launch(kernel, grid, args, meta), recording()
    if notes is not None:
        notes.launched(None if found is None else _relaunch(*found, grid, args))


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> _Found | None:
    """Returns the launched kernel and its constexprs, or None if it was launched through Triton's own interface."""
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
            # Triton may specialize on these properties: its size, 1, and multiples of 16.
            facts.append((-(1 << 31) <= arg < 1 << 31, arg == 1, arg % 16 == 0))
            values.append(arg)
        elif arg is None or isinstance(arg, float):
            facts.append(type(arg))
            values.append(arg)
        else:  # a tensor descriptor, whose sizes Triton does not specialize on; in Gluon it has a layout
            enter_context()
            facts.append((arg.base.dtype, *arg.block_shape, getattr(arg, "layout", None)))
            values.append(arg)
    key = tuple(facts)
    found = _compiled.get(key)
    if found is None:
        compiled = _first(kernel, grid, args, meta)
        found = _compiled[key] = compiled, tuple(meta[name] for name in kernel.arg_names[len(args) :])
        return found
    compiled, constants = found
    stream = torch._C._cuda_getCurrentRawStream(index)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants)
    return found


def supports_dynamic_shared() -> bool:
    """Whether a kernel can get more shared memory than Triton allocates: DYNAMIC bytes, a constexpr."""
    return _quick()


_first_launch = threading.Lock()
"""If several threads compile a kernel, Triton keeps the result of the last: one thread compiles at a time."""


def _first(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> Any:
    """Compile, load and launch a kernel."""
    more = meta.get("DYNAMIC")
    if not more:
        return kernel[grid](*args, **meta)
    with _first_launch:
        asked = kernel.warmup(*args, grid=grid, **meta)
        _ask(asked, more)
        compiled = kernel[grid](*args, **meta)
    if compiled is not asked:
        raise RuntimeError(f"{asked.metadata.name}: Triton launched a different kernel than it had compiled.")
    return compiled


def _ask(compiled: Any, more: int) -> None:
    """Give a kernel that is not loaded yet ``more`` bytes of shared memory, after Triton's own scratch."""
    from ..kernels.smem_pipeline import scratch

    facts = compiled.metadata
    own = scratch(facts.num_warps)
    if facts.shared == own + more:
        return
    if facts.shared > own:
        raise RuntimeError(f"{facts.name}: Triton uses {facts.shared} bytes of shared memory, more than {own}.")
    compiled.metadata = facts._replace(shared=own + more)
    compiled.packed_metadata = (facts.num_warps, facts.num_ctas, own + more)


def _relaunch(compiled: Any, constants: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...]) -> Launch | None:
    """How to repeat the launch; None if the kernel needs scratch memory, which only Triton can provide."""
    run, plain = compiled.run, [arg is None or isinstance(arg, (int, float)) for arg in args]
    count = plain.count(False)
    if run.global_scratch_size or run.profile_scratch_size or any(plain[:count]):
        return None
    tensors, numbers = args[:count], args[count:]
    x, y, z = (*grid, 1, 1)[:3]
    options = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)
    launcher, maps = _with_maps(run.launch, tensors)
    return Launch(launcher, (x, y, z), (compiled.function, *options), tensors, (*numbers, *constants), maps)


def _with_maps(launcher: Any, tensors: tuple[Any, ...]) -> tuple[Any, Mapping[int, TensorMaps]]:
    """The launcher that takes tensor maps in place of descriptors, and the maps of each descriptor by its position.

    Triton encodes every descriptor at every launch, in Python: that takes longer than everything else. If its launcher
    is not built as in the versions that this was tested with, it gets descriptors.
    """
    described = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, Tensor)]
    cells = getattr(launcher, "__closure__", None) or ()
    inner = (
        dict(zip(launcher.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if cells else {}
    )
    metas = inner.get("tensordesc_meta") or ()
    plain = all(meta is not None and not meta["fp4_padded"] for meta in metas)
    if not described or "launcher" not in inner or len(metas) != len(described) or not plain:
        return launcher, {}
    from triton.backends.nvidia.driver import make_tensordesc_arg

    made = zip(described, metas, strict=True)
    return inner["launcher"], {i: TensorMaps(tensors[i], meta, make_tensordesc_arg) for i, meta in made}


@lru_cache(maxsize=512)
def options(device: Device, warps: int) -> Mapping[str, Any]:
    """Options of a launch: warps per program, and whether it may start before the previous one has ended."""
    if device.dependent:
        return {"PDL": True, "num_warps": warps, "launch_pdl": True}
    return {"PDL": False, "num_warps": warps}
