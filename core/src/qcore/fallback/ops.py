"""The torch ops of this plugin, by which a compiled graph calls its CPU kernels: it cannot call Python functions.

In eager mode, kernels call the Python functions directly, which saves a few microseconds of dispatch. The ops look at
the number of rows when they run, so that one graph works for every M.
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
"""Packs int32 codes 0..15 ``(N, K)`` for `int4_product`; None if torch lacks the op."""
int4_product: Callable[..., Tensor] | None = getattr(torch, "_weight_int4pack_mm_for_cpu", None)
"""Takes x ``(M, K)``, packed weight, group size, bfloat16 (scale, added zero) ``(G, N, 2)``; returns ``(M, N)``."""
int8_product: Callable[..., Tensor] | None = getattr(torch, "_weight_int8pack_mm", None)
"""Takes x ``(M, K)``, int8 weight ``(N, K)``, scale ``(N,)`` of x's dtype; returns ``(M, N)``."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Create real tensors on the CPU under any mode or default device of the caller, to probe an op."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        yield


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@lru_cache(maxsize=16)
def op(
    function: Callable[..., Tensor], fake: Callable[..., Tensor], keys: tuple[str, ...] = ("CPU", "MkldnnCPU")
) -> Callable[..., Tensor]:
    """Return ``function`` as the op ``qcore_torch::<name>``, registered on first use; ``fake`` is for tracing.

    ``keys``: the dispatch keys that it is registered for. MkldnnCPU: an argument is a weight prepacked by oneDNN.
    """
    name, library = function.__name__, _library()
    library.define(name + torch.library.infer_schema(function, mutates_args=()))  # type: ignore[no-untyped-call]
    for key in keys:
        library.impl(name, function, key)  # type: ignore[no-untyped-call]
    # register_fake would search all imported modules for the caller's source, which takes 4 ms, or 30 ms after
    # torch.compile. A Meta kernel works for fake tensors, too.
    library.impl(name, fake, "Meta")  # type: ignore[no-untyped-call]
    made: Any = getattr(getattr(torch.ops, NAMESPACE), name)
    return made.default  # type: ignore[no-any-return]
