"""The torch ops of this plugin: what its CPU kernels are in a compiled graph, where a Python function cannot be.

In eager mode kernels call the functions themselves, which saves the few microseconds of a dispatch. The ops look at
the number of rows when they run, so that one graph serves every M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "qcore_torch"

int4_pack: Callable[..., Tensor] | None = getattr(torch, "_convert_weight_to_int4pack_for_cpu", None)
"""int32 codes 0..15 ``(N, K)`` to the packed form that `int4_product` takes."""
int4_product: Callable[..., Tensor] | None = getattr(torch, "_weight_int4pack_mm_for_cpu", None)
"""x ``(M, K)``, packed weight, group size, bfloat16 (scale, added zero) ``(G, N, 2)`` to ``(M, N)``."""
int8_product: Callable[..., Tensor] | None = getattr(torch, "_weight_int8pack_mm", None)
"""x ``(M, K)``, int8 weight ``(N, K)``, scale ``(N,)`` of x's dtype to ``(M, N)``."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Real tensors on the CPU, whatever mode or default device the caller has set: for looking at what an op does."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        yield


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@lru_cache(maxsize=16)
def op(function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as the CPU op ``qcore_torch::<its name>``, registered at first use; ``fake`` serves tracing."""
    name, library = function.__name__, _library()
    library.define(name + torch.library.infer_schema(function, mutates_args=()))  # type: ignore[no-untyped-call]
    for key in ("CPU", "MkldnnCPU"):  # the second takes over where an argument is a weight prepacked by oneDNN
        library.impl(name, function, key)  # type: ignore[no-untyped-call]
    # Not register_fake: that one looks for the caller's source among all modules imported: 4 ms, and 30 after
    # torch.compile. Fake tensors ask a Meta kernel just as well.
    library.impl(name, fake, "Meta")  # type: ignore[no-untyped-call]
    made: Any = getattr(getattr(torch.ops, NAMESPACE), name)
    return made.default  # type: ignore[no-any-return]
