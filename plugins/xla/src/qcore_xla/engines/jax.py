"""Torch CPU and CUDA tensors by DLPack, without copies, and `jax.jit`.

Tensors that stay the same are converted once, and the arrays are kept as long as the tensors live. `run` waits for a
result before it returns it (on a GPU, torch's stream does), so that torch cannot overwrite memory that JAX still reads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qcore import PluginError

from .. import environment
from ..memo import Memo

Size = tuple[int, int] | None
_NUMPY = {torch.float32, torch.int8, torch.int32}


class JaxEngine:
    """See `qcore_xla.engines.base.Engine`."""

    name = "jax"

    def __init__(self) -> None:
        self._arrays: Memo[Any] = Memo(_shared_array)
        self._lock = threading.Lock()

    def why_not(self, device: torch.device) -> str:
        """Looks at the environment and at package metadata only."""
        return environment.why_not(device.type)

    def run(
        self, function: Callable[..., Any], form: Any, tensors: Sequence[Any], fresh: Sequence[int], size: Size = None
    ) -> Tensor:
        if environment.forked:
            raise PluginError(
                "this process was forked from one that had used JAX, and JAX does not work after a fork.\n"
                "Start workers with the 'spawn' method: torch.multiprocessing.set_start_method('spawn')."
            )
        if isinstance(tensors[0], np.ndarray):
            return self._retried(function, form, tensors, fresh, size)
        with device_of(tensors):
            return self._retried(function, form, tensors, fresh, size)

    def _retried(
        self, function: Callable[..., Any], form: Any, tensors: Sequence[Any], fresh: Sequence[int], size: Size
    ) -> Tensor:
        try:
            return self._run(function, form, tensors, fresh, size)
        except Exception:  # noqa: BLE001 - a call that fails for another reason fails again in the retry
            with _apart():
                return self._run(function, form, tensors, fresh, size)

    def _run(
        self, function: Callable[..., Any], form: Any, tensors: Sequence[Any], fresh: Sequence[int], size: Size
    ) -> Tensor:
        if isinstance(tensors[0], Tensor) and tensors[0].is_cuda:
            return self._run_on_gpu(function, form, tensors, fresh)
        kept = self._arrays.get
        arrays = [
            None if tensor is None else _fresh(tensor) if i in fresh else kept(tensor)
            for i, tensor in enumerate(tensors)
        ]
        y = jitted(function, form)(*arrays)
        array = np.asarray(y)  # waits for it
        if array.nbytes > _SMALL:
            return writable(array)
        return torch.from_numpy((array if size is None else array[..., : size[0], : size[1]]).copy())

    def _run_on_gpu(
        self, function: Callable[..., Any], form: Any, tensors: Sequence[Any], fresh: Sequence[int]
    ) -> Tensor:
        arrays = [None if t is None or i in fresh else self._arrays.get(t) for i, t in enumerate(tensors)]
        own = [i for i in fresh if tensors[i] is not None]
        with self._lock:  # of the places of fresh arguments
            for i, array in zip(own, _on_gpu([tensors[i] for i in own]), strict=True):
                arrays[i] = array
            y: Tensor = _crossing().tensor_of(jitted(function, form)(*arrays), tensors[0].device)
            return y


_SMALL = 1 << 15
"""Bytes of a result that is copied in less time than it takes to make its memory writable."""


def device_of(tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The tensors' GPU as torch's current device: torch exports memory of the current device only."""
    first = next((tensor for tensor in tensors if tensor is not None), None)
    if first is None or not first.is_cuda:
        return contextlib.nullcontext()
    _start_on_gpus()
    return contextlib.nullcontext() if _only_gpu() else torch.cuda.device(first.device)


@contextlib.contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """What runs without a tensor, which would say where, runs on ``device``."""
    import jax

    with device_of([torch.empty(0, device=device)]):  # starts JAX, where it has to be told how
        own = jax.devices("gpu" if device.type == "cuda" else "cpu")[device.index or 0]
        with jax.default_device(own):
            yield


