"""The state of torch's dispatcher: eager, traced, under a transform, or under a dispatch mode."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import stateless

# Torch has no public API for the state of its dispatcher.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_traced = torch._C._is_tracing  # noqa: SLF001
_functorch = torch._C._functorch  # noqa: SLF001


def runs_now(x: Tensor) -> bool:
    """Whether a call on x runs eagerly: no trace, fake tensor, dispatch mode or transform is active.

    A kernel may then call its implementation directly, which saves the 3 to 4 microseconds of torch's dispatch.
    An x with the negative bit (``c.conj().imag``) needs the op, too: memory holds ``-x``, the dispatcher negates it.
    """
    compiling = torch.compiler.is_compiling()
    eager = not (compiling or type(x) is not Tensor or x.is_neg() or _modes())
    return eager and _transforms() is None and not _traced()  # `is_traced`, spelled out: this runs at every call


def without_base(result: Tensor) -> Tensor:
    """The result of a kernel as a tensor of its own; if it is a view, in the memory of that view.

    Autograd forbids changes in place of views that were made without gradients or inside of a function of its own.
    torch's own layers return no views, so that models add residuals and activate in place. Only for results that
    nothing else refers to.
    """
    if not torch.compiler.is_compiling():
        if not result._is_view():  # noqa: SLF001 - no public way to ask
            return result
        # A tracer that works by dispatch does not see `data`: the result would become a constant.
        if type(result) is Tensor and not _modes() and not is_traced():
            return result.data
    alone: Tensor = torch.ops.aten._unsafe_view.default(result, result.shape)  # noqa: SLF001 - what F.linear does
    return alone


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` or a transform of ``torch.func`` is active."""
    return _transforms() is not None or _traced()


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or a level of forward-mode derivatives is active.

    Native code and ops of plugins neither see tangents nor record for a transform: without an error, their results
    would have no derivative.
    """
    return _transforms() is not None or forward_ad._current_level >= 0  # noqa: SLF001 - spelled out as in `runs_now`


def in_forward_mode() -> bool:
    """Whether derivatives are computed in forward mode: tensors may have tangents."""
    return forward_ad._current_level >= 0  # noqa: SLF001 - no public way


def outside_transforms() -> AbstractContextManager[object]:
    """Leave all transforms of ``torch.func``: inside of one, results have no memory that could be packed or kept."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of ``torch.func`` has wrapped ``tensor``: it differentiates it, or it is a batch."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def is_batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a batch of ``vmap``, whose values cannot be read."""
    while is_wrapped(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def unwrapped(tensor: Tensor) -> Tensor:
    """What the transforms of ``torch.func`` have wrapped; of a batch all of it."""
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def in_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` is running, so that modules hold the tensors that it was given.

    In a trace of `torch.compile` a constant.
    """
    wanted = stateless._functional_call.__code__  # noqa: SLF001
    frame: Any = sys._getframe()  # noqa: SLF001
    while frame is not None and frame.f_code is not wanted:
        frame = frame.f_back
    return frame is not None or any(code is wanted for code in _traced_code())


# What torch.compiler.assume_constant_result sets; calling that would import torch's compiler.
in_functional_call._dynamo_marked_constant = True  # type: ignore[attr-defined] # noqa: SLF001


def _traced_code() -> Iterator[object]:
    """Yield the code that torch.compile is tracing, the innermost first."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        tracer: Any = None if dynamo is None else dynamo.InstructionTranslator.current_tx().output.current_tx
    except AttributeError:  # nothing is being traced
        return
    while tracer is not None:
        yield tracer.f_code
        tracer = getattr(tracer, "parent", None)
