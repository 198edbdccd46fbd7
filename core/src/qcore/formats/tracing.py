"""The state of torch's dispatcher: eager, traced, under a transform, or under a dispatch mode."""

from __future__ import annotations

import torch
from torch import Tensor

# Torch has no public API for the state of its dispatcher.
_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_traced = torch._C._is_tracing  # noqa: SLF001


def runs_now(x: Tensor) -> bool:
    """Whether a call on x runs eagerly: no trace, fake tensor, dispatch mode or transform is active.

    A kernel may then call its implementation directly, which saves the 3 to 4 microseconds of torch's dispatch.
    An x with the negative bit (``c.conj().imag``) needs the op, too: memory holds ``-x``, the dispatcher negates it.
    """
    compiling = torch.compiler.is_compiling()
    eager = not (compiling or type(x) is not Tensor or x.is_neg() or _modes())
    return eager and _transforms() is None and not _traced()  # `is_traced`, spelled out: this runs at every call


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` or a transform of ``torch.func`` is active."""
    return _transforms() is not None or _traced()