@lru_cache(maxsize=1)
def _only_gpu() -> bool:
    return torch.cuda.device_count() == 1


@lru_cache(maxsize=1)
def _start_on_gpus() -> None:
    """Initialize JAX's devices, and restore the thread's current GPU, which JAX sets to the last one."""
    import jax

    before = torch.cuda.current_device()
    try:
        jax.devices()
    finally:
        torch.cuda.set_device(before)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Ignore the program's JAX state: an active trace, a transfer guard.

    Torch tensors are not subject to either. Entering this takes longer than many calls, so only failed calls do.
    """
    import jax

    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        yield


class _Memory:
    """The memory of an array that NumPy treats as read-only, as it does all arrays of JAX."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, array: Any) -> None:
        self.owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def writable(array: Any) -> Tensor:
    """A tensor on the memory of a result, as its only user: DLPack takes 20 us longer."""
    return torch.from_numpy(np.asarray(_Memory(array)))


def _fresh(tensor: Any) -> Any:
    """An array for one call: next to a committed weight, a NumPy array is enough, and takes 1 us instead of 30."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.dtype in _NUMPY and not tensor.is_cuda:
        return tensor.detach().resolve_neg().numpy()
    return _array(tensor)


def _on_gpu(tensors: Sequence[Tensor]) -> list[Any]:
    """Arrays for one call: small tensors are copied to places that JAX knows."""
    on_gpu = bool(tensors) and all(tensor.is_cuda for tensor in tensors)
    found = _inboxes().arrays(tensors) if on_gpu else None
    return [_fresh(tensor) for tensor in tensors] if found is None else found


@lru_cache(maxsize=1)
def _crossing() -> Any:
    from . import crossing  # which imports JAX

    return crossing


@lru_cache(maxsize=1)
def _inboxes() -> Any:
    from .inbox import Inboxes

    return Inboxes()


def _array(tensor: Tensor) -> Any:
    return _from_dlpack()(tensor.detach().resolve_neg())


def _shared_array(tensor: Tensor) -> tuple[Any, bool]:
    array = _array(tensor)
    return array, array.unsafe_buffer_pointer() == tensor.data_ptr()  # misaligned memory is copied


@lru_cache(maxsize=1)
def _from_dlpack() -> Callable[[Tensor], Any]:
    from jax import dlpack

    return dlpack.from_dlpack


_jitted: dict[tuple[int, int], tuple[Any, Any, Callable[..., Any]]] = {}


def jitted(function: Callable[..., Any], form: Any) -> Callable[..., Any]:
    """`compiled`, found by the identity of a form: hashing one takes a few microseconds."""
    found = _jitted.get((id(function), id(form)))
    if found is not None and found[1] is form:
        return found[2]
    made = compiled(function, form)
    if len(_jitted) >= _KEPT:
        _jitted.clear()
    _jitted[id(function), id(form)] = function, form, made
    return made


_KEPT = 4096


@lru_cache(maxsize=_KEPT)
def compiled(function: Callable[..., Any], form: Any) -> Callable[..., Any]:
    """``function`` jitted for one form: layers with the same form and shapes share the compiled program."""
    import jax

    def body(*arrays: Any) -> Any:
        _note_program()  # runs while a program is traced
        # The functions rely on rank promotion; the user's program may forbid it.
        with jax.numpy_rank_promotion("allow"):
            return function(*arrays, form=form)

    return jax.jit(body)


_MOST_PROGRAMS = 1000
"""Programs that are kept. Each takes some 32 mappings of memory, of which Linux gives a process 65530 by default; XLA
crashes where there are none left."""
_programs = 0


def _note_program() -> None:
    """Count a new program, and drop the old ones when there are too many."""
    global _programs  # noqa: PLW0603 - of the process, like the programs
    _programs += 1
    if _programs > _MOST_PROGRAMS:
        _programs = 1
        compiled.cache_clear()
        _jitted.clear()


ENGINE = JaxEngine()
